"""Turn records into ranked rows: a row has every figure of one run, computed once; None: unknown."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import msgspec

from slm_toolkit.config.run_config import FLAGS
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.hardware.prices import OwnPrices, find_price
from slm_toolkit.model.model_spec import flops_per_token, flops_per_token_without_attention
from slm_toolkit.predict.cost import usd_per_million_tokens
from slm_toolkit.record.measurement_warnings import padding_share, warnings_of
from slm_toolkit.record.numerics import alignments, differences, numerics_from
from slm_toolkit.record.parity import Parity, judge
from slm_toolkit.record.run_record import RunRecord, finite
from slm_toolkit.report.recorded_estimate import estimate_of
from slm_toolkit.report.stats import (
    MIN_ROUNDS,
    joules_per_token,
    mean_phases,
    paired_lead,
    throughput,
)
from slm_toolkit.strategy.strategy import STUDIED_STRATEGIES

SEEN_OF_SCRIPTS = ("seq_len", "per_device_train_batch_size")
"flags whose values are observed if a user's own script did the run: they follow from the script's arguments"
MOST_UNCERTAIN = 0.2
"a rate whose interval reaches farther up or down has no rank, unless it is compared in paired rounds"
_DECISIVE = ("compute_dtype", "master_weight_dtype")
"numerics that must not differ between ranked rows: other dtypes take other times"


@dataclass  # not frozen: creating it takes a third of the time, and a report creates tens of thousands
class Row:
    """One line of a report: all launches of one run. The field names are the keys of `--json`.

    Bytes are those of the rank with the most.
    """

    model: str
    strategy: str
    status: str
    reason: str | None
    evidence: str
    "measured: from a run; rehearsed: from one process that played rank 0; estimated: the run was skipped"
    engine: str | None
    zero_stage: int | None
    reshard_after_forward: bool | None
    world_size: int | None
    num_machines: int | None
    "machines of the ranks; None in older records"
    gpu: str | None
    cpu: str
    num_cores: int | None
    "CPU cores of the machine of rank 0; None in older records"
    allocator: str | None
    "malloc or its replacement; None in older records"
    versions: dict[str, str]
    "of Python and of the packages"
    started_at: str
    numerics: str
    "this and the next eleven fields are flags; of a user's own script, most are unknown"
    attn_implementation: str | None
    seq_len: int | None
    per_device_train_batch_size: int | None
    gradient_accumulation_steps: int | None
    gradient_checkpointing: str | None
    kernels: str | None
    optim: str | None
    seed: int | None
    learning_rate: float | None
    dataset: str | None
    max_steps: int | None
    "None: the default, thirty after the warm-up"
    asked: dict[str, Any]
    "all flags that define this run, including those above"
    first_step: int
    "0, or the step of the checkpoint from which the run resumed"
    losses: list[float | None]
    final_loss: float | None
    tokens_per_second: float | None
    "median over all ranks"
    tokens_per_second_lowest: float | None
    "lower end of the interval in which another measurement is expected; None: fewer than ten timed steps"
    tokens_per_second_highest: float | None
    num_timed_steps: int | None
    tokens_per_second_by_round: dict[int, float]
    "by round of `slm compare --repeats`, as in `stats.Throughput.by_round`"
    num_launches: int
    "launches that ended ok and were timed"
    num_warmup_steps: int | None
    "first steps that were not timed: slow or compiling ones, or as set by the user"
    phase_seconds: dict[str, float] | None
    """mean seconds of step, data, forward, backward and optimizer on the slowest rank of the first launch;
    under DeepSpeed step and data only, because its backward includes the optimizer's step"""
    tokens_per_second_per_gpu: float | None
    "per process without a GPU"
    mfu: float | None
    "0..1, with attention's FLOPs; None if the GPU's peak is unknown"
    mfu_without_attention: float | None
    flops_per_token: float | None
    "forward and backward, 6 N + 12 L H S; with adapters 4 N + 6 N_adapters + 12 L H S"
    flops_per_token_without_attention: float | None
    "6 N; 4 N + 6 N_adapters"
    tokens_per_step: int | None
    "sum over all ranks and micro-steps"
    tokens_counted: dict[str, int] | None
    padding: float
    "share of the tokens, 0..1; rates and dollars exclude padding, MFU includes it (it was computed)"
    final_loss_by_dataset: dict[str, float | None]
    "with several datasets: each dataset's loss in the last step that drew from it"
    final_eval_losses: dict[str, float | None]
    "loss of each held-out set after the last step"
    num_trainable_params: int | None
    "trainable parameters with adapters; None: all parameters"
    peak_allocated_bytes: int | None
    "in a rehearsal, rank 0's; without a GPU it is traced, with tensors that take no memory"
    estimated_peak_bytes: int | None
    "peak allocated by closed forms; only for rehearsals and on GPUs, where an observed peak exists"
    estimated_tokens_per_second: float | None
    "by closed forms, for runs on known GPUs; None for a rehearsal, which times compute only"
    peak_reserved_bytes: int | None
    peak_rss_bytes: int | None
    memory_at_peak: dict[str, Any] | None
    "rank 0's peak if allocations were traced: phase, module, num_bytes, parts, modules"
    state_bytes_per_rank: dict[str, int] | None
    deepspeed_bytes: int | None
    "DeepSpeed's own estimate per GPU"
    usd_per_million_tokens: float | None
    joules_per_token: float | None
    "energy of the GPU boards in the timed steps, from NVML's energy counter"
    price: str | None
    numerics_probed: dict[str, Any] | None
    "the fields of numerics.Numerics in the last probed step: the first that compiled nothing, of up to five"
    numerics_differences: list[str]
    "numerics that differ from `numerics_reference`; set by `ranked`"
    numerics_alignments: list[str]
    "of a user's own script: the changes that would remove these differences"
    numerics_reference: str | None
    parity_reference: str | None
    "the run with which losses were compared; this and the next four fields are set by `rows_of`"
    parity_max_loss_difference: float | None
    parity_grad_norm_ratio: float | None
    parity_holds: bool | None
    parity: str | None
    "the result of the comparison as a sentence"
    rank: int | None
    """place by tokens/s per GPU among rows of the same model, sequence length and GPU. Neighbours share one
    if none of them is clearly faster than another: its whole interval is above the other's, or with three
    rounds of --repeats, the interval of their ratios is above 1"""
    shares_rank: bool | None
    "whether another row has the same rank: a tie"
    unlike: str | None
    """why this row has no rank: another dtype of compute or master weights than `numerics_reference` (with
    --strict, any difference), or another number of ranks than was asked for"""
    warnings: list[str]
    "events that slowed the run down or may have disturbed its measurement"
    anatomy: dict[str, Any] | None
    command: str | None
    "the launch command of the first launch; None if it was not launched"
    record: str
    "the record file of the first launch"
    num_params: int | None = None
    "parameters of the model; None: unknown, because a user's own script failed"
    script: str | None = None
    "the user's own script that did the run; None: this toolkit's trainer, or another one"
    largest_batch: int | None = None
    """largest per-device batch that ran; 0: not even 1 ran. Set by `slm compare --largest_batch`, like the
    next field"""
    smallest_oom_batch: int | None = None
    "smallest batch that ran out of memory; None: the largest batch that was tried ran"

    @property
    def is_rehearsed(self) -> bool:
        return self.evidence == "rehearsed"

    @property
    def peak_bytes(self) -> int | None:
        """Return the GPU memory that tensors took (in a rehearsal: would take); on CPU, the process's RSS."""
        return self.peak_allocated_bytes if self.gpu or self.is_rehearsed else self.peak_rss_bytes

    @property
    def compared_bytes(self) -> int | None:
        """Return `peak_bytes`; on a CPU the training state, because a process's RSS has other parts, too."""
        if self.gpu or self.is_rehearsed:
            return self.peak_bytes
        return sum((self.state_bytes_per_rank or {}).values()) or None

    @property
    def is_uncertain(self) -> bool:
        """Return whether another measurement could be faster or slower by more than MOST_UNCERTAIN."""
        if self.interval is None:
            return False
        return any(abs(end / self.tokens_per_second - 1) > MOST_UNCERTAIN for end in self.interval)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return both ends of the interval of tokens per second; None if too few steps were timed."""
        if self.tokens_per_second_lowest is None:
            return None
        return self.tokens_per_second_lowest, self.tokens_per_second_highest


_OF_RECORD = (
    *("strategy", "evidence", "engine", "zero_stage", "reshard_after_forward", "world_size", "num_machines"),
    *("gpu", "cpu", "num_cores", "versions", "started_at", "attn_implementation", "tokens_per_step"),
    *("tokens_counted", "num_trainable_params", "command"),
)
_OF_FLAGS = (
    *("numerics", "seq_len", "per_device_train_batch_size", "gradient_accumulation_steps", "optim", "seed"),
    *("gradient_checkpointing", "kernels", "learning_rate", "dataset", "max_steps"),
)
"fields of a row that are those of its record, and of the record's flags"


def row_of(
    repeats: list[tuple[Path, RunRecord]],
    *,
    prices: OwnPrices | None = None,
) -> Row:
    """Make the row of one run's launches. Impossible figures make the status failed: see `impossible`.

    A rehearsal's row has no losses and no dollars; its rate, if any, is the rate of compute alone.
    """
    records = [record for _, record in repeats]
    ok = [record for record in records if record.status == "ok"]
    # a failed launch decides the status, even if others ended ok
    status_record = next((record for record in records if record.status != "ok"), records[0])
    main_record = ok[0] if ok else status_record
    rate_with_padding, padding = throughput(ok), padding_share(main_record)
    rate = rate_with_padding and rate_with_padding.times(1 - padding)
    config = main_record.flags
    per_gpu = rate.tokens_per_second / main_record.world_size if rate and main_record.world_size else None
    price = find_price(main_record.gpu, prices)
    with_attention, without = _flops_per_token(main_record)
    mfu = mfu_of(main_record, per_gpu and per_gpu / (1 - padding), with_attention)
    status, reason = status_record.status, status_record.reason
    if status == "ok" and (contradiction := impossible(ok, mfu)):
        status, reason = "failed", contradiction
    measured = ok or records
    rehearsed = main_record.is_rehearsal
    estimate = estimate_of(main_record) if main_record.gpu or rehearsed else None
    losses = [] if rehearsed else measured[0].losses
    return Row(
        model=main_record.model["name"],
        status=status,
        reason=reason,
        **{name: getattr(main_record, name) for name in _OF_RECORD},
        **{name: config[name] for name in _OF_FLAGS},
        allocator=main_record.versions.get("allocator"),
        asked=config,
        first_step=measured[0].first_step,
        losses=losses,
        final_loss=losses[-1] if losses else None,
        tokens_per_second=rate.tokens_per_second if rate else None,
        tokens_per_second_lowest=rate.lowest if rate else None,
        tokens_per_second_highest=rate.highest if rate else None,
        num_timed_steps=rate.num_timed_steps if rate else None,
        tokens_per_second_by_round=rate.by_round if rate else {},
        num_launches=rate.num_launches if rate else 0,
        num_warmup_steps=rate.num_warmup_steps if rate else None,
        phase_seconds=mean_phases(ok[0]) if ok else None,
        tokens_per_second_per_gpu=per_gpu,
        mfu=mfu,
        mfu_without_attention=mfu * without / with_attention if mfu and with_attention else None,
        flops_per_token=with_attention,
        flops_per_token_without_attention=without,
        padding=padding,
        final_loss_by_dataset={
            name: next((loss for loss in reversed(losses) if loss is not None), None)
            for name, losses in measured[0].losses_by_dataset.items()
        },
        final_eval_losses={
            name: losses[-1] for name, losses in measured[0].eval_losses_by_set.items() if losses
        },
        peak_allocated_bytes=_largest([record.peak_allocated_bytes for record in measured]),
        estimated_peak_bytes=estimate.peak_allocated_bytes if estimate else None,
        estimated_tokens_per_second=estimate.tokens_per_second if estimate and not rehearsed else None,
        peak_reserved_bytes=_largest([record.peak_reserved_bytes for record in measured]),
        peak_rss_bytes=_largest([record.peak_rss_bytes for record in measured]),
        memory_at_peak=next((record.memory_at_peak for record in measured if record.memory_at_peak), None),
        state_bytes_per_rank=_largest_state(measured[0].state_bytes),
        deepspeed_bytes=main_record.deepspeed_estimate["gpu_bytes"]
        if main_record.deepspeed_estimate
        else None,
        usd_per_million_tokens=usd_per_million_tokens(
            tokens_per_second=rate.tokens_per_second,
            usd_per_gpu_hour=price.usd_per_gpu_hour,
            num_gpus=main_record.world_size,
        )
        if rate and price and not rehearsed
        else None,
        joules_per_token=None if rehearsed else joules_per_token(ok),
        price=str(price) if price and not rehearsed else None,
        numerics_probed=measured[0].numerics,
        numerics_differences=[],
        numerics_alignments=[],
        numerics_reference=None,
        parity_reference=None,
        parity_max_loss_difference=None,
        parity_grad_norm_ratio=None,
        parity_holds=None,
        parity=None,
        rank=None,
        shares_rank=None,
        unlike=_unasked_ranks(main_record),
        warnings=[]
        if rehearsed
        else [
            *([_why_no_rate(ok[0])] if ok and rate is None else []),
            *(warning for record in ok for warning in warnings_of(record)),
        ],
        anatomy=next((record.anatomy for record in ok if record.anatomy), None),
        record=str(repeats[0][0]),
        num_params=main_record.model.get("num_params"),
        script=main_record.asked["script"][0] if main_record.is_of_script else None,
    )


def num_different_flags(row: Row, other: Row) -> int:
    """Count the flags of `row` that have another value in `other`."""
    return sum(other.asked.get(name) != value for name, value in row.asked.items())


def _why_no_rate(record: RunRecord) -> str:
    if record.tokens_per_step is None:
        return "tokens are unknown: give tokens_per_batch to the script's Recorder"
    return "no step was timed: all steps were warm-up"


def _flops_per_token(record: RunRecord) -> tuple[float | None, float | None]:
    """Return the FLOPs per token with and without attention; None for models of unknown shape."""
    flags = record.flags
    if not record.has_known_shapes or flags["seq_len"] is None:
        return None, None
    # frozen weights need no gradients, hence fewer FLOPs
    adapters = None if flags["peft"] in ("none", None) else record.num_trainable_params or 0
    with_attention = flops_per_token(record.spec, seq_len=flags["seq_len"], adapter_params=adapters)
    return with_attention, flops_per_token_without_attention(record.spec, adapter_params=adapters)


def mfu_of(record: RunRecord, tokens_per_second_per_gpu: float | None, flops: float | None) -> float | None:
    """Return the share of the GPU's dense peak in 16 bits; None for an unknown GPU, and in fp32 (unknown)."""
    gpu = find_gpu(record.gpu)
    computed_in = (record.numerics or {}).get("compute_dtype")
    is_fp32 = (
        computed_in not in ("bfloat16", "float16")
        if record.is_of_script
        else record.asked["config"]["numerics"] == "fp32"
    )
    if gpu is None or tokens_per_second_per_gpu is None or flops is None or is_fp32:
        return None
    return tokens_per_second_per_gpu * flops / gpu.dense_bf16_flops_per_second


