"""`--probe_network` measures real processes."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import slm

from slm_toolkit.hardware.network import (
    COLLECTIVES,
    fit,
    read_network,
)


def test_real_processes_are_measured(tmp_path: Path) -> None:
    words = ("--num_processes", "2", "--output_dir", str(tmp_path))
    done = slm("compare", "--probe_network", *words)
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--probe_network", "--num_processes", "1"], "--probe_network with 1 process: it needs two or more"),
        (["--probe_network", "--model", "slm-1m"], "--model with --probe_network, which does not train"),
    ],
)
def test_what_a_probe_can_not_do_is_refused(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = slm("compare", *arguments, cwd=tmp_path)
    assert done.code == 2
    assert says in done.err
    assert "hint: " in done.err
    assert list(tmp_path.iterdir()) == []


def test_the_module_refuses_one_process(tmp_path: Path) -> None:
    words = (sys.executable, "-m", "slm_toolkit.run.network_probe")
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: the network probe needs two or more processes\nhint: accelerate launch" in done.stderr
