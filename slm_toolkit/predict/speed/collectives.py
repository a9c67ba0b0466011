"""Seconds of collectives as NCCL runs them: the ring or tree and the protocol that its cost model picks."""

import math
from collections.abc import Iterator

from slm_toolkit.hardware.network import LINK_SHARE, NODE_NETWORK_SHARE, Cluster
from slm_toolkit.predict.speed.traffic import Transfer

# Microseconds, from NCCL's src/graph/tuning.cc @01afd20a: baseLat for a call, and hwLat for one hop over
# NVLink, over PCIe, and over the network. LL sends a flag with each word, LL128 with each 120 bytes (only
# where GPUs have NVLink), Simple waits for a whole chunk.
_RING = {"LL": (3.6, 0.47, 1.0, 2.7), "LL128": (10.0, 1.9, 2.5, 4.0), "Simple": (8.4, 3.4, 5.7, 9.6)}
_TREE = {"LL": (4.4, 0.52, 1.0, 5.0), "LL128": (4.4, 1.2, 1.9, 8.5), "Simple": (0.0, 28.0, 28.0, 50.0)}
_RING_RATE = {"LL": 0.25, "LL128": 0.92, "Simple": 1.0}
"fraction of the link's rate; the same file"
_TREE_RATE = {"LL": 0.9 / 3.8, "LL128": 0.9 * 0.915, "Simple": 0.9}


def transfer_seconds(transfer: Transfer, cluster: Cluster) -> float | None:
    """Return the seconds of all calls, latency and bytes; None if the network between nodes is unknown.

    All ranks send at the same time. Inside a node each rank has its link's rate. Between nodes, the rings of
    a node's ranks share the node's network, and so do the node's groups.
    """
    if transfer.ranks == 1:
        return 0.0
    nodes = transfer.num_nodes
    sharing = transfer.groups_per_node if nodes > 1 else 1
    if cluster.is_measured(num_nodes=nodes):
        # no network measurement times an all-to-all
        line = cluster.fits["all_gather" if transfer.collective == "all_to_all" else transfer.collective]
        rate = line.bus_bytes_per_second or math.inf
        return transfer.num_calls * line.latency_seconds + transfer.sent_bytes * sharing / rate
    rate = LINK_SHARE * cluster.link_bytes_per_second
    if nodes > 1:
        network = cluster.node_bytes_per_second(transfer.ranks_per_node * transfer.groups_per_node)
        if network is None:
            return None
        of_network = NODE_NETWORK_SHARE * network / sharing
        if transfer.collective == "all_to_all":  # there is no ring: a node sends what all its ranks send
            of_network *= transfer.sent_bytes / (transfer.ranks_per_node * transfer.inter_node_bytes)
        rate = min(rate, of_network)
    return min(
        transfer.num_calls * latency + sent_bytes / (share * rate)
        for latency, sent_bytes, share in _ways(transfer, cluster)
    )


def _ways(transfer: Transfer, cluster: Cluster) -> Iterator[tuple[float, float, float]]:
    """Yield a call's latency, the bytes that each rank sends, and the share of the rate, for each choice.

    A ring all-gather takes n - 1 steps for n ranks, a ring all-reduce 2 (n - 1). Among them one per node
    crosses the network. A tree goes up and down: through the ranks of a node, then by doublings of the nodes.
    """
    ranks, nodes = transfer.ranks, transfer.num_nodes
    rounds = 2 if transfer.collective == "all_reduce" else 1
    link = 1 if cluster.has_nvlink else 2
    least = cluster.least_hop_seconds * 1e6
    for protocol in ("LL", "LL128", "Simple") if cluster.has_nvlink else ("LL", "Simple"):
        start, per_hop, per_network_hop = (_RING[protocol][column] for column in (0, link, 3))
        hops = (ranks - nodes) * per_hop + (nodes - 1) * max(per_network_hop, least)
        if transfer.collective == "all_to_all":  # all at once
            hops = per_hop if nodes == 1 else max(per_network_hop, least)
        yield (start + rounds * hops) * 1e-6, transfer.sent_bytes, _RING_RATE[protocol]
        if transfer.collective == "all_reduce":
            start, per_hop, per_network_hop = (_TREE[protocol][column] for column in (0, link, 3))
            in_node = (transfer.ranks_per_node - 1) * per_hop
            hops = in_node + math.log2(nodes) * max(per_network_hop, least)
            yield (start + 2 * hops) * 1e-6, 2 * transfer.num_bytes, _TREE_RATE[protocol]