def impossible(records: list[RunRecord], mfu: float | None) -> str | None:
    """Return why these ok records can't be true: a clock or a count of tokens is wrong; None if they can."""
    if mfu is not None and mfu > 1:
        return f"an MFU of {mfu:.0%} is impossible on a {records[0].gpu}: a clock or a token count is wrong"
    for record in records:
        # a rehearsal counts its own tokens only, tokens_per_step those of all ranks; a script's steps differ
        if record.is_rehearsal or record.is_of_script:
            continue
        planned = (record.tokens_per_step or 0) * len(record.losses)
        probed = (record.numerics or {}).get("tokens_per_step")
        counts = {"planned": planned, **(record.tokens_counted or {})}
        if probed is not None:
            counts["probed"] = probed * len(record.losses)
        if len(set(counts.values())) > 1:
            return "tokens were counted differently: " + ", ".join(f"{n} {c:,}" for n, c in counts.items())
    return None


def _unasked_ranks(record: RunRecord) -> str | None:
    """Return that a run had other ranks than it asked for, as accelerate's launcher may start fewer."""
    size, asked = record.world_size, record.asked.get("num_processes")
    return None if None in (size, asked) or size == asked else f"{size} of {asked} ranks ran"


def _largest(of_records: list[list[int] | None]) -> int | None:
    return max((value for values in of_records for value in values or []), default=None)


