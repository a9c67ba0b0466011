"""The network between GPUs: data-sheet rates, or measured times of collectives between real ranks."""

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal, get_args

from msgspec import Meta

from slm_toolkit.base.typed_files import LARGEST, PositiveInt, converted
from slm_toolkit.base.user_files import json_of, read_text
from slm_toolkit.hardware.gpus import Gpu

NETWORK_FILE = "network.json"
Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]
COLLECTIVES: tuple[str, ...] = get_args(Collective)
"the collectives that DDP, FSDP and ZeRO use"
TimingBytes = Annotated[int, Meta(ge=1, le=10**15)]
TimingSeconds = Annotated[float, Meta(ge=1e-9, le=1e9)]
"from a nanosecond to thirty years: limits that no collective exceeds"
_HINT = "`slm launch bench/network_probe.py` writes a network.json"


@dataclass(frozen=True)
class CollectiveTiming:
    """The measured time of one collective with one tensor size."""

    collective: Collective
    num_bytes: TimingBytes
    "size of the whole tensor on each rank: of all_reduce, all_gather's output or reduce_scatter's input"
    seconds: TimingSeconds
    "median of `all_seconds`"
    all_seconds: tuple[TimingSeconds, ...]
    "time of each repeat on its slowest rank"


@dataclass(frozen=True)
class MeasuredNetwork:
    """The timings that `bench/network_probe.py` measured, and the cluster it ran on."""

    world_size: Annotated[int, Meta(ge=2, le=LARGEST)]
    num_nodes: PositiveInt
    gpus_per_node: PositiveInt
    "ranks on each node, even if they are CPU processes"
    backend: str
    "nccl or gloo"
    gpu: str | None
    "the driver's name; None on CPU"
    date: str
    "ISO 8601, UTC"
    versions: dict[str, str]
    command: str
    timings: tuple[CollectiveTiming, ...]
    "at least two sizes of each collective"


@dataclass(frozen=True)
class LinkFit:
    """seconds = latency_seconds + num_bytes * bus_factor / bus_bytes_per_second."""

    latency_seconds: float
    bus_bytes_per_second: float | None
    "None if larger tensors took no longer"


def bus_factor(collective: str, world_size: int) -> float:
    """Return the bytes that each rank sends per byte of the whole tensor, for any algorithm.

    nccl-tests' convention: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    sent_once = (world_size - 1) / world_size
    return 2 * sent_once if collective == "all_reduce" else sent_once


def bus_bytes_per_second(timing: CollectiveTiming, world_size: int) -> float:
    """Return the rate on the bus; it compares with a link's rate for any collective and number of ranks."""
    return timing.num_bytes * bus_factor(timing.collective, world_size) / timing.seconds


def fit(network: MeasuredNetwork, collective: str) -> LinkFit:
    """Return the line through the smallest and the largest size; latency is at least zero."""
    timings = [timing for timing in network.timings if timing.collective == collective]
    factor = bus_factor(collective, network.world_size)
    small, large = (pick(timings, key=lambda timing: timing.num_bytes) for pick in (min, max))
    seconds_per_byte = (large.seconds - small.seconds) / (large.num_bytes - small.num_bytes) / factor
    if seconds_per_byte <= 0:
        return LinkFit(latency_seconds=small.seconds, bus_bytes_per_second=None)
    latency_seconds = max(0.0, small.seconds - small.num_bytes * factor * seconds_per_byte)
    return LinkFit(latency_seconds, 1 / seconds_per_byte)


LINK_SHARE = 0.7
"share of the one-way link rate that collectives inside a node reach on the bus; fixed"
NODE_NETWORK_SHARE = 0.8
"reachable share of a node's network rate; ml-engineering advises to plan with 0.80 to 0.85"
_NVLINK_BYTES_PER_SECOND = 100e9
"a link of this rate is NVLink: PCIe 5 has 63e9, the slowest NVLink of our GPUs 300e9"
_BETWEEN_SOCKETS_BYTES_PER_SECOND = 10e9
"""rate of PCIe between GPUs on two CPU sockets in NCCL's topology (NVIDIA/nccl-tests#307). Lanes that several
GPUs share, and GeForce without access to its peers, are as slow"""
_EFA_HOP_SECONDS = 20e-6
"latency between two AWS nodes: NET_LATENCY in aws-ofi-nccl's include/nccl_ofi_tuner.h, 2024"
USUAL_GPUS_PER_NODE = 8
"GPUs per node of a GPU's usual network; we assume that smaller nodes have the same rate per GPU"


