"""Records to ranked rows: every figure that a report shows of one run, computed once, None where unknown."""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from slm_toolkit.config.run_config import FLAGS
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.hardware.prices import find_price
from slm_toolkit.model.model_spec import flops_per_token, flops_per_token_without_attention
from slm_toolkit.predict.cost import usd_per_million_tokens
from slm_toolkit.record.measurement_warnings import padding_share, warnings_of
from slm_toolkit.record.numerics import differences, numerics_from
from slm_toolkit.record.parity import Parity, judge
from slm_toolkit.record.run_record import RunRecord, finite
from slm_toolkit.report.recorded_estimate import estimate_of
from slm_toolkit.report.stats import joules_per_token, mean_phases, throughput
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES


@dataclass  # a frozen one takes thrice as long to make, and a report makes tens of thousands
class Row:
    """One line of a report: a run, or several launches of the same run. The names are the keys of `--json`.

    Bytes are of the rank that holds most.
    """

    model: str
    strategy: str
    status: str
    reason: str | None
    evidence: str
    "measured: this comes from a run; rehearsed: from one process that played rank 0; estimated: skipped"
    engine: str | None
    zero_stage: int | None
    reshard_after_forward: bool | None
    world_size: int | None
    num_machines: int | None
    "that the ranks were on; None in older records"
    gpu: str | None
    cpu: str
    allocator: str | None
    "malloc, or what was in its place; None in records that don't say"
    started_at: str
    numerics: str
    attn_implementation: str | None
    seq_len: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: str
    torch_compile: bool
    optim: str
    seed: int
    learning_rate: float
    dataset: str
    max_steps: int | None
    "None: the default, thirty after the warm-up"
    asked: dict[str, Any]
    "all flags that make this run, with those above"
    first_step: int
    "0, or after which step it was resumed"
    losses: list[float | None]
    final_loss: float | None
    tokens_per_second: float | None
    "all ranks, median"
    tokens_per_second_lowest: float | None
    "lower and upper end of the interval that another measurement is expected in"
    tokens_per_second_highest: float | None
    num_timed_steps: int | None
    num_launches: int
    "that ended ok and were timed"
    num_warmup_steps: int | None
    "first steps found slow or compiling, or as asked; not timed"
    phase_seconds: dict[str, float] | None
    """mean seconds of step, data, forward, backward and optimizer on the slowest rank of the first launch;
    under DeepSpeed step and data only: backward holds the optimizer's step, whole steps alone compare"""
    tokens_per_second_per_gpu: float | None
    "per process where there is no GPU"
    mfu: float | None
    "0..1, with attention's FLOPs; None where the GPU's peak is not known"
    mfu_without_attention: float | None
    flops_per_token: float
    "forward and backward, 6 N + 12 L H S; with adapters 4 N + 6 N_adapters + 12 L H S"
    flops_per_token_without_attention: float
    "6 N; 4 N + 6 N_adapters"
    tokens_per_step: int | None
    "over all ranks and micro-steps"
    tokens_counted: dict[str, int] | None
    padding: float
    "0..1, of the tokens; it is left out of every rate and of dollars, not of MFU: it was computed"
    final_loss_by_dataset: dict[str, float | None]
    "where several are mixed: of the last step in which it was drawn"
    final_eval_losses: dict[str, float | None]
    "of each held-out set, after the last step"
    num_trainable_params: int | None
    "with adapters; None: all"
    peak_allocated_bytes: int | None
    "rehearsed: of rank 0; without a GPU traced, of tensors that took no memory"
    estimated_peak_bytes: int | None
    "allocated, by closed forms; of rehearsals and on GPUs, where there is a peak to hold against it"
    estimated_tokens_per_second: float | None
    "by closed forms, of runs on known GPUs; a rehearsal's rate is of compute alone and has none"
    peak_reserved_bytes: int | None
    peak_rss_bytes: int | None
    memory_at_peak: dict[str, Any] | None
    "of rank 0, where allocations were followed: phase, module, num_bytes, parts, modules"
    state_bytes_per_rank: dict[str, int] | None
    deepspeed_bytes: int | None
    "DeepSpeed's own estimate per GPU"
    usd_per_million_tokens: float | None
    joules_per_token: float | None
    "of the GPUs' boards, timed steps only, from NVML's energy counter"
    price: str | None
    numerics_probed: dict[str, Any] | None
    "the fields of numerics.Numerics, as seen in the first step (the first that compiled nothing, of five)"
    numerics_differences: list[str]
    "in what this row was computed otherwise than `numerics_reference`; filled in by `ranking`"
    numerics_reference: str | None
    parity_reference: str | None
    "what the losses were compared with; filled in by `slm compare` and `slm report`, like the next three"
    parity_max_loss_difference: float | None
    parity_grad_norm_ratio: float | None
    parity_holds: bool | None
    parity: str | None
    "all of it as a sentence"
    rank: int | None
    "1 + rows of the same model, sequence length and GPU whose whole interval, per GPU, is faster"
    shares_rank: bool | None
    "whether another row has the same rank: a tie"
    warnings: list[str]
    "what may have disturbed the measurement"
    anatomy: dict[str, Any] | None
    record: str
    "the record's file, of the first launch"
    largest_batch: int | None = None
    """per device, that was found to run; 0: not even 1 does. Filled in by `slm compare --largest_batch`, like
    the next"""
    smallest_oom_batch: int | None = None
    "of those tried; None: --max_batch ended the search"

    @property
    def is_rehearsed(self) -> bool:
        return self.evidence == "rehearsed"

    @property
    def peak_bytes(self) -> int | None:
        """What tensors took of a GPU (in a rehearsal: would take), else what the process took."""
        return self.peak_allocated_bytes if self.gpu or self.is_rehearsed else self.peak_rss_bytes

    @property
    def interval(self) -> tuple[float, float]:
        """Of tokens per second; only of rows that have a rate."""
        return self.tokens_per_second_lowest, self.tokens_per_second_highest