def _largest_state(state_bytes: list[dict[str, int]]) -> dict[str, int] | None:
    return max(state_bytes, key=lambda parts: sum(parts.values())) if state_bytes else None


# Records to rows: all launches of a run make one row, with parity and rank.


def rows_of(
    records: list[tuple[Path, RunRecord]],
    *,
    prices: OwnPrices | None = None,
    strict: bool = False,
    problems: list[str] | None = None,
) -> list[Row]:
    """Make one row for each run, for any number of launches, with parity, marks and ranks.

    A record with impossible numbers, which no run wrote, adds a line to `problems` and makes no row.
    """
    parities = judge([record for _, record in records])
    has_others = any(not record.is_parity_reference for _, record in records)
    launches: dict[tuple[str, str], list[int]] = {}
    for index, (_, record) in enumerate(records):
        if not (record.is_parity_reference and has_others):
            launches.setdefault((record.identity, record.gpu or record.cpu), []).append(index)
    rows = []
    for indices in launches.values():
        try:
            launched = [records[index] for index in indices]
            row = row_of(launched, prices=prices)
        except Exception as error:
            if problems is None:
                raise
            problems.append(f"{records[indices[0]][0]} can't be shown: {type(error).__name__}: {error}")
            continue
        launch_parities = [parities[index] for index in indices if parities[index] is not None]
        rows.append(_with_parity(row, launch_parities))
    return ranked(rows, strict=strict)


