"""The probe of the network measures real processes."""

from pathlib import Path

from conftest import ROOT, slm

from slm_toolkit.hardware.network import (
    COLLECTIVES,
    fit,
    read_network,
)

PROBE = str(ROOT / "bench" / "network_probe.py")


def test_real_processes_are_measured(tmp_path: Path) -> None:
    launching = ("--config_file", str(ROOT / "accel_configs/ddp.yaml"), "--num_processes", "2")
    done = slm("launch", *launching, PROBE, "--output", str(tmp_path / "network.json"))
    assert done.code == 0, done.err
    network = read_network(tmp_path / "network.json")
    assert f"network: {tmp_path / 'network.json'}" in done.out
    assert (network.world_size, network.num_nodes, network.gpus_per_node) == (2, 1, 2)
    assert "bench/network_probe.py" in network.command
    for collective in COLLECTIVES:
        timings = [timing for timing in network.timings if timing.collective == collective]
        assert [timing.num_bytes for timing in timings][:2] == [64 * 2**10, 256 * 2**10]
        assert all(timing.seconds > 0 and len(timing.all_seconds) > 1 for timing in timings)
        assert fit(network, collective).latency_seconds >= 0


def test_one_process_is_refused() -> None:
    done = slm("launch", "--config_file", str(ROOT / "accel_configs/single.yaml"), PROBE)
    assert "error: the network probe needs two or more processes\nhint: " in done.err
