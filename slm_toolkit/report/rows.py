"""Turn records into ranked rows: a row has every figure of one run, computed once; None: unknown."""

from collections import Counter, defaultdict
from math import inf
from pathlib import Path
from statistics import geometric_mean

from slm_toolkit.base.derived import Derived, Functions, attributes_of, unset
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.hardware.prices import OwnPrices, find_price
from slm_toolkit.model.model_spec import flops_per_token
from slm_toolkit.predict.cost import usd_per_million_tokens
from slm_toolkit.record.measurement_warnings import padding_share, warnings_of
from slm_toolkit.record.numerics import alignments, differences, numerics_from, settings_that_differ
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

MOST_UNCERTAIN = 0.2
"a rate whose interval reaches farther up or down has no rank, unless it is compared in paired rounds"
_DECISIVE = ("compute_dtype", "master_weight_dtype")
"numerics that must not differ between ranked rows: other dtypes take other times"


def _flags(*names: str) -> Functions:
    return {name: lambda row, name=name: row.asked[name] for name in names}


def _most(*names: str) -> Functions:
    """Return functions of the largest value of all ranks and launches."""
    return {
        name: lambda row, name=name: max(
            (value for record in row.measured for value in getattr(record, name) or ()), default=None
        )
        for name in names
    }


_FIGURES: Functions = {
    "model": lambda row: row.main.model["name"],
    **attributes_of("main", "strategy"),
    "status": lambda row: "failed" if row.contradiction else row.status_record.status,
    "reason": lambda row: row.contradiction or row.status_record.reason,
    # measured: from a run; rehearsed: from one process that played rank 0
    **attributes_of("main", "evidence", "engine", "zero_stage", "reshard_after_forward", "world_size"),
    # machines of the ranks, and CPU cores of rank 0's machine; None in older records
    **attributes_of("main", "num_machines", "gpu", "cpu", "num_cores"),
    # malloc or its replacement; None in older records
    "allocator": lambda row: row.versions.get("allocator"),
    **attributes_of("main", "versions", "started_at"),
    # this and the next ones are flags; of a user's own script, most are unknown
    **_flags("numerics"),
    **attributes_of("main", "attn_implementation"),
    **_flags("seq_len", "per_device_train_batch_size", "gradient_accumulation_steps"),
    **_flags("gradient_checkpointing", "kernels", "optim", "seed", "learning_rate", "dataset"),
    # None: the default, thirty after the warm-up
    **_flags("max_steps"),
    # all flags that define this run, including those above
    "asked": lambda row: row.main.flags,
    # 0, or the step of the checkpoint from which the run resumed
    **attributes_of("first", "first_step"),
    "losses": lambda row: [] if row.is_rehearsed else row.first.losses,
    "final_loss": lambda row: row.losses[-1] if row.losses else None,
    # median over all ranks, and both ends of the interval in which another measurement is expected
    **attributes_of("rate", "tokens_per_second", "tokens_per_second_lowest", "tokens_per_second_highest"),
    **attributes_of("rate", "num_timed_steps"),
    "tokens_per_second_by_round": lambda row: row.rate.by_round if row.rate else {},
    # launches that ended ok and were timed
    "num_launches": lambda row: row.rate.num_launches if row.rate else 0,
    # first steps that were not timed: slow or compiling ones, or as set by the user
    **attributes_of("rate", "num_warmup_steps"),
    # mean seconds of step, data, forward, backward and optimizer on the slowest rank of the first launch;
    # under DeepSpeed step and data only, because its backward includes the optimizer's step
    "phase_seconds": lambda row: mean_phases(row.ok_records[0]) if row.ok_records else None,
    # per process without a GPU
    "tokens_per_second_per_gpu": lambda row: (
        row.world_size and row.tokens_per_second and row.tokens_per_second / row.world_size
    ),
    # 0..1, with attention's FLOPs; None if the GPU's peak is unknown
    "mfu": lambda row: _mfu(row),
    "mfu_without_attention": lambda row: (
        row.mfu and row.mfu * row.flops_per_token_without_attention / row.flops_per_token
    ),
    # forward and backward, 6 N + 12 L H S; with adapters 4 N + 6 N_adapters + 12 L H S
    "flops_per_token": lambda row: _flops_per_token(row, seq_len=row.seq_len),
    # 6 N; 4 N + 6 N_adapters
    "flops_per_token_without_attention": lambda row: row.seq_len and _flops_per_token(row, seq_len=0),
    # over all ranks and micro-steps
    **attributes_of("main", "tokens_per_step", "tokens_counted"),
    # share of the tokens, 0..1; rates and dollars exclude padding, MFU includes it (it was computed)
    "padding": lambda row: padding_share(row.main),
    # loss of each held-out set after the last step
    "final_eval_losses": lambda row: {
        name: losses[-1] for name, losses in row.first.eval_losses_by_set.items() if losses
    },
    # trainable parameters with adapters; None: all parameters
    **attributes_of("main", "num_trainable_params"),
    # in a rehearsal, rank 0's; without a GPU it is traced, with tensors that take no memory
    **_most("peak_allocated_bytes"),
    # by closed forms; only for rehearsals and on GPUs, where an observed peak exists
    **attributes_of("estimate", estimated_peak_bytes="peak_allocated_bytes"),
    # by closed forms, for runs on known GPUs; None for a rehearsal, which times compute only
    "estimated_tokens_per_second": lambda row: (
        row.estimate.tokens_per_second if row.estimate and not row.is_rehearsed else None
    ),
    **_most("peak_reserved_bytes", "peak_rss_bytes"),
    # rank 0's peak if allocations were traced: phase, module, num_bytes, parts, modules
    "memory_at_peak": lambda row: next(
        filter(None, (record.memory_at_peak for record in row.measured)), None
    ),
    "state_bytes_per_rank": lambda row: max(
        row.first.state_bytes, key=lambda parts: sum(parts.values()), default=None
    ),
    # DeepSpeed's own estimate per GPU
    "deepspeed_bytes": lambda row: (row.main.deepspeed_estimate or {}).get("gpu_bytes"),
    "usd_per_million_tokens": lambda row: usd_per_million_tokens(
        row.tokens_per_second,
        row.found_price and row.found_price.usd_per_gpu_hour,
        row.world_size,
    ),
    # energy of the GPU boards in the timed steps, from NVML's energy counter
    "joules_per_token": lambda row: None if row.is_rehearsed else joules_per_token(row.ok_records),
    "price": lambda row: row.found_price and str(row.found_price),
    # the fields of numerics.Numerics in the last probed step: the first that compiled nothing, of up to five
    "numerics_probed": lambda row: row.first.numerics,
    # set by `ranked`: how the numerics differ from those of `numerics_reference`, and, of a user's own
    # script, the changes that would remove these differences
    "numerics_differences": lambda row: [],
    "numerics_alignments": lambda row: [],
    **unset("numerics_reference"),
    # the run with which losses were compared, and the result
    **attributes_of("judged", parity_reference="reference"),
    "parity_max_loss_difference": lambda row: row.judged and finite(row.judged.loss_difference),
    "parity_grad_norm_ratio": lambda row: row.judged and finite(row.judged.grad_norm_ratio),
    **attributes_of("judged", parity_holds="holds"),
    # the result as a sentence
    "parity": lambda row: row.judged and str(row.judged),
    # set by `ranked`: place by tokens/s per GPU among rows of the same model, sequence length and GPU.
    # Neighbours share one if none of them is clearly faster than another: its whole interval is above the
    # other's, or with three rounds of --repeats, the interval of their ratios is above 1
    **unset("rank"),
    # whether another row has the same rank: a tie
    **unset("shares_rank"),
    # why this row has no rank: another dtype of compute or master weights than `numerics_reference`, or
    # another number of ranks than was asked for
    "unlike": lambda row: _unlike(row.world_size, row.main.asked.get("num_processes")),
    # events that slowed the run down or may have disturbed its measurement
    "warnings": lambda row: _warnings(row),
    "anatomy": lambda row: next(filter(None, (record.anatomy for record in row.ok_records)), None),
    # the launch command of the first launch; None if it was not launched
    **attributes_of("main", "command"),
    # the record file of the first launch
    "record": lambda row: str(row.path),
    # None: unknown, because a user's own script failed
    "num_params": lambda row: row.main.model.get("num_params"),
    # the user's own script that did the run; None: this toolkit's trainer, or another one
    "script": lambda row: row.main.asked["script"][0] if row.main.is_of_script else None,
    # set by `slm compare --largest_batch`: largest per-device batch that ran; 0: not even 1 ran
    **unset("largest_batch"),
    # smallest batch that ran out of memory; None: the largest batch that was tried ran
    **unset("smallest_oom_batch"),
}
"the figures of a row, which are the keys of `--json`; a function may read other figures"