def _with_parity(row: Row, parities: list[Parity]) -> Row:
    unlike = [f"losses not comparable: {parity.unlike}" for parity in parities if parity.unlike is not None]
    if unlike and not any(parity.faults for parity in parities):
        return with_values(row, warnings=[*row.warnings, *dict.fromkeys(unlike)])
    if not parities:
        return row
    worst = max(parities, key=lambda parity: (not parity.holds, parity.loss_difference))
    return with_values(
        row,
        parity_reference=worst.reference,
        parity_max_loss_difference=finite(worst.loss_difference),
        parity_grad_norm_ratio=None if worst.grad_norm_ratio is None else finite(worst.grad_norm_ratio),
        parity_holds=worst.holds,
        parity=str(worst),
    )


def labelled(rows: list[Row]) -> dict[str, Row]:
    """Return the rows by unique labels: the strategy, and the settings in which rows differ."""
    names = [name for name, flag in FLAGS.items() if flag.grid and name not in ("rehearse", *SEEN_OF_SCRIPTS)]
    names += SEEN_OF_SCRIPTS if not any(row.script for row in rows) else ()
    of_scripts = (name for row in rows if row.script for name in row.asked)
    names += dict.fromkeys(name for name in of_scripts if name not in FLAGS)
    varying = [name for name in names if len({str(row.asked.get(name)) for row in rows}) > 1]
    row_fields = ("evidence", "world_size", "gpu", "allocator")  # the first two distinguish rehearsals
    machine = [name for name in row_fields if len({getattr(row, name) for row in rows} - {None}) > 1]

    short = {name: flag.label or name for name, flag in FLAGS.items()} | {"world_size": "ranks"}

    def words(row: Row) -> list[str]:
        values = [(name, row.asked.get(name)) for name in varying]
        values += [(name, getattr(row, name)) for name in machine]
        return [
            str(value) if name in ("model", "numerics", "evidence") else f"{short.get(name, name)}={value}"
            for name, value in values
            if value is not None
        ]

    labels = [" ".join([row.strategy, *words(row)]) for row in rows]
    count = Counter(labels)
    return {
        label if count[label] == 1 else f"{label} {Path(row.record).parent}": row
        for label, row in zip(labels, rows, strict=True)
    }


