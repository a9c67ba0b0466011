"""What a network was measured to do, and the line that predicts from it."""

import dataclasses
import json
from pathlib import Path

import pytest

from slm_toolkit.hardware.network import (
    COLLECTIVES,
    CollectiveTiming,
    MeasuredNetwork,
    bus_bytes_per_second,
    fit,
    read_network,
    write_network,
)

SIZES = (64 * 2**10, 2**20, 256 * 2**20)


def made(*seconds_of_size: float, sizes: tuple[int, ...] = SIZES) -> MeasuredNetwork:
    """Eight H100s in one node, where every collective takes the given times."""
    timings = tuple(
        CollectiveTiming(collective, num_bytes, took, (took, took))
        for collective in COLLECTIVES
        for num_bytes, took in zip(sizes, seconds_of_size, strict=True)
    )
    return MeasuredNetwork(
        8, 1, 8, "nccl", "NVIDIA H100 80GB HBM3", "2026-01-01T00:00:00+00:00", {}, "made", timings
    )


def on_a_line(latency_seconds: float, seconds_per_byte: float) -> MeasuredNetwork:
    return made(*(latency_seconds + num_bytes * seconds_per_byte for num_bytes in SIZES))


def test_the_fit_finds_the_latency_and_the_bandwidth_that_times_were_made_from() -> None:
    # 20 us and 1 s per 100 GB of tensor. Of 8 ranks, all_reduce sends 2 x 7/8 = 1.75 bytes per byte, which is
    # 175 GB/s; the others 7/8 = 0.875, 87.5 GB/s.
    network = on_a_line(20e-6, 1 / 100e9)
    for collective, bus in (("all_reduce", 175e9), ("reduce_scatter", 87.5e9)):
        line = fit(network, collective)
        assert line.latency_seconds == pytest.approx(20e-6, rel=1e-9)
        assert line.bus_bytes_per_second == pytest.approx(bus, rel=1e-9)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    # 1 GB in 10 ms is 100 GB/s; all_reduce: x 2 x 7/8
    timing = CollectiveTiming("all_reduce", 10**9, 0.01, (0.01,))
    assert bus_bytes_per_second(timing, 8) == pytest.approx(175e9)


def test_times_that_do_not_grow_have_no_bandwidth() -> None:
    network = made(2.0, 1.0, sizes=(1, 2))
    line = fit(network, "all_reduce")
    assert (line.latency_seconds, line.bus_bytes_per_second) == (2.0, None)


def test_a_network_is_read_as_it_was_written(tmp_path: Path) -> None:
    network = on_a_line(20e-6, 1e-11)
    write_network(network, tmp_path / "new" / "network.json")
    assert read_network(tmp_path / "new" / "network.json") == network


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"world_size": 1}, "invalid field: world_size (expected int >= 2)"),
        ({"gpus_per_node": 4}, "world_size does not equal num_nodes times gpus_per_node"),
        ({"timings": []}, "all_reduce has 0 sizes, but a fitted line needs two"),
    ],
)
def test_a_malformed_network_is_refused(change: dict[str, object], says: str, tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_text(json.dumps({**dataclasses.asdict(on_a_line(1e-5, 1e-11)), **change}))
    with pytest.raises(ValueError, match="hint: `slm launch bench/network_probe.py`") as refused:
        read_network(path)
    assert f"{path}: {says}" in str(refused.value)
