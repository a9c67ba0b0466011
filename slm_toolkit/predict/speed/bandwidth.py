"""Seconds of a step's collectives on a cluster, from data sheets or from what `--probe_network` measured."""

import math
from dataclasses import dataclass
from functools import cached_property

from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.hardware.network import COLLECTIVES, LinkFit, MeasuredNetwork, fit
from slm_toolkit.predict.speed.software import LINK_SHARE, NODE_NETWORK_SHARE
from slm_toolkit.predict.speed.traffic import Transfer

CALL_SECONDS = 20e-6  # of a collective inside a node, beside its bytes; hand count, not fitted
HOP_SECONDS = 10e-6  # more for each doubling of the nodes; hand count, not fitted


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

    def is_measured(self, transfer: Transfer) -> bool:
        """A measurement stands for every group that, like its own, crosses nodes or doesn't."""
        return self.measured is not None and (self.measured.num_nodes > 1) == (transfer.num_nodes > 1)

    @cached_property
    def fits(self) -> dict[str, LinkFit]:
        return {name: fit(self.measured, name) for name in COLLECTIVES} if self.measured else {}


def cluster_of(
    gpu: Gpu, *, inter_node_gbps: float | None = None, measured: MeasuredNetwork | None = None
) -> Cluster:
    """The GPU's own links; the node's network as given (gigabit per second), else as AWS rents it."""
    given = None if inter_node_gbps is None else inter_node_gbps * 1e9 / 8
    return Cluster(gpu.link_bytes_per_second, given, gpu.node_network_bytes_per_second, measured)


def transfer_seconds(transfer: Transfer, cluster: Cluster) -> float | None:
    """Latency and bytes of all calls; None between nodes of an unknown network.

    On the bus all ranks send at once. Inside a node that is the link's rate; between nodes the rings of a
    node's ranks share its network, and groups beside each other share it again.
    """
    if transfer.ranks == 1:
        return 0.0
    nodes = transfer.num_nodes
    sharing = transfer.groups_per_node if nodes > 1 else 1
    if cluster.is_measured(transfer):
        line = cluster.fits[transfer.collective]
        rate = line.bus_bytes_per_second or math.inf
        return transfer.num_calls * line.latency_seconds + transfer.sent_bytes * sharing / rate
    calls = transfer.num_calls * (CALL_SECONDS + HOP_SECONDS * math.log2(nodes))
    in_node = transfer.sent_bytes / (LINK_SHARE * cluster.link_bytes_per_second)
    if nodes == 1:
        return calls + in_node
    network = cluster.node_bytes_per_second(transfer.ranks_per_node * transfer.groups_per_node)
    if network is None:
        return None
    between = transfer.sent_bytes * sharing / (NODE_NETWORK_SHARE * network)
    return calls + max(between, in_node)
