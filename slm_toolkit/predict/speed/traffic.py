"""Bytes that one rank sends in one optimizer step, by collective, under DDP, FSDP, ZeRO and ZeRO++.

P parameters in bf16 are M = 2 P bytes. In an all-gather or reduce-scatter of M bytes over n ranks, each rank
sends M (n - 1) / n; in an all-reduce it sends twice as much. A step with one micro-step sends 2 M under DDP,
ZeRO-1 and ZeRO-2, 3 M under FSDP full shard and ZeRO-3, and 2 M under shard grad-op (Rajbhandari et al.,
arXiv 1910.02054, section 7). ZeRO++ (Wang et al., arXiv 2306.10209) reduces 3 M between nodes to 0.75 M: qwZ
gathers int8 for forward, hpZ gathers for backward inside a group, qgZ sends int4 gradients.
With --peft, FSDP and ZeRO-3 gather all parameters, frozen ones too. Only the adapters have gradients to send,
and ZeRO-1 and ZeRO-2 gather only the adapters after the step.
"""

from dataclasses import dataclass
from math import ceil, gcd

from slm_toolkit.model.model_spec import hidden_matrices
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.settings import ZeroSettings

INT8_SCALES = 1.0  # qwZ: one byte per parameter; scales (one per a few thousand parameters) are not counted
INT4_SCALES = 0.5
DDP_BUCKET_BYTES = 25 * 2**20
"gradients that DDP reduces at once, unless a single gradient is larger: the default of bucket_cap_mb"


@dataclass(frozen=True)
class Transfer:
    """Collectives of one kind and purpose in one step."""

    name: str
    "key of traffic_bytes: gather_forward, gather_backward, reduce_gradients, ..."
    collective: str
    "all_reduce, all_gather, reduce_scatter or all_to_all"
    num_bytes: float
    "size of the whole tensors, summed over the step's collectives"
    ranks: int
    "ranks in one collective"
    ranks_per_node: int
    "how many of those ranks share a node"
    groups_per_node: int
    "groups of a node that communicate at the same time"
    num_calls: float
    overlaps: bool
    "True if compute can hide it; communication after the optimizer can't be hidden"
    in_last_micro_step: bool = False
    "True if it happens once per step, so that only the last micro-step's compute can hide it"

    @property
    def num_nodes(self) -> int:
        """Number of nodes that a group spans."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends, with any algorithm."""
        twice = 2 if self.collective == "all_reduce" else 1
        return twice * self.num_bytes * (self.ranks - 1) / self.ranks

    @property
    def inter_node_bytes(self) -> float:
        """The part of `sent_bytes` that leaves the node.

        A ring has one outgoing link per node. In an all-to-all each rank sends to each rank of other nodes.
        """
        if self.collective == "all_to_all":
            return self.num_bytes * (self.ranks - self.ranks_per_node) / self.ranks
        return self.sent_bytes / self.ranks_per_node if self.ranks > self.ranks_per_node else 0.0

    @property
    def intra_node_bytes(self) -> float:
        return self.sent_bytes - self.inter_node_bytes


def transfers(setup: Setup) -> tuple[Transfer, ...]:
    """Return the communication of a rank in one optimizer step; nothing for a single rank.

    With accumulation, FSDP reduces once per step (accelerate's no_sync), ZeRO-2 and ZeRO-3 in each
    micro-step. Raise ValueError for a setup without a closed form.
    """
    if setup.num_gpus == 1 or setup.strategy.is_single:
        return ()
    sent = _of_engine(setup)
    return (*sent, _of_muon(setup)) if setup.config.optim == "muon" else sent


def _of_muon(setup: Setup) -> Transfer:
    """Return Muon's transfers: updates to the owners of matrices and back, or under DDP from them to all.

    A broadcast by every rank in turn sends as much as an all-gather.
    """
    is_sharded = bool(setup.strategy.sharded_parts)
    ranks = setup.shard_ranks if is_sharded else setup.num_gpus
    num_matrices = setup.spec.num_layers * len(hidden_matrices(setup.spec))
    of_all = setup.num_hidden * setup.dtypes.compute
    if not is_sharded:
        return _transfer(setup, "exchange_updates", "all_gather", of_all, num_matrices, overlaps=False)
    num_calls = 2 * ceil(num_matrices / ranks)
    # each rank has 1/n of a sharded matrix, and sends and receives that
    sent = {"num_bytes": 2 * of_all / ranks, "num_calls": num_calls, "ranks": ranks}
    return _transfer(setup, "exchange_updates", "all_to_all", **sent, overlaps=False)