def row_of(repeats: list[tuple[Path, RunRecord]], *, usd_per_gpu_hour: float | None = None) -> Row:
    """All figures of one run's launches. What can't be true makes the row failed: `impossible` says why.

    Of a rehearsal neither losses nor dollars are told; its rate, where it has one, is of compute alone.
    """
    records = [record for _, record in repeats]
    ok = [record for record in records if record.status == "ok"]
    judged = next((record for record in records if record.status != "ok"), records[0])  # failures show
    shown = ok[0] if ok else judged
    computed, padding = throughput(ok), padding_share(shown)
    rate = computed and computed.times(1 - padding)
    config, spec = shown.flags, shown.spec
    per_gpu = rate.tokens_per_second / shown.world_size if rate and shown.world_size else None
    price = find_price(shown.gpu, usd_per_gpu_hour=usd_per_gpu_hour)
    # of frozen weights no gradient is made
    adapters = None if config["peft"] == "none" else shown.num_trainable_params or 0
    with_attention = flops_per_token(spec, seq_len=config["seq_len"], adapter_params=adapters)
    without = flops_per_token_without_attention(spec, adapter_params=adapters)
    mfu = mfu_of(shown, per_gpu and per_gpu / (1 - padding), with_attention)
    status, reason = judged.status, judged.reason
    if status == "ok" and (wrong := impossible(ok, mfu)):
        status, reason = "failed", wrong
    measured = ok or records
    rehearsed = shown.is_rehearsal
    estimate = estimate_of(shown) if shown.gpu or rehearsed else None
    losses = [] if rehearsed else measured[0].losses
    return Row(
        model=spec.name,
        strategy=shown.strategy,
        status=status,
        reason=reason,
        evidence=shown.evidence,
        engine=shown.engine,
        zero_stage=shown.zero_stage,
        reshard_after_forward=shown.reshard_after_forward,
        world_size=shown.world_size,
        num_machines=shown.num_machines,
        gpu=shown.gpu,
        cpu=shown.cpu,
        allocator=shown.versions.get("allocator"),
        started_at=shown.started_at,
        attn_implementation=shown.attn_implementation,
        **{
            name: config[name]
            for name in (
                *("numerics", "seq_len", "per_device_train_batch_size", "gradient_accumulation_steps"),
                *("gradient_checkpointing", "torch_compile", "optim", "seed"),
                *("learning_rate", "dataset", "max_steps"),
            )
        },
        asked=config,
        first_step=measured[0].first_step,
        losses=losses,
        final_loss=losses[-1] if losses else None,
        tokens_per_second=rate.tokens_per_second if rate else None,
        tokens_per_second_lowest=rate.lowest if rate else None,
        tokens_per_second_highest=rate.highest if rate else None,
        num_timed_steps=rate.num_timed_steps if rate else None,
        num_launches=rate.num_launches if rate else 0,
        num_warmup_steps=rate.num_warmup_steps if rate else None,
        phase_seconds=mean_phases(ok[0]) if ok else None,
        tokens_per_second_per_gpu=per_gpu,
        mfu=mfu,
        mfu_without_attention=mfu * without / with_attention if mfu else None,
        flops_per_token=with_attention,
        flops_per_token_without_attention=without,
        tokens_per_step=shown.tokens_per_step,
        tokens_counted=shown.tokens_counted,
        padding=padding,
        final_loss_by_dataset={
            name: next((loss for loss in reversed(losses) if loss is not None), None)
            for name, losses in measured[0].losses_by_dataset.items()
        },
        final_eval_losses={
            name: losses[-1] for name, losses in measured[0].eval_losses_by_set.items() if losses
        },
        num_trainable_params=shown.num_trainable_params,
        peak_allocated_bytes=_largest([record.peak_allocated_bytes for record in measured]),
        estimated_peak_bytes=estimate.peak_allocated_bytes if estimate else shown.predicted_peak_bytes,
        estimated_tokens_per_second=estimate.tokens_per_second if estimate and not rehearsed else None,
        peak_reserved_bytes=_largest([record.peak_reserved_bytes for record in measured]),
        peak_rss_bytes=_largest([record.peak_rss_bytes for record in measured]),
        memory_at_peak=next((record.memory_at_peak for record in measured if record.memory_at_peak), None),
        state_bytes_per_rank=_largest_state(measured[0].state_bytes),
        deepspeed_bytes=shown.deepspeed_estimate["gpu_bytes"] if shown.deepspeed_estimate else None,
        usd_per_million_tokens=usd_per_million_tokens(
            tokens_per_second=rate.tokens_per_second,
            usd_per_gpu_hour=price.usd_per_gpu_hour,
            num_gpus=shown.world_size,
        )
        if rate and price and not rehearsed
        else None,
        joules_per_token=None if rehearsed else joules_per_token(ok),
        price=str(price) if price and not rehearsed else None,
        numerics_probed=measured[0].numerics,
        numerics_differences=[],
        numerics_reference=None,
        parity_reference=None,
        parity_max_loss_difference=None,
        parity_grad_norm_ratio=None,
        parity_holds=None,
        parity=None,
        rank=None,
        shares_rank=None,
        warnings=[]
        if rehearsed
        else [
            *(["no step was timed: all were warm-up"] if ok and rate is None else []),
            *(warning for record in ok for warning in warnings_of(record)),
        ],
        anatomy=next((record.anatomy for record in ok if record.anatomy), None),
        record=str(repeats[0][0]),
    )


