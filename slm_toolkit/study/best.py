"""The best configuration by model and number of nodes with today's software, and what limits it."""

from dataclasses import dataclass

from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.hardware.network import cluster_of
from slm_toolkit.hardware.prices import Price, price_of
from slm_toolkit.predict.bottleneck import WORTH_SAYING
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.predict.grid import estimates
from slm_toolkit.predict.setup.setup import Site
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, find_strategy
from slm_toolkit.study.comparison import GPUS_PER_NODE, MODELS, SEQ_LEN

NUM_NODES = (1, 2, 4, 8, 16, 32, 64)
MOST_TOKENS_PER_STEP = 1_048_576
"a global batch of 1M tokens, Ultra-Scale Playbook, https://huggingface.co/spaces/nanotron/ultrascale-playbook"
_CHECKPOINTING = ("none", "selective_op", "full")


@dataclass(frozen=True)
class Best:
    """The fastest configuration at one place; all but the first three None where nothing fits, and between
    nodes of an unknown network."""

    model: str
    num_nodes: int
    gpu: str
    strategy: str | None = None
    as_fast: tuple[str, ...] = ()
    "other strategies within 1 %, less than predictions can tell apart"
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    "that fill the global batch"
    gradient_checkpointing: str | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    usd_per_million_tokens: float | None = None
    price_source: str | None = None
    limited_by: str | None = None
    "memory, global batch or both, where twice the batch would be faster; else the bottleneck"


def best_configurations(
    gpu_name: str, *, usd_per_gpu_hour: float | None = None, inter_node_gbps: float | None = None
) -> list[Best]:
    """For each model and number of nodes, models first.

    Of the studied strategies, batches of powers of two, and checkpointing; each step takes all of
    MOST_TOKENS_PER_STEP by accumulation, and no estimate is tight. Raises ValueError for an unknown GPU.
    """
    gpu = gpu_of_name(gpu_name)
    given = Price(usd_per_gpu_hour, "given by --usd_per_gpu_hour") if usd_per_gpu_hour else None
    site = Site(cluster_of(gpu, inter_node_gbps=inter_node_gbps), given or price_of(gpu.name))
    by_place: dict[tuple[str, int], list[Estimate]] = {}
    for num_nodes in NUM_NODES:
        for row in _estimates_on(num_nodes, gpu.name, site):
            by_place.setdefault((row.model, num_nodes), []).append(row)
    return [
        _best(model, num_nodes, gpu.name, by_place[model, num_nodes])
        for model in MODELS
        for num_nodes in NUM_NODES
    ]


def _estimates_on(num_nodes: int, gpu: str, site: Site) -> list[Estimate]:
    """Batches up to twice what the global batch allows: whether that would be faster is to be told."""
    num_gpus = num_nodes * GPUS_PER_NODE
    largest = MOST_TOKENS_PER_STEP // (num_gpus * SEQ_LEN)  # 1M / (8 x 1024) = 128 on one node
    strategies = [find_strategy(name) for name in STUDIED_STRATEGIES]
    found = []
    for power in range(largest.bit_length() + 1):
        given = {
            "model": list(MODELS),
            "seq_len": SEQ_LEN,
            "per_device_train_batch_size": 2**power,
            "gradient_accumulation_steps": max(1, largest // 2**power),
            "gradient_checkpointing": list(_CHECKPOINTING),
        }
        found += estimates(given, strategies, gpus=[gpu], num_gpus=[num_gpus], sites=lambda _: site)
    return found


def _best(model: str, num_nodes: int, gpu: str, rows: list[Estimate]) -> Best:
    timed = [row for row in rows if row.tokens_per_second]
    fitting = [
        row for row in timed if row.verdict == "fits" and _tokens_per_step(row) <= MOST_TOKENS_PER_STEP
    ]
    if not fitting:
        return Best(model, num_nodes, gpu)
    best = max(fitting, key=lambda row: row.tokens_per_second)
    close = [row for row in fitting if row.tokens_per_second * WORTH_SAYING >= best.tokens_per_second]
    return Best(
        model=model,
        num_nodes=num_nodes,
        gpu=gpu,
        strategy=best.strategy,
        as_fast=tuple(
            name for name in STUDIED_STRATEGIES if name in {row.strategy for row in close} - {best.strategy}
        ),
        per_device_train_batch_size=best.per_device_train_batch_size,
        gradient_accumulation_steps=best.gradient_accumulation_steps,
        gradient_checkpointing=best.gradient_checkpointing,
        tokens_per_second_per_gpu=best.tokens_per_second_per_gpu,
        mfu=best.mfu,
        usd_per_million_tokens=best.usd_per_million_tokens,
        price_source=best.price_source,
        limited_by=_limit(best, timed),
    )


def _limit(best: Estimate, rows: list[Estimate]) -> str:
    for row in rows:
        is_larger = row.per_device_train_batch_size == 2 * best.per_device_train_batch_size
        same = (row.strategy, row.gradient_checkpointing) == (best.strategy, best.gradient_checkpointing)
        if is_larger and same and row.tokens_per_second > WORTH_SAYING * best.tokens_per_second:
            bounds = {
                "memory": row.verdict != "fits",
                "global batch": _tokens_per_step(row) > MOST_TOKENS_PER_STEP,
            }
            return " and ".join(name for name, binds in bounds.items() if binds)
    return best.bottleneck.replace("_", " ")


def _tokens_per_step(row: Estimate) -> int:
    of_rank = row.per_device_train_batch_size * row.gradient_accumulation_steps * row.seq_len
    return row.num_gpus * of_rank
