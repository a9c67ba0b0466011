"""Seconds of a collective from data sheets or a measured network, by hand on round numbers."""

import dataclasses
from pathlib import Path

import pytest
from conftest import slm_here
from test_estimate import estimated

from slm_toolkit.hardware.network import (
    COLLECTIVES,
    LINK_SHARE,
    NODE_NETWORK_SHARE,
    Cluster,
    CollectiveTiming,
    MeasuredNetwork,
    bus_factor,
    write_network,
)
from slm_toolkit.predict.speed.collectives import transfer_seconds
from slm_toolkit.predict.speed.software import TODAY
from slm_toolkit.predict.speed.traffic import Transfer

CLUSTER = Cluster(link_bytes_per_second=100e9, given_node_bytes_per_second=10e9)
IN_NODE = Transfer("gather_forward", "all_gather", 8e9, 8, 8, 1, 10, True)  # a rank sends 8e9 x 7/8 = 7e9
BETWEEN = Transfer("gather_forward", "all_gather", 16e9, 16, 8, 1, 10, True)  # 15e9, over two nodes
TWO_NODES = ("--num_gpus", "16", "--strategy", "ds_zero3", "--gpu")


def measured(num_nodes: int) -> MeasuredNetwork:
    """1 ms and 15 GB/s on the bus, whatever the collective."""
    world_size = 8 * num_nodes
    timings = tuple(
        CollectiveTiming(name, size, took, (took,))
        for name in COLLECTIVES
        for size in (2**20, 2**30)
        for took in [0.001 + size * bus_factor(name, world_size) / 15e9]
    )
    return MeasuredNetwork(world_size, num_nodes, 8, "nccl", "NVIDIA L4", "2026-01-01", {}, "made", timings)


# a hop takes 3.4 us over NVLink and 9.6 us over the network, a call 8.4 us (NCCL's Simple protocol): an
# all-gather of 8 ranks takes 7 hops, one of 16 ranks on two nodes 14 hops and 1 between the nodes
IN_NODE_CALL = 8.4e-6 + 7 * 3.4e-6
BETWEEN_CALL = 8.4e-6 + 14 * 3.4e-6 + 9.6e-6


def test_inside_a_node_bytes_go_at_a_share_of_the_link() -> None:
    expected = 10 * IN_NODE_CALL + 7e9 / (LINK_SHARE * 100e9)
    assert transfer_seconds(IN_NODE, CLUSTER) == pytest.approx(expected)


def test_between_nodes_bytes_go_at_a_share_of_the_nodes_network() -> None:
    seconds = transfer_seconds(BETWEEN, CLUSTER)
    assert seconds == pytest.approx(10 * BETWEEN_CALL + 15e9 / (NODE_NETWORK_SHARE * 10e9))
    # a slow link is PCIe: 5.7 us per hop
    slow_link = dataclasses.replace(CLUSTER, link_bytes_per_second=1e9)
    calls = 10 * (8.4e-6 + 14 * 5.7e-6 + 9.6e-6)
    assert transfer_seconds(BETWEEN, slow_link) == pytest.approx(calls + 15e9 / (LINK_SHARE * 1e9))


def test_small_messages_take_the_protocol_and_the_tree_with_the_least_latency() -> None:
    # 512 bytes on 1,024 ranks, 128 nodes, with LL: a ring all-gather waits for 896 hops of 0.47 us in nodes
    # and for 127 of 2.7 us
    gather = Transfer("gather_forward", "all_gather", 512, 1024, 8, 1, 1, True)
    ring = 3.6e-6 + 896 * 0.47e-6 + 127 * 2.7e-6
    assert transfer_seconds(gather, CLUSTER) == pytest.approx(ring, rel=1e-3)
    # a tree all-reduce goes up and down 7 ranks of a node and log2(128) = 7 doublings
    reduced = dataclasses.replace(gather, collective="all_reduce")
    tree = 4.4e-6 + 2 * (7 * 0.52e-6 + 7 * 5.0e-6)
    assert transfer_seconds(reduced, CLUSTER) == pytest.approx(tree, rel=1e-2)


def test_a_measurement_between_nodes_stands_for_what_crosses_them() -> None:
    # 10 calls of 1 ms and 15e9 bytes at 15 GB/s; inside a node the data sheet still holds
    cluster = dataclasses.replace(CLUSTER, measured=measured(num_nodes=2))
    assert transfer_seconds(BETWEEN, cluster) == pytest.approx(10 * 0.001 + 1, rel=1e-6)
    assert transfer_seconds(IN_NODE, cluster) == transfer_seconds(IN_NODE, CLUSTER)


def test_without_the_network_between_nodes_there_are_no_tokens_per_second_but_a_note() -> None:
    inside, between = estimated("--strategy", "ddp", "--gpu", "l4", "--num_gpus", "8", "16")
    assert inside["tokens_per_second"] > 0
    unknown = ("step_seconds", "parts_seconds", "tokens_per_second", "mfu", "bottleneck", "inter_node_gbps")
    assert {between[name] for name in unknown} == {None}
    assert between["traffic_bytes"]["inter_node"] > 0
    shown = slm_here("estimate", "--strategy", "ddp", "--gpu", "l4", "--num_gpus", "16")
    assert "unknown network: set --network" in shown.out


def test_pcie_is_a_range_until_it_is_measured(tmp_path: Path) -> None:
    given = ("--model", "slm-1b", "--strategy", "fsdp_full_shard", "--num_gpus", "8", "--gpu")
    (pcie,), (nvlink,) = estimated(*given, "l40s"), estimated(*given, "a100-80gb")
    assert (pcie["depends_on_pcie"], nvlink["depends_on_pcie"]) == (True, False)
    assert nvlink["step_high_seconds"] == pytest.approx(nvlink["step_seconds"] / TODAY.low)
    assert pcie["step_high_seconds"] > 1.2 * pcie["step_seconds"] / TODAY.low
    network = dataclasses.replace(measured(num_nodes=1), gpu="NVIDIA L40S")
    write_network(network, tmp_path / "network.json")
    (probed,) = estimated(*given, "l40s", "--network", str(tmp_path / "network.json"))
    assert not probed["depends_on_pcie"]


def test_a_network_json_is_used_instead_of_data_sheets(tmp_path: Path) -> None:
    # 15 GB/s on the bus are 120 Gbit/s; as advertised 120 / 0.8. The l4 has no data sheet of its nodes.
    write_network(measured(num_nodes=2), tmp_path / "network.json")
    (row,) = estimated(*TWO_NODES, "l4", "--network", str(tmp_path / "network.json"))
    assert row["inter_node_gbps"] == pytest.approx(120 / NODE_NETWORK_SHARE)
    (slower,) = estimated(*TWO_NODES, "l4", "--network", "1")
    assert row["tokens_per_second"] > slower["tokens_per_second"]


def test_a_network_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "network.json"
    for gpu, said in ((None, "CPU processes"), ("NVIDIA L4", "NVIDIA L4")):
        write_network(dataclasses.replace(measured(num_nodes=2), gpu=gpu), file)
        done = slm_here("estimate", "--gpu", "a100-80gb", "--num_gpus", "16", "--network", str(file))
        assert done.code == 2
        assert f"was measured between {said}, not a100-80gb" in done.err