@dataclass(frozen=True)
class Cluster:
    """The connections between ranks. Bytes per second are one way."""

    link_bytes_per_second: float
    "rate from a GPU to the others of its node, by its data sheet"
    given_node_bytes_per_second: float | None
    "network rate of a whole node, given by the user"
    usual_node_bytes_per_second: float | None = None
    "network rate of an AWS node with USUAL_GPUS_PER_NODE; None: unknown"
    measured: MeasuredNetwork | None = None

    @property
    def least_hop_seconds(self) -> float:
        """Latency between two nodes: AWS's if the network is the usual one; 0: NCCL's own, of InfiniBand."""
        return _EFA_HOP_SECONDS if self.given_node_bytes_per_second is None else 0.0

    @property
    def has_nvlink(self) -> bool:
        return self.link_bytes_per_second >= _NVLINK_BYTES_PER_SECOND

    @property
    def with_slow_pcie(self) -> "Cluster | None":
        """The same cluster with the slow end of PCIe's range; None if the link is NVLink or was measured."""
        if self.has_nvlink or self.is_measured(num_nodes=1):
            return None
        slow = min(self.link_bytes_per_second, _BETWEEN_SOCKETS_BYTES_PER_SECOND)
        return dataclasses.replace(self, link_bytes_per_second=slow)

    def node_bytes_per_second(self, gpus_per_node: int) -> float | None:
        """Return a node's network rate: measured (all_gather across nodes), given or usual; None: unknown."""
        if self.measured is not None and self.measured.num_nodes > 1:
            rate = self.fits["all_gather"].bus_bytes_per_second
            return None if rate is None else rate / NODE_NETWORK_SHARE
        if self.given_node_bytes_per_second is not None or self.usual_node_bytes_per_second is None:
            return self.given_node_bytes_per_second
        return self.usual_node_bytes_per_second * min(1.0, gpus_per_node / USUAL_GPUS_PER_NODE)

    def is_measured(self, *, num_nodes: int) -> bool:
        """Return whether the measurement applies to `num_nodes`: both cross nodes, or both stay in one."""
        return self.measured is not None and (self.measured.num_nodes > 1) == (num_nodes > 1)

    @cached_property
    def fits(self) -> dict[str, LinkFit]:
        return {name: fit(self.measured, name) for name in COLLECTIVES} if self.measured else {}


def cluster_of(
    gpu: Gpu, *, inter_node_gbps: float | None = None, measured: MeasuredNetwork | None = None
) -> Cluster:
    """Return the Cluster with the GPU's own links and the given network rate (gigabit/s), else AWS's rate."""
    given = None if inter_node_gbps is None else inter_node_gbps * 1e9 / 8
    return Cluster(gpu.link_bytes_per_second, given, gpu.node_network_bytes_per_second, measured)


def write_network(network: MeasuredNetwork, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dataclasses.asdict(network), indent=2, allow_nan=False) + "\n")


def read_network(path: Path) -> MeasuredNetwork:
    """Read a file of `write_network`. Raises ValueError for any other content."""
    name = f"can't read network {path}: it"
    content = json_of(read_text(path, what="network", hint=_HINT), name, hint=_HINT)
    try:
        network = converted(content, MeasuredNetwork)
        if network.world_size != network.num_nodes * network.gpus_per_node:
            raise ValueError("world_size does not equal num_nodes times gpus_per_node")
        for collective in COLLECTIVES:
            sizes = {timing.num_bytes for timing in network.timings if timing.collective == collective}
            if len(sizes) < 2:
                raise ValueError(f"{collective} has {len(sizes)} sizes, but a fitted line needs two")
    except ValueError as error:
        raise ValueError(f"{path}: {error}\nhint: {_HINT}") from None
    return network