# Which rows of a report may be compared, and their ranks by tokens per second; ties share a rank.


def ranked(rows: list[Row], *, strict: bool) -> list[Row]:
    """Return the rows in the same order, with ranks and differences of their numerics.

    Rows of one model, sequence length and machine are ranked together. The reference for differences is a DDP
    row of the same `--numerics`, else a row of one process, else the first such row. A rehearsal has no rank.
    With `strict`, rows with different or unknown numerics have no rank either, and each `--numerics` is
    ranked separately.
    """
    marked = _marked(rows, strict=strict)
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in marked:
        if _competes(row, strict=strict):
            groups[_machine(row), row.numerics if strict else None].append(row)
    places = {id(row): place for group in groups.values() for row, place in _places(group)}
    return [
        with_values(row, rank=places[id(row)][0], shares_rank=places[id(row)][1])
        if id(row) in places
        else row
        for row in marked
    ]


def with_values(row: Row, **changes: object) -> Row:
    """Return a copy with these changes; four times as fast as `dataclasses.replace`."""
    return Row(**{**vars(row), **changes})


def _places(group: list[Row]) -> list[tuple[Row, tuple[int, bool]]]:
    """Return each row's rank, and whether it is shared; no ranks for a group of one row."""
    if len(group) < 2:
        return []
    places: list[tuple[Row, int]] = []
    tied: list[Row] = []
    for place, row in enumerate(sorted(group, key=_mean_rate, reverse=True), start=1):
        # per GPU, so that two GPUs are not twice as good as one
        if any(clearly_faster(other, row, weight=row.world_size / other.world_size) for other in tied):
            tied = []
        tied.append(row)
        places.append((row, place - len(tied) + 1))
    num_of_rank = Counter(rank for _, rank in places)
    return [(row, (rank, num_of_rank[rank] > 1)) for row, rank in places]


