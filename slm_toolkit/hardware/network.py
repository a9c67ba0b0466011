"""The network between GPUs: its rates by data sheet, or how long collectives took among real ranks."""

import dataclasses
import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slm_toolkit.base.user_files import json_of, read_text
from slm_toolkit.hardware.gpus import Gpu

NETWORK_FILE = "network.json"
PROBE_SECONDS = 30.0
"how long the ranks may measure, when not told otherwise"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
"what DDP, FSDP and ZeRO communicate with"
_MOST_BYTES, _LEAST_SECONDS = 10**15, 1e-9  # beyond, a timing is none
_HINT = "`slm compare --probe_network` writes a network.json"


@dataclass(frozen=True)
class CollectiveTiming:
    """What one collective of one size took."""

    collective: str
    "one of COLLECTIVES"
    num_bytes: int
    "of the whole tensor: all_reduce's, all_gather's output, reduce_scatter's input; on each rank"
    seconds: float
    "median of `all_seconds`"
    all_seconds: tuple[float, ...]
    "of each repeat, on the rank that took longest"


@dataclass(frozen=True)
class MeasuredNetwork:
    """What `slm_toolkit.run.network_probe` measured, and where."""

    world_size: int
    num_nodes: int
    gpus_per_node: int
    "ranks on each node, also where they are CPU processes"
    backend: str
    "nccl or gloo"
    gpu: str | None
    "as the driver names it; None on CPU"
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
    "None where larger tensors took no longer"


def bus_factor(collective: str, world_size: int) -> float:
    """Bytes that each rank sends per byte of the whole tensor, whatever the algorithm.

    nccl-tests' convention: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    sent_once = (world_size - 1) / world_size
    return 2 * sent_once if collective == "all_reduce" else sent_once


def bus_bytes_per_second(timing: CollectiveTiming, world_size: int) -> float:
    """Comparable with what a link can do, for any number of ranks and any collective."""
    return timing.num_bytes * bus_factor(timing.collective, world_size) / timing.seconds


def fit(network: MeasuredNetwork, collective: str) -> LinkFit:
    """The latency and bus bandwidth, neither below zero, with the least squares of relative errors.

    Of relative ones, or the largest size alone would decide, and its small error be a small size's all.
    """
    timings = [timing for timing in network.timings if timing.collective == collective]
    factor = bus_factor(collective, network.world_size)
    # (latency + sent * seconds_per_byte) / seconds = 1 for each timing: two columns u and v, two unknowns
    u = [1 / timing.seconds for timing in timings]
    v = [timing.num_bytes * factor / timing.seconds for timing in timings]
    uu, uv, vv = _dot(u, u), _dot(u, v), _dot(v, v)
    determinant = uu * vv - uv * uv
    latency_seconds = seconds_per_byte = -1.0  # where sizes are too close for two unknowns
    if determinant > 1e-12 * uu * vv:
        latency_seconds = (sum(u) * vv - sum(v) * uv) / determinant
        seconds_per_byte = (sum(v) * uu - sum(u) * uv) / determinant
    if latency_seconds < 0:
        latency_seconds, seconds_per_byte = 0.0, sum(v) / vv
    if seconds_per_byte <= 0:
        return LinkFit(latency_seconds=sum(u) / uu, bus_bytes_per_second=None)
    return LinkFit(latency_seconds=latency_seconds, bus_bytes_per_second=1 / seconds_per_byte)


def seconds(network: MeasuredNetwork, collective: str, num_bytes: int) -> float:
    """What the fitted line says of `num_bytes`, counted as in CollectiveTiming."""
    line = fit(network, collective)
    if line.bus_bytes_per_second is None:
        return line.latency_seconds
    sent = num_bytes * bus_factor(collective, network.world_size)
    return line.latency_seconds + sent / line.bus_bytes_per_second


LINK_SHARE = 0.7
"of the one-way link rate that a node's collectives reach on the bus; fixed"
NODE_NETWORK_SHARE = 0.8
"of a node's network rate; ml-engineering's advice is to plan on 0.80 to 0.85 of what is advertised"
USUAL_GPUS_PER_NODE = 8
"of the nodes that a GPU's usual network is of; smaller ones are taken to have as much for each GPU"


@dataclass(frozen=True)
class Cluster:
    """What the ranks are connected by. Bytes per second are one way."""

    link_bytes_per_second: float
    "of a GPU to the others of its node, by its data sheet"
    given_node_bytes_per_second: float | None
    "of a whole node, as the user says"
    usual_node_bytes_per_second: float | None = None
    "of a node of USUAL_GPUS_PER_NODE, as AWS rents it; None where we know none"
    measured: MeasuredNetwork | None = None

    def node_bytes_per_second(self, gpus_per_node: int) -> float | None:
        """Of a node's network: measured between nodes (at all_gather), given, or usual; None: unknown."""
        if self.measured is not None and self.measured.num_nodes > 1:
            rate = self.fits["all_gather"].bus_bytes_per_second
            return None if rate is None else rate / NODE_NETWORK_SHARE
        if self.given_node_bytes_per_second is not None or self.usual_node_bytes_per_second is None:
            return self.given_node_bytes_per_second
        return self.usual_node_bytes_per_second * min(1.0, gpus_per_node / USUAL_GPUS_PER_NODE)

    def is_measured(self, *, num_nodes: int) -> bool:
        """Whether the measurement stands for a group on so many nodes: both cross nodes, or neither does."""
        return self.measured is not None and (self.measured.num_nodes > 1) == (num_nodes > 1)

    @cached_property
    def fits(self) -> dict[str, LinkFit]:
        return {name: fit(self.measured, name) for name in COLLECTIVES} if self.measured else {}