class Row(Derived):
    """One line of a report: all launches of one run, and the figures of the table `FIELDS`.

    Bytes are those of the rank with the most. Impossible figures make the status failed: see `impossible`.
    A rehearsal has no losses and no dollars; its rate, if any, is the rate of compute alone.
    """

    FIELDS = _FIGURES

    def __init__(
        self,
        launches: list[tuple[Path, RunRecord]],
        *,
        prices: OwnPrices | None = None,
        judged: Parity | None = None,
    ) -> None:
        """Compute all figures, so that an error shows which record can't be shown.

        `judged`: the parity of its worst launch. If losses can't be compared, the row has only the reason.
        """
        self.path = launches[0][0]
        records = [record for _, record in launches]
        self.ok_records = [record for record in records if record.status == "ok"]
        self.measured = self.ok_records or records
        # a failed launch decides the status, even if others ended ok
        self.status_record = next((record for record in records if record.status != "ok"), records[0])
        self.main = self.ok_records[0] if self.ok_records else self.status_record
        self.first = self.measured[0]
        self.rate = throughput(self.ok_records)
        self.found_price = None if self.is_rehearsed else find_price(self.main.gpu, prices)
        self.estimate = estimate_of(self.main) if self.main.gpu or self.is_rehearsed else None
        is_unlike = judged is not None and judged.unlike is not None and not judged.faults
        self.judged, self.losses_unlike = (None, judged.unlike) if is_unlike else (judged, None)
        self.as_json()

    @property
    def is_rehearsed(self) -> bool:
        return self.evidence == "rehearsed"

    @property
    def is_on_cpu(self) -> bool:
        """Return whether memory is a process's, because nothing ran, or was rehearsed, on a GPU."""
        return not (self.gpu or self.is_rehearsed)

    @property
    def contradiction(self) -> str | None:
        is_ok = self.status_record.status == "ok"
        return impossible(self.ok_records, self.mfu) if is_ok else None

    @property
    def peak_bytes(self) -> int | None:
        """Return the GPU memory that tensors took (in a rehearsal: would take); on CPU, the process's RSS."""
        return self.peak_rss_bytes if self.is_on_cpu else self.peak_allocated_bytes

    @property
    def state_bytes(self) -> int | None:
        return sum((self.state_bytes_per_rank or {}).values()) or None

    @property
    def compared_bytes(self) -> int | None:
        """Return `peak_bytes`; on a CPU the training state, because a process's RSS has other parts, too."""
        return self.state_bytes if self.is_on_cpu else self.peak_bytes

    @property
    def is_uncertain(self) -> bool:
        """Return whether another measurement could be faster or slower by more than MOST_UNCERTAIN."""
        ends = self.interval or ()
        return any(abs(end / self.tokens_per_second - 1) > MOST_UNCERTAIN for end in ends)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Return both ends of the interval of tokens per second; None if too few steps were timed."""
        if self.tokens_per_second_lowest is None:
            return None
        return self.tokens_per_second_lowest, self.tokens_per_second_highest

    @property
    def is_open_ended(self) -> bool:
        """Return whether a batch larger than the largest one may run, because none was tried."""
        return self.largest_batch is not None and self.smallest_oom_batch is None

    @property
    def is_good(self) -> bool:
        return self.status == "ok" and self.parity_holds is not False

    @property
    def state(self) -> str:
        """Return the status, or `unequal` for a run that computed something else than its reference."""
        return "unequal" if self.parity_holds is False else self.status


def _warnings(row: Row) -> list[str]:
    if row.is_rehearsed:
        return []
    warnings = [warning for record in row.ok_records for warning in warnings_of(record)]
    if row.losses_unlike:
        warnings.append(f"losses not comparable: {row.losses_unlike}")
    if row.ok_records and row.rate is None:
        unknown = "tokens are unknown: the model was called without token ids"
        warnings.insert(0, "no step was timed: all steps were warm-up" if row.tokens_per_step else unknown)
    return warnings


def _flops_per_token(row: Row, *, seq_len: int | None) -> float | None:
    """Return the FLOPs of a token in a sequence of this length; None for models of unknown shape."""
    record = row.main
    if not record.has_known_shapes or seq_len is None:
        return None
    # frozen weights need no gradients, hence fewer FLOPs
    adapters = None if row.asked["peft"] in ("none", None) else record.num_trainable_params or 0
    return flops_per_token(record.spec, seq_len=seq_len, adapter_params=adapters)


def _mfu(row: Row) -> float | None:
    """Return the share of the GPU's dense peak in 16 bits; None for an unknown GPU, and in fp32 (unknown)."""
    gpu, record = find_gpu(row.gpu), row.main
    computed_in = (record.numerics or {}).get("compute_dtype")
    is_fp32 = (
        computed_in not in ("bfloat16", "float16")
        if record.is_of_script
        else record.asked["config"]["numerics"] == "fp32"
    )
    if gpu is None or not row.tokens_per_second_per_gpu or row.flops_per_token is None or is_fp32:
        return None
    computed = row.tokens_per_second_per_gpu / (1 - row.padding)
    return computed * row.flops_per_token / gpu.dense_bf16_flops_per_second


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