def _of_engine(setup: Setup) -> tuple[Transfer, ...]:
    strategy, dtypes = setup.strategy, setup.dtypes
    if not (strategy.is_replicated or strategy.zero_stage in (1, 2)):
        return _of_shards(setup)
    gradients, buckets = setup.weights.trained * dtypes.reduced, _num_buckets(setup)
    if strategy.is_replicated:
        return (_transfer(setup, "reduce_gradients", "all_reduce", gradients, buckets),)
    updated = setup.weights.trained * dtypes.compute
    gathered = _transfer(setup, "gather_updated", "all_gather", updated, 1, overlaps=False)
    if strategy.zero_stage == 1 and dtypes.kept_gradient > dtypes.gradient:  # whole sums, after backward
        reduced = _transfer(setup, "reduce_gradients", "all_reduce", gradients, buckets, overlaps=False)
        return reduced, gathered
    times = setup.config.gradient_accumulation_steps if strategy.zero_stage == 2 else 1
    overlap = {"overlaps": strategy.deepspeed.zero_optimization.overlaps, "times": times}
    return _transfer(setup, "reduce_gradients", "reduce_scatter", gradients, buckets, **overlap), gathered


def _of_shards(setup: Setup) -> tuple[Transfer, ...]:
    """Return the transfers of FSDP and ZeRO-3, which gather parameters when they are used."""
    weights, dtypes, shard_ranks = setup.weights, setup.dtypes, setup.shard_ranks
    micro_steps, secondary_ranks = setup.config.gradient_accumulation_steps, setup.placement.secondary_ranks
    is_deepspeed, num_units = setup.strategy.is_deepspeed, setup.spec.num_layers + 2
    zero = _zero_settings(setup)
    gradients = weights.trained * dtypes.reduced
    whole = dtypes.compute if not zero.zero_quantized_weights else INT8_SCALES
    num_gathers, num_reductions = num_units, float(num_units)
    if is_deepspeed:  # it gathers modules, or as many as fit into the prefetch bucket, not layers
        num_matrices = setup.spec.num_layers * (4 + setup.spec.num_ffn_matrices) + 2
        prefetched = weights.total / (zero.stage3_prefetch_bucket_size or 1)
        num_gathers, num_reductions = min(num_matrices, max(1.0, prefetched)), _num_buckets(setup)

    def gather(name: str, element_bytes: float, ranks: int) -> Transfer:
        num_bytes = weights.total * element_bytes
        return _transfer(setup, name, "all_gather", num_bytes, num_gathers, times=micro_steps, ranks=ranks)

    sent = [gather("gather_forward", whole, shard_ranks)]
    if setup.placement.reshard_after_forward:
        of_backward = (dtypes.compute, secondary_ranks) if secondary_ranks > 1 else (whole, shard_ranks)
        sent.append(gather("gather_backward", *of_backward))
    times = micro_steps if is_deepspeed else 1
    reduced = weights.trained * INT4_SCALES if zero.zero_quantized_gradients else gradients
    sent.append(
        _transfer(
            *(setup, "reduce_gradients", "reduce_scatter", reduced, num_reductions),
            times=times,
            ranks=shard_ranks,
            overlaps=not is_deepspeed or zero.overlaps,
        )
    )
    if shard_ranks < setup.num_gpus:  # copies of the model: each shard's gradients are reduced between copies
        sent.append(
            _transfer(
                *(setup, "reduce_between_copies", "all_reduce", gradients / shard_ranks, num_units),
                times=times,
                ranks=setup.num_gpus // shard_ranks,
                stride=shard_ranks,
            )
        )
    return tuple(sent)


def _zero_settings(setup: Setup) -> ZeroSettings:
    zero = setup.strategy.deepspeed.zero_optimization if setup.strategy.deepspeed else ZeroSettings()
    return zero.of_width(setup.spec.hidden_size)


def _num_buckets(setup: Setup) -> float:
    reduced, bucket_bytes = setup.dtypes.reduced, DDP_BUCKET_BYTES
    if setup.strategy.is_deepspeed:
        bucket_bytes = _zero_settings(setup).reduce_bucket_size * reduced
    return max(1.0, setup.weights.trained * reduced / bucket_bytes)


def _transfer(
    setup: Setup,
    name: str,
    collective: str,
    num_bytes: float,
    num_calls: float,
    *,
    times: int = 1,
    ranks: int | None = None,
    stride: int = 1,
    overlaps: bool = True,
) -> Transfer:
    """Return a transfer that a step makes so many times, between every `stride`-th rank; None: all ranks.

    If `stride` does not divide the node, some groups span two nodes, and the slowest group decides.
    """
    ranks = ranks or setup.num_gpus
    per_node = gcd(ranks, max(1, setup.ranks_per_node // stride))
    groups = max(1, setup.ranks_per_node // per_node)
    sizes = (times * num_bytes, ranks, per_node, groups)
    return Transfer(name, collective, *sizes, times * num_calls, overlaps, times == 1)
