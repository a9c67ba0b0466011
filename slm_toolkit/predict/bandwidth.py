"""Seconds of a step's collectives on a cluster, from data sheets or from what `--probe_network` measured."""

import math
from dataclasses import dataclass
from functools import cached_property

from slm_toolkit.hardware import Gpu
from slm_toolkit.network import COLLECTIVES, LinkFit, MeasuredNetwork, fit
from slm_toolkit.predict.software import LINK_SHARE, NODE_NETWORK_SHARE
from slm_toolkit.predict.traffic import Transfer

CALL_SECONDS = 20e-6  # of a collective inside a node, beside its bytes; hand count, not fitted
HOP_SECONDS = 10e-6  # more for each doubling of the nodes; hand count, not fitted


@dataclass(frozen=True)
class Cluster:
    """What the ranks are connected by. Bytes per second are one way."""

    link_bytes_per_second: float
    "of a GPU to the others of its node, by its data sheet"
    node_network_bytes_per_second: float | None
    "of a whole node; None where nobody said and no usual one is known"
    measured: MeasuredNetwork | None = None

    @property
    def inter_node_bytes_per_second(self) -> float | None:
        """Of a node: what was measured between nodes at all_gather, else the data sheet's."""
        if self.measured is not None and self.measured.num_nodes > 1:
            measured = self.fits["all_gather"].bus_bytes_per_second
            return None if measured is None else measured / NODE_NETWORK_SHARE
        return self.node_network_bytes_per_second

    @cached_property
    def fits(self) -> dict[str, LinkFit]:
        return {name: fit(self.measured, name) for name in COLLECTIVES} if self.measured else {}


def cluster_of(
    gpu: Gpu, *, inter_node_gbps: float | None = None, measured: MeasuredNetwork | None = None
) -> Cluster:
    """The GPU's own links; the node's network as given (gigabit per second), else as AWS rents it."""
    given = None if inter_node_gbps is None else inter_node_gbps * 1e9 / 8
    return Cluster(gpu.link_bytes_per_second, given or gpu.node_network_bytes_per_second, measured)


def transfer_seconds(transfer: Transfer, cluster: Cluster) -> float | None:
    """Latency and bytes of all calls; None between nodes of an unknown network.

    On the bus all ranks send at once. Inside a node that is the link's rate; between nodes the rings of a
    node's ranks share its network, and groups beside each other share it again. A measurement stands for
    every group that, like its own, crosses nodes or doesn't.
    """
    if transfer.ranks == 1:
        return 0.0
    nodes = math.ceil(transfer.ranks / transfer.ranks_per_node)
    sharing = transfer.groups_per_node if nodes > 1 else 1
    measured = cluster.measured
    if measured is not None and (measured.num_nodes > 1) == (nodes > 1):
        line = cluster.fits[transfer.collective]
        rate = line.bus_bytes_per_second or math.inf
        return transfer.num_calls * line.latency_seconds + transfer.sent_bytes * sharing / rate
    calls = transfer.num_calls * (CALL_SECONDS + HOP_SECONDS * math.log2(nodes))
    in_node = transfer.sent_bytes / (LINK_SHARE * cluster.link_bytes_per_second)
    if nodes == 1:
        return calls + in_node
    if cluster.node_network_bytes_per_second is None:
        return None
    between = transfer.sent_bytes * sharing / (NODE_NETWORK_SHARE * cluster.node_network_bytes_per_second)
    return calls + max(between, in_node)