def num_asked_otherwise(row: Row, other: Row) -> int:
    """How many flags of `row` have another value in `other`."""
    return sum(other.asked.get(name) != value for name, value in row.asked.items())


def mfu_of(record: RunRecord, tokens_per_second_per_gpu: float | None, flops: float) -> float | None:
    """Share of the GPU's dense bf16 peak; None in fp32, of which we know no peak, and for an unknown GPU."""
    gpu = find_gpu(record.gpu)
    if gpu is None or tokens_per_second_per_gpu is None or record.asked["config"]["numerics"] == "fp32":
        return None
    return tokens_per_second_per_gpu * flops / gpu.dense_bf16_flops_per_second


def impossible(records: list[RunRecord], mfu: float | None) -> str | None:
    """What of these ok records can't be true: a clock, or a count of tokens, is wrong."""
    if mfu is not None and mfu > 1:
        return f"an MFU of {mfu:.0%} is more than a {records[0].gpu} can do: a wrong clock or count"
    for record in records:
        if record.is_rehearsal:  # which counts its own tokens, and is asked for those of all ranks
            continue
        planned = (record.tokens_per_step or 0) * len(record.losses)
        probed = (record.numerics or {}).get("tokens_per_step")
        counts = {"planned": planned, **(record.tokens_counted or {})}
        if probed is not None:
            counts["probed"] = probed * len(record.losses)
        if len(set(counts.values())) > 1:
            return "tokens were counted differently: " + ", ".join(f"{n} {c:,}" for n, c in counts.items())
    return None