def _unlike(size: int | None, asked: int | None) -> str | None:
    """Return that a run had other ranks than it asked for, as accelerate's launcher may start fewer."""
    return None if None in (size, asked) or size == asked else f"{size} of {asked} ranks ran"


# Records to rows: all launches of a run make one row, with parity and rank.


def rows_of(
    records: list[tuple[Path, RunRecord]],
    *,
    prices: OwnPrices | None = None,
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
            known = [parity for index in indices if (parity := parities[index]) is not None]
            worst = max(known, key=_badness, default=None)
            rows.append(Row([records[index] for index in indices], prices=prices, judged=worst))
        except Exception as error:
            if problems is None:
                raise
            problems.append(f"{records[indices[0]][0]} can't be shown: {type(error).__name__}: {error}")
    return ranked(rows)


def _badness(parity: Parity) -> tuple:
    return bool(parity.faults), parity.unlike is not None, not parity.holds, parity.loss_difference


# Which rows of a report may be compared, and their ranks by tokens per second; ties share a rank.


def ranked(rows: list[Row]) -> list[Row]:
    """Return the rows in the same order, with ranks and differences of their numerics.

    Rows of one model, sequence length and machine are ranked together. The reference for differences is a DDP
    row of the same `--numerics`, else a row of one process, else the first such row. A rehearsal has no rank.
    """
    rows = [row.with_values(rank=None, shares_rank=None) for row in rows]
    _mark_differences(rows)
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if _competes(row):
            groups[_machine(row)].append(row)
    for group in groups.values():
        if len(group) > 1:
            _rank(group)
    return rows


def _rank(group: list[Row]) -> None:
    tied: list[Row] = []
    for place, row in enumerate(sorted(group, key=_mean_rate, reverse=True), start=1):
        # per GPU, so that two GPUs are not twice as good as one
        if any(clearly_faster(other, row, weight=row.world_size / other.world_size) for other in tied):
            tied = []
        tied.append(row)
        row.rank = place - len(tied) + 1
    num_of_rank = Counter(row.rank for row in group)
    for row in group:
        row.shares_rank = num_of_rank[row.rank] > 1


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


def _competes(row: Row) -> bool:
    in_rounds = len(row.tokens_per_second_by_round) >= MIN_ROUNDS
    is_judged = row.interval is not None and (in_rounds or not row.is_uncertain)
    timed = is_judged and row.world_size is not None and not row.is_rehearsed
    return row.is_good and timed and row.unlike is None


def _machine(row: Row) -> tuple:
    return row.script or row.model, row.num_params, row.seq_len, row.gpu or row.cpu


def _mark_differences(rows: list[Row]) -> None:
    """Mark how the numerics of rows differ from their references."""
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        if row.numerics_probed and not row.is_rehearsed:
            groups[_machine(row), row.numerics].append(row)
    for group in groups.values():
        ok = [row for row in group if row.status == "ok"]
        by_engine = ([row for row in ok if row.engine == engine] for engine in ("ddp", "single"))
        if candidates := next(filter(None, by_engine), ok):
            by_flags = {tuple(row.asked.items()): row for row in reversed(candidates)}
            for row in group:
                _mark_difference(row, by_flags.get(tuple(row.asked.items()), candidates[0]))


def _mark_difference(row: Row, reference: Row) -> None:
    """Mark the differences of a row's numerics that different flags don't explain."""
    if row is reference:
        return
    settings = ({**each.asked, "world_size": each.world_size} for each in (row, reference))
    unexplained = differences(
        numerics_from(row.numerics_probed),
        numerics_from(reference.numerics_probed),
        other_settings=settings_that_differ(*settings),
    )
    decisive = ", ".join(str(found) for found in unexplained if found.field in _DECISIVE)
    reasons = (row.unlike, decisive and f"{decisive}, unlike {reference.strategy}")
    row.numerics_differences = [str(difference) for difference in unexplained]
    row.numerics_alignments = alignments(unexplained) if row.script else []
    row.numerics_reference = reference.strategy
    row.unlike = "; ".join(filter(None, reasons)) or None


# The order of a report.


def sorted_rows(rows: list[Row]) -> list[Row]:
    """Return the rows of each model, sequence length and machine with the fastest first.

    Ties of ranks are sorted by rate. Rows without a rank come last, in their old order.
    """
    place = {group: index for index, group in enumerate(dict.fromkeys(map(_machine, rows)))}

    def key(row: Row) -> tuple[float, ...]:
        order = (inf,) if row.rank is None else (row.rank, -row.tokens_per_second_per_gpu)
        return place[_machine(row)], *order

    return sorted(rows, key=key)


def report_order(found: tuple[Path, RunRecord]) -> tuple:
    """Sort key: size of the model, flags, ranks of a rehearsal, then strategies in the order of the study."""
    record = found[1]
    known = [*STUDIED_STRATEGIES, record.strategy]
    asked = {**record.asked["config"]}
    num_rehearsed = asked.pop("rehearse", None)
    return (
        record.model.get("num_params", 0),
        not record.is_parity_reference,
        # as text, since settings of several types can't be ordered; padded numbers sort as numbers
        [str(value).rjust(16) if type(value) is int else str(value) for value in asked.values()],
        num_rehearsed or 0,
        known.index(record.strategy),
        str(found[0]),
    )