def _mean_rate(row: Row) -> float:
    """Return the rate per GPU by which rows are ordered: of paired rounds, as in `paired_lead`."""
    rounds = row.tokens_per_second_by_round.values()
    total = geometric_mean(rounds) if len(rounds) >= MIN_ROUNDS else row.tokens_per_second
    return total / row.world_size


def clearly_faster(row: Row, other: Row, *, weight: float = 1.0) -> bool:
    """Return whether `weight` times a row's rate is clearly above another's rate.

    Clearly: in the interval of paired rounds, else by the whole intervals of both.
    """
    lead = paired_lead(row.tokens_per_second_by_round, other.tokens_per_second_by_round)
    if lead is not None:
        return lead[0] * weight > 1
    if row.interval is None or other.interval is None:
        return False
    return row.interval[0] * weight > other.interval[1]


def _competes(row: Row, *, strict: bool) -> bool:
    fair = row.unlike is None and (row.numerics_probed is not None or not strict)
    in_rounds = len(row.tokens_per_second_by_round) >= MIN_ROUNDS
    is_judged = row.interval is not None and (in_rounds or not row.is_uncertain)
    timed = is_judged and row.world_size is not None and not row.is_rehearsed
    return row.status == "ok" and row.parity_holds is not False and timed and fair


def _machine(row: Row) -> tuple:
    return row.script or row.model, row.num_params, row.seq_len, row.gpu or row.cpu