def _largest(of_records: list[list[int] | None]) -> int | None:
    return max((value for values in of_records for value in values or []), default=None)


def _largest_state(state_bytes: list[dict[str, int]]) -> dict[str, int] | None:
    return max(state_bytes, key=lambda parts: sum(parts.values())) if state_bytes else None


# Records to rows: launches of one run joined, each with its parity and rank.


def rows_of(
    records: list[tuple[Path, RunRecord]],
    *,
    usd_per_gpu_hour: float | None = None,
    parity_tolerance: float | None = None,
    strict: bool = False,
    problems: list[str] | None = None,
) -> list[Row]:
    """One row for each run, however often it was launched, with parity, marks and ranks.

    `problems`: takes a line for each record that can't be shown, since it holds numbers that no run wrote.
    """
    parities = judge([record for _, record in records], loss_tolerance=parity_tolerance)
    has_others = any(not record.is_parity_reference for _, record in records)
    launches: dict[tuple[str, str], list[int]] = {}
    for index, (_, record) in enumerate(records):
        if not (record.is_parity_reference and has_others):
            launches.setdefault((record.identity, record.gpu or record.cpu), []).append(index)
    rows = []
    for indices in launches.values():
        try:
            row = row_of([records[index] for index in indices], usd_per_gpu_hour=usd_per_gpu_hour)
        except Exception as error:
            if problems is None:
                raise
            problems.append(f"{records[indices[0]][0]} can't be shown: {type(error).__name__}: {error}")
            continue
        judged = [parities[index] for index in indices if parities[index] is not None]
        rows.append(_with_parity(row, judged))
    return ranked(rows, strict=strict)


def _with_parity(row: Row, judged: list[Parity]) -> Row:
    if not judged:
        return row
    worst = max(judged, key=lambda parity: (not parity.holds, parity.loss_difference))
    return with_values(
        row,
        parity_reference=worst.reference,
        parity_max_loss_difference=finite(worst.loss_difference),
        parity_grad_norm_ratio=None if worst.grad_norm_ratio is None else finite(worst.grad_norm_ratio),
        parity_holds=worst.holds,
        parity=str(worst),
    )


def labelled(rows: list[Row]) -> dict[str, Row]:
    """Rows by the strategy, and briefly what else tells each from the others."""
    names = [name for name, flag in FLAGS.items() if flag.grid and name != "rehearse"]
    varying = [name for name in names if len({str(row.asked.get(name)) for row in rows}) > 1]
    of_rows = ("evidence", "world_size", "gpu", "allocator")  # the first two tell rehearsals apart
    machine = [name for name in of_rows if len({getattr(row, name) for row in rows}) > 1]

    short = {name: flag.label or name for name, flag in FLAGS.items()} | {"world_size": "ranks"}

    def words(row: Row) -> list[str]:
        values = [(name, row.asked.get(name)) for name in varying]
        values += [(name, getattr(row, name)) for name in machine]
        return [
            str(value) if name in ("model", "numerics", "evidence") else f"{short.get(name, name)}={value}"
            for name, value in values
            if value is not None
        ]

    made = [" ".join([row.strategy, *words(row)]) for row in rows]
    count = Counter(made)
    return {
        label if count[label] == 1 else f"{label} {Path(row.record).parent}": row
        for label, row in zip(made, rows, strict=True)
    }


# Which rows of a report may be compared, and their order by tokens per second, ties as ties.


def ranked(rows: list[Row], *, strict: bool) -> list[Row]:
    """The rows with their numerics' differences and ranks, in the order given.

    Rows of one model, sequence length and machine are ranked together. Each is held against DDP's row of the
    same `--numerics`, else one process's, else the first of those. With `strict`, a row that was computed
    otherwise, or of which that is not known, has no rank, and numerics are ranked apart. Nor has a
    rehearsal one.
    """
    marked = _marked(rows)
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in marked:
        if _competes(row, strict=strict):
            groups[_machine(row), _numerics(row) if strict else None].append(row)
    places = {id(row): place for group in groups.values() for row, place in _places(group)}
    return [
        with_values(row, rank=places[id(row)][0], shares_rank=places[id(row)][1])
        if id(row) in places
        else row
        for row in marked
    ]


