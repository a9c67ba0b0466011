"""The probe of the network measures real processes."""

import subprocess
import sys
from pathlib import Path

from conftest import ROOT, slm

from slm_toolkit.hardware.network import (
    COLLECTIVES,
    fit,
    read_network,
)


def test_real_processes_are_measured(tmp_path: Path) -> None:
    launching = ("--config_file", str(ROOT / "accel_configs/ddp.yaml"), "--num_processes", "2")
    probe = ("-m", "slm_toolkit.run.network_probe", "--output", str(tmp_path / "network.json"))
    done = slm("launch", *launching, *probe)
    assert done.code == 0, done.err
    network = read_network(tmp_path / "network.json")
    assert f"network: {tmp_path / 'network.json'}" in done.out
    assert all(f"{collective}: latency " in done.out for collective in COLLECTIVES)
    assert (network.world_size, network.num_nodes, network.gpus_per_node) == (2, 1, 2)
    assert "-m slm_toolkit.run.network_probe" in network.command
    for collective in COLLECTIVES:
        timings = [timing for timing in network.timings if timing.collective == collective]
        assert [timing.num_bytes for timing in timings][:2] == [64 * 2**10, 256 * 2**10]
        assert all(timing.seconds > 0 and len(timing.all_seconds) > 1 for timing in timings)
        assert fit(network, collective).latency_seconds >= 0


def test_the_module_refuses_one_process(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "slm_toolkit.run.network_probe")
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: the network probe needs two or more processes\nhint: accelerate launch" in done.stderr