def cluster_of(
    gpu: Gpu, *, inter_node_gbps: float | None = None, measured: MeasuredNetwork | None = None
) -> Cluster:
    """The GPU's own links; the node's network as given (gigabit per second), else as AWS rents it."""
    given = None if inter_node_gbps is None else inter_node_gbps * 1e9 / 8
    return Cluster(gpu.link_bytes_per_second, given, gpu.node_network_bytes_per_second, measured)


def write_network(network: MeasuredNetwork, path: Path) -> None:
    """Write the file whole or not at all: beside, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(dataclasses.asdict(network), indent=2, allow_nan=False) + "\n")
    beside.replace(path)


def read_network(path: Path) -> MeasuredNetwork:
    """Read what `write_network` wrote. Raises ValueError with every problem found."""
    content = json_of(
        read_text(path, what="network", hint=_HINT), f"can't read network {path}: it", hint=_HINT
    )
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no measured network\nhint: {_HINT}")
    if problems := _problems(content):
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems) + f"\nhint: {_HINT}")
    timings = tuple(
        CollectiveTiming(
            timing["collective"], timing["num_bytes"], timing["seconds"], tuple(timing["all_seconds"])
        )
        for timing in content["timings"]
    )
    known = {f.name for f in dataclasses.fields(MeasuredNetwork)}
    fields = {name: value for name, value in content.items() if name in known}
    return MeasuredNetwork(**{**fields, "timings": timings})


def _dot(left: list[float], right: list[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def _problems(content: dict[str, Any]) -> list[str]:
    found = [
        f"{name} is {content.get(name)!r}, not a whole number of at least {least}"
        for name, least in (("world_size", 2), ("num_nodes", 1), ("gpus_per_node", 1))
        if type(content.get(name)) is not int or content[name] < least
    ]
    if not found and content["world_size"] != content["num_nodes"] * content["gpus_per_node"]:
        found.append("world_size is not num_nodes times gpus_per_node")
    found += [
        f"{name} is {content.get(name)!r}, not text"
        for name in ("backend", "date", "command")
        if not isinstance(content.get(name), str)
    ]
    if not isinstance(content.get("gpu", 0), str | None):
        found.append(f"gpu is {content.get('gpu')!r}, not a name or null")
    if not isinstance(content.get("versions"), dict):
        found.append(f"versions is {content.get('versions')!r}, not an object")
    timings = content.get("timings")
    if not isinstance(timings, list):
        return [*found, f"timings is {timings!r}, not a list"]
    wrong = [
        f"timings[{index}] is {timing!r}" for index, timing in enumerate(timings) if not _is_timing(timing)
    ]
    if wrong:
        return [*found, *wrong]
    for collective in COLLECTIVES:
        sizes = {timing["num_bytes"] for timing in timings if timing["collective"] == collective}
        if len(sizes) < 2:
            found.append(f"{len(sizes)} sizes of {collective}: a line needs two")
    return found


def _is_timing(timing: object) -> bool:
    if not isinstance(timing, dict) or timing.get("collective") not in COLLECTIVES:
        return False
    num_bytes, all_seconds = timing.get("num_bytes"), timing.get("all_seconds")
    if type(num_bytes) is not int or not 1 <= num_bytes <= _MOST_BYTES or not isinstance(all_seconds, list):
        return False
    return all(
        type(value) in (int, float) and _LEAST_SECONDS <= value <= 1 / _LEAST_SECONDS
        for value in (timing.get("seconds"), *all_seconds)
    )
