"""Print the paper's figures as tables, and the best configurations with today's software."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby

from answers import SERIES_WORDS, thousands
from comparison import (
    GPUS_PER_NODE,
    MODELS,
    PAPER_NUMERICS,
    SEQ_LEN,
    Comparison,
    figure_errors,
)
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.hardware.network import cluster_of
from slm_toolkit.hardware.prices import Price, price_of
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.bottleneck import WORTH_SAYING, misaligned_widths
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.predict.grid import estimates
from slm_toolkit.predict.setup.setup import Deployment
from slm_toolkit.report.tables.fitted import DASH, dollars, fix_width, percent, rate
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES, find_strategy

# The best configuration for each model and number of nodes with today's software, and its limit.

NUM_NODES = (1, 2, 4, 8, 16, 32, 64)
MOST_TOKENS_PER_STEP = 1_048_576
"a global batch of 1M tokens, Ultra-Scale Playbook, https://huggingface.co/spaces/nanotron/ultrascale-playbook"
_CHECKPOINTING = ("none", "selective_op", "full")


@dataclass(frozen=True)
class Best:
    """The fastest configuration of a model on a number of nodes.

    All fields except the first three are None if nothing fits, or if the network between nodes is unknown.
    """

    model: str
    num_nodes: int
    gpu: str
    strategy: str | None = None
    as_fast: tuple[str, ...] = ()
    "other strategies within 1 %: predictions are not more precise"
    per_device_train_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    "micro-steps that fill the global batch"
    gradient_checkpointing: str | None = None
    tokens_per_second_per_gpu: float | None = None
    mfu: float | None = None
    usd_per_million_tokens: float | None = None
    price_source: str | None = None
    limited_by: str | None = None
    "memory, global batch or both, if twice the batch would be faster; else the bottleneck"


def best_configurations(
    gpu_name: str, *, usd_per_gpu_hour: float | None = None, inter_node_gbps: float | None = None
) -> list[Best]:
    """Return the best configuration for each model and number of nodes, sorted by model.

    The search covers the studied strategies, batches in powers of two, and checkpointing. Accumulation fills
    each step to MOST_TOKENS_PER_STEP, and only verdicts of "fits" count. Raise ValueError for an unknown GPU.
    """
    gpu = gpu_of_name(gpu_name)
    given = Price(usd_per_gpu_hour, "given by --prices") if usd_per_gpu_hour else None
    deployment = Deployment(cluster_of(gpu, inter_node_gbps=inter_node_gbps), given or price_of(gpu.name))
    by_place: dict[tuple[str, int], list[Estimate]] = {}
    for num_nodes in NUM_NODES:
        for row in _estimates_on(num_nodes, gpu.name, deployment):
            by_place.setdefault((row.model, num_nodes), []).append(row)
    return [
        _best_of(model, num_nodes, gpu.name, by_place[model, num_nodes])
        for model in MODELS
        for num_nodes in NUM_NODES
    ]


def _estimates_on(num_nodes: int, gpu: str, deployment: Deployment) -> list[Estimate]:
    """Return estimates of batches up to twice the global batch, to see whether a larger one is faster."""
    num_gpus = num_nodes * GPUS_PER_NODE
    largest = MOST_TOKENS_PER_STEP // (num_gpus * SEQ_LEN)  # 1M / (8 x 1024) = 128 on one node
    strategies = [find_strategy(name) for name in STUDIED_STRATEGIES]
    rows = []
    for power in range(largest.bit_length() + 1):
        given = {
            "model": list(MODELS),
            "seq_len": SEQ_LEN,
            "per_device_train_batch_size": 2**power,
            "gradient_accumulation_steps": max(1, largest // 2**power),
            "gradient_checkpointing": list(_CHECKPOINTING),
        }
        rows += estimates(
            given, strategies, gpus=[gpu], num_gpus=[num_gpus], deployments=lambda _: deployment
        )
    return rows


def _best_of(model: str, num_nodes: int, gpu: str, rows: list[Estimate]) -> Best:
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


_FIGURES = {
    1: ("attention", "global batch"),
    2: ("GPU type", "GPUs"),
    3: ("communication scheme, A100-80GB", "nodes"),
    4: ("communication scheme", "global batch"),
}
_UNEXPLAINED, _MEASURED = "?", "*"
_STRATEGY_WORDS = {
    "ddp": "DDP",
    "fsdp_full_shard": "FSDP\nfull",
    "fsdp_shard_grad_op": "FSDP\ngrad-op",
    "ds_zero1": "ZeRO-1",
    "ds_zero2": "ZeRO-2",
    "ds_zero3": "ZeRO-3",
}


def figure_table(compared: list[Comparison], figure: int, *, width: int) -> RenderableType:
    """Return a figure's table, to be printed with `crop=False`.

    Published and our values are side by side if `width` allows, else on separate lines.
    """
    items = [item for item in compared if item.figure == figure]
    table = _figure(items, separator=" ")
    if table.width > width:
        table = _figure(items, separator="\n")
    legend, x_words = _FIGURES[figure]
    heading = f"figure {figure}: tokens per dollar by {legend} and {x_words}: published, ours, error"
    return Group(Text(heading, style="bold"), table, *_figure_notes(compared, figure, items))


def best_table(bests: list[Best], *, width: int) -> RenderableType:
    """Return a block per model with a column per number of nodes, to be printed with `crop=False`."""
    table = _best(bests, gap=1)
    if table.width > width:
        table = _best(bests, gap=0)
    heading = f"best configuration on nodes of 8 {bests[0].gpu}, today's software (estimated)"
    return Group(Text(heading, style="bold"), table, *_best_notes(bests))


def _best(bests: list[Best], *, gap: int) -> Table:
    titles = [str(count) for count in dict.fromkeys(best.num_nodes for best in bests)]
    table = _plain_table("nodes of 8", titles, gap=gap)
    for model, group in groupby(bests, key=lambda best: best.model):
        of_model = list(group)
        table.add_row(Text(model, style="bold"))
        for label, cell in _BEST_LINES:
            table.add_row(f" {label}", *(DASH if best.strategy is None else cell(best) for best in of_model))
        table.add_section()
    return fix_width(table)


def _figure(items: list[Comparison], *, separator: str) -> Table:
    xs = sorted({item.x for item in items})
    table = _plain_table("", [str(x) for x in xs], gap=1 if separator == " " else 0)
    for model, of_model in groupby(items, key=lambda item: item.model):
        table.add_row(Text(model, style="bold"))
        for series, of_series in groupby(of_model, key=lambda item: item.series):
            by_x = {item.x: item for item in of_series}
            lines = separator.join((f" {SERIES_WORDS[series]}", "  ours", "  error"))
            label = lines if separator == "\n" else f" {SERIES_WORDS[series]}"
            table.add_row(label, *(_cell(by_x[x], separator) for x in xs))
        table.add_section()
    return fix_width(table)


def _plain_table(first: str, titles: list[str], *, gap: int) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), show_edge=False)
    table.add_column(first, no_wrap=True)
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _cell(item: Comparison, separator: str) -> Text:
    published = thousands(item.published_token_per_dollar) + _UNEXPLAINED * item.is_unexplained
    ours = thousands(item.our_token_per_dollar) + _MEASURED * (item.evidence == "measured")
    error = "" if item.error is None else f"{round(100 * item.error):+}%"
    style = "" if item.agrees_on_memory else "red"
    return Text(separator.join(part for part in (published, ours, error) if part), style=style)


def _figure_notes(compared: list[Comparison], figure: int, items: list[Comparison]) -> list[Text]:
    errors = figure_errors(compared, figure)
    worst = errors.worst
    notes = [
        f"error: median {errors.median_error:.1%} over {errors.num_compared} points, largest "
        f"{worst.error:+.0%} ({worst.model} {SERIES_WORDS[worst.series]} at {worst.x}); fits or out of "
        f"memory: {errors.num_right_on_memory} of {errors.num_points} right"
    ]
    if any(item.is_unexplained for item in items):
        notes.append(f"{_UNEXPLAINED} contradicted by the paper's other points, so left out of the errors")
    if measured := [item for item in items if item.evidence == "measured"]:
        numerics = ", ".join(sorted({item.numerics for item in measured}))
        notes.append(
            f"{_MEASURED} measured in your records with numerics {numerics} (the paper's: {PAPER_NUMERICS}), "
            "in steady state and with the presets' own heads; all other values are predicted"
        )
    return [Text(note, style="dim") for note in notes]


def _batch(best: Best) -> str:
    steps = best.gradient_accumulation_steps
    return f"{best.per_device_train_batch_size}" + (f" x {steps}" if steps > 1 else "")


_BEST_LINES: tuple[tuple[str, Callable[[Best], str]], ...] = (
    ("strategy", lambda best: _STRATEGY_WORDS[best.strategy]),
    ("as fast", lambda best: f"+{len(best.as_fast)}" if best.as_fast else DASH),
    ("batch", _batch),
    ("checkpointing", lambda best: best.gradient_checkpointing.replace("_", "\n")),
    ("tokens/s/GPU", lambda best: rate(best.tokens_per_second_per_gpu)),
    ("MFU", lambda best: percent(best.mfu)),
    ("$ per 1M", lambda best: dollars(best.usd_per_million_tokens)),
    ("limited by", lambda best: best.limited_by.replace(" and ", ",\n").replace(" ", "\n")),
)


def _best_notes(bests: list[Best]) -> list[Text]:
    notes = [
        f"each step has {MOST_TOKENS_PER_STEP:,} tokens (the Ultra-Scale Playbook's global batch of 1M) in "
        f"sequences of {SEQ_LEN}; batch: sequences per GPU x micro-steps",
        "numerics aligned, FlashAttention by sdpa, no fused kernels, no compilation; all fit even with 10 % "
        "more activations",
        "as fast: number of other strategies within 1 %, the precision of predictions (--json names them)",
        "limited by: memory or the global batch if twice the batch would be over 1 % faster, else the "
        "largest part of a step",
    ]
    for model in dict.fromkeys(best.model for best in bests):
        widths = ", ".join(f"{name} {width}" for name, width in misaligned_widths(find_model(model)).items())
        if widths:
            notes.append(f"{model}: {widths} is not a multiple of 8, which costs matmul most of its speed")
    if price := next((best.price_source for best in bests if best.price_source), None):
        notes.append(f"price: {price}")
    else:
        notes.append(f"the price of {bests[0].gpu} is unknown: give --prices")
    if gpu_of_name(bests[0].gpu).node_network_bytes_per_second is None:
        notes.append(f"the network between nodes of {bests[0].gpu} is unknown: give --network")
    return [Text(note, style="dim") for note in notes]