def with_values(row: Row, **changes: object) -> Row:
    """What `dataclasses.replace` makes, in a quarter of the time that a report would spend on it."""
    return Row(**{**vars(row), **changes})


def _places(group: list[Row]) -> list[tuple[Row, tuple[int, bool]]]:
    """Rank and whether it is shared, of rows ranked together; none for a row that is alone."""
    if len(group) < 2:
        return []
    # per GPU, so that two GPUs are not twice as good as one; a rank counts the rows that are clearly faster
    lowest = sorted(row.interval[0] / row.world_size for row in group)
    ranks = [1 + len(group) - bisect_right(lowest, row.interval[1] / row.world_size) for row in group]
    num_of_rank = Counter(ranks)
    return [(row, (rank, num_of_rank[rank] > 1)) for row, rank in zip(group, ranks, strict=True)]


def _competes(row: Row, *, strict: bool) -> bool:
    fair = not strict or (row.numerics_probed is not None and not row.numerics_differences)
    timed = row.tokens_per_second is not None and row.world_size is not None and not row.is_rehearsed
    return row.status == "ok" and row.parity_holds is not False and timed and fair


def _machine(row: Row) -> tuple:
    return row.model, row.seq_len, row.gpu or row.cpu


def _numerics(row: Row) -> tuple:
    return row.numerics, row.asked.get("reduce_dtype")


def _marked(rows: list[Row]) -> list[Row]:
    """The rows with what of their numerics differs from their reference's."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row.status == "ok" and row.numerics_probed and not row.is_rehearsed:
            groups[_machine(row), _numerics(row)].append(row)
    candidates = {}
    for key, group in groups.items():
        of_engines = ([row for row in group if row.engine == engine] for engine in ("ddp", "single"))
        candidates[key] = _Candidates(next(filter(None, of_engines), group))
    return [
        _held_against(row, found.most_alike(row))
        if (found := candidates.get((_machine(row), _numerics(row)))) and row.numerics_probed
        else row
        for row in rows
    ]


class _Candidates:
    """Rows to choose a reference from: of several the one that was asked most alike."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._of_values: dict[tuple[str, ...], dict[tuple, Row]] = {}
        "by names of flags: the first candidate of each combination of their values"

    def most_alike(self, row: Row) -> Row:
        """A look-up where one was asked the very same: ten thousand rows can't all be held against all."""
        names = tuple(row.asked)
        if names not in self._of_values:
            known = self._of_values.setdefault(names, {})
            for other in self._rows:
                known.setdefault(tuple(map(other.asked.get, names)), other)
        if same := self._of_values[names].get(tuple(row.asked.values())):
            return same
        return min(self._rows, key=lambda other: num_asked_otherwise(row, other))


def _held_against(row: Row, reference: Row) -> Row:
    """The row with what of its numerics differs and is not explained by flags that were asked otherwise."""
    if row is reference or row.is_rehearsed:
        return row
    settings: Iterable[str] = row.asked.keys() | reference.asked.keys()
    other = {name for name in settings if row.asked.get(name) != reference.asked.get(name)}
    if row.world_size != reference.world_size:
        other.add("world_size")
    mine, theirs = numerics_from(row.numerics_probed), numerics_from(reference.numerics_probed)
    found = differences(mine, theirs, other_settings=frozenset(other))
    return with_values(
        row,
        numerics_differences=[str(difference) for difference in found],
        numerics_reference=reference.strategy,
    )


# The order of a report.


def report_order(found: tuple[Path, RunRecord]) -> tuple:
    """Models by size, then what was asked, rehearsals by ranks, then strategies as the study lists them."""
    record = found[1]
    known = [*STUDIED_STRATEGIES, record.strategy]
    asked = {**record.asked["config"]}
    num_rehearsed = asked.pop("rehearse", None)
    return (
        record.model["num_params"],
        not record.is_parity_reference,
        _sortable(msgspec.json.encode(asked)),  # text, for settings of several types have no order
        num_rehearsed or 0,
        known.index(record.strategy),
        str(found[0]),
    )


@cache
def _sortable(asked: bytes) -> bytes:
    """JSON with its whole numbers equally long, so that it sorts as they do."""
    return re.sub(rb":(\d+)(?=[,}])", lambda number: number[1].rjust(16), asked)