def _marked(rows: list[Row], *, strict: bool) -> list[Row]:
    """Return the rows with the differences of their numerics from their references."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row.status == "ok" and row.numerics_probed and not row.is_rehearsed:
            groups[_machine(row), row.numerics].append(row)
    candidates = {}
    for key, group in groups.items():
        rows_by_engine = ([row for row in group if row.engine == engine] for engine in ("ddp", "single"))
        candidates[key] = _Candidates(next(filter(None, rows_by_engine), group))
    return [
        _with_differences(row, row_candidates.most_similar(row), strict=strict)
        if (row_candidates := candidates.get((_machine(row), row.numerics))) and row.numerics_probed
        else row
        for row in rows
    ]


class _Candidates:
    """The possible references of a row; the reference is the candidate with the most similar flags."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows
        self._by_values: dict[tuple[str, ...], dict[tuple, Row]] = {}
        "by the names of flags: the first candidate of each combination of their values"

    def most_similar(self, row: Row) -> Row:
        """Return the most similar candidate; a look-up finds equal flags, which is fast for 10,000 rows."""
        names = tuple(row.asked)
        if names not in self._by_values:
            first_by_values = self._by_values.setdefault(names, {})
            for other in self._rows:
                first_by_values.setdefault(tuple(map(other.asked.get, names)), other)
        if same := self._by_values[names].get(tuple(row.asked.values())):
            return same
        return min(self._rows, key=lambda other: num_different_flags(row, other))


def _with_differences(row: Row, reference: Row, *, strict: bool) -> Row:
    """Return the row with the differences of its numerics that different flags don't explain."""
    if row is reference or row.is_rehearsed:
        return row
    settings: Iterable[str] = row.asked.keys() | reference.asked.keys()
    other = {name for name in settings if row.asked.get(name) != reference.asked.get(name)}
    if row.world_size != reference.world_size:
        other.add("world_size")
    numerics = numerics_from(row.numerics_probed)
    reference_numerics = numerics_from(reference.numerics_probed)
    unexplained = differences(numerics, reference_numerics, other_settings=frozenset(other))
    decisive = ", ".join(str(found) for found in unexplained if strict or found.field in _DECISIVE)
    reasons = (row.unlike, decisive and f"{decisive}, unlike {reference.strategy}")
    return with_values(
        row,
        numerics_differences=[str(difference) for difference in unexplained],
        numerics_alignments=alignments(unexplained) if row.script else [],
        numerics_reference=reference.strategy,
        unlike="; ".join(filter(None, reasons)) or None,
    )


# The order of a report.


def sorted_rows(rows: list[Row], by: str) -> list[Row]:
    """Return the rows of each model, sequence length and machine with the best first; "strategy": unchanged.

    Ties of ranks are sorted by rate. Rows with an unknown value come last, in their old order.
    """
    place = {group: index for index, group in enumerate(dict.fromkeys(map(_machine, rows)))}
    value = _SORT_VALUES[by]
    return sorted(rows, key=lambda row: (place[_machine(row)], value(row) == (), value(row)))


_SORT_VALUES: dict[str, Callable[[Row], tuple]] = {  # an empty tuple: unknown
    "rank": lambda row: () if row.rank is None else (row.rank, -row.tokens_per_second_per_gpu),
    "strategy": lambda row: (),
    "memory": lambda row: () if row.compared_bytes is None else (row.compared_bytes,),
    "cost": lambda row: () if row.usd_per_million_tokens is None else (row.usd_per_million_tokens,),
}


def report_order(found: tuple[Path, RunRecord]) -> tuple:
    """Sort key: size of the model, flags, ranks of a rehearsal, then strategies in the order of the study."""
    record = found[1]
    known = [*STUDIED_STRATEGIES, record.strategy]
    asked = {**record.asked["config"]}
    num_rehearsed = asked.pop("rehearse", None)
    return (
        record.model.get("num_params", 0),
        not record.is_parity_reference,
        _sortable(msgspec.json.encode(asked)),  # as text, since settings of several types can't be ordered
        num_rehearsed or 0,
        known.index(record.strategy),
        str(found[0]),
    )


@cache
def _sortable(asked: bytes) -> bytes:
    """Pad the whole numbers of a JSON, so that its text sorts like the numbers."""
    return re.sub(rb":(\d+)(?=[,}])", lambda number: number[1].rjust(16), asked)
