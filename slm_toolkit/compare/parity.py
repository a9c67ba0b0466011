"""Whether a run computed what its reference did: losses and gradient norms, step by step."""

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import isfinite

import orjson

from slm_toolkit.compare.difference_causes import cause_of
from slm_toolkit.numerics import (
    GRAD_NORM_STEPS,
    GRAD_NORM_TOLERANCE,
    LOSS_TOLERANCE,
    PARITY_STEPS,
    precision_of,
)
from slm_toolkit.record import FP32_REFERENCE, RunRecord

_ANY_VALUE_COMPUTES_THE_SAME = (  # other values of these flags are other ways to the same losses
    *("attn_implementation", "gradient_checkpointing", "torch_compile", "numerics", "reduce_dtype", "optim"),
    *("loss_kernel", "norm_kernel", "mlp_kernel", "use_liger_kernel", "torch_compile_mode", "fp8", "tf32"),
    *("fsdp_prefetch", "dataloader_num_workers"),
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("profile", "save_steps", "on_bad_step", "max_loss"),
)


@dataclass(frozen=True)
class Parity:
    """How far a run lies from its reference over `num_steps` steps."""

    reference: str
    num_steps: int
    loss_difference: float
    "absolute, at `worst_step`; infinite where a loss is not a number"
    worst_step: int
    "where the difference is the largest part of what is allowed; counted from 1"
    grad_norm_ratio: float | None
    "the farthest from 1 of the first steps; None where an engine tells no norms"
    loss_tolerance: float
    "at `worst_step`"
    grad_norm_limit: float
    "largest ratio that passes, and the inverse of the smallest"
    conflict: str | None = None
    "where neither run is known to be right: a sentence that names both"
    cause: str | None = None
    "why it does not hold, where the records show it"

    @property
    def holds(self) -> bool:
        limit = self.grad_norm_limit
        norms_agree = self.grad_norm_ratio is None or 1 / limit <= self.grad_norm_ratio <= limit
        return self.loss_difference <= self.loss_tolerance and norms_agree

    def __str__(self) -> str:
        return (self.conflict or self._difference) + (f". Cause: {self.cause}" if self.cause else "")

    @property
    def _difference(self) -> str:
        norms = (
            "gradient norms unknown"
            if self.grad_norm_ratio is None
            else f"gradient norm ratio {self.grad_norm_ratio:.4g} (allowed {self.grad_norm_limit:.3g})"
        )
        return (
            f"against {self.reference} over {self.num_steps} steps: |Δloss| {self.loss_difference:.2g} "
            f"at step {self.worst_step} (allowed {self.loss_tolerance:.2g}), {norms}"
        )


def judge(records: list[RunRecord], *, loss_tolerance: float | None = None) -> list[Parity | None]:
    """The Parity of each record; None for a reference itself and for what has none among the records.

    The reference is a single process in fp32 that saw the same batches, else DDP (or one process) with the
    very same flags. What one process of the record's own numerics differs by from fp32 is no strategy's
    fault: where `slm compare --parity` ran one, twice that is allowed. Strategies without a reference that
    had the very same flags and batches are compared with each other. `loss_tolerance` replaces every
    tolerance.
    """
    known = _known(records)
    judged: list[Parity | None] = [None] * len(records)
    others: dict[bytes, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        if record.is_parity_reference or not _usable(record):
            continue
        if reference := _reference_of(record, known):
            control = _control_of(record, known)
            judged[index] = compare_with(reference, record, control=control, loss_tolerance=loss_tolerance)
        elif hashes := (record.numerics or {}).get("batch_hashes"):
            others[_asked_of(record) + orjson.dumps(hashes)].append(index)
    for indices in others.values():
        if len({records[index].strategy for index in indices}) == 1:  # a reference, or repeats
            continue
        parities = _among_each_other([records[index] for index in indices], loss_tolerance)
        for index, parity in zip(indices, parities, strict=True):
            judged[index] = parity
    return judged


def _among_each_other(records: list[RunRecord], loss_tolerance: float | None) -> list[Parity | None]:
    """The Parity of each of several runs of the same flags and batches, none of which is a reference.

    Runs that agree make a group. If one group has more strategies than every other, its first run is the
    reference of all; else nobody knows which group is right, and no run's parity holds.
    """
    groups: list[list[int]] = []
    for index, record in enumerate(records):
        for group in groups:
            if compare_with(records[group[0]], record, loss_tolerance=loss_tolerance).holds:
                group.append(index)
                break
        else:
            groups.append([index])
    sizes = [len({records[index].strategy for index in group}) for group in groups]
    if sizes.count(max(sizes)) == 1:
        largest = groups[sizes.index(max(sizes))]
        reference = records[largest[0]]
        own = [index for index in largest if records[index].strategy == reference.strategy]
        return [
            None if index in own else compare_with(reference, record, loss_tolerance=loss_tolerance)
            for index, record in enumerate(records)
        ]
    judged: list[Parity | None] = []
    for index, record in enumerate(records):
        other = next(group[0] for group in groups if index not in group)
        parity = compare_with(records[other], record, loss_tolerance=loss_tolerance)
        first, second = records[min(index, other)], records[max(index, other)]
        judged.append(replace(parity, conflict=_conflict(first, second, parity)))
    return judged


def _conflict(first: RunRecord, second: RunRecord, parity: Parity) -> str:
    """A sentence with both losses of the first step that differs beyond the tolerance."""
    sentence = f"{first.strategy} and {second.strategy} compute different things"
    for step, (loss, other) in enumerate(zip(first.losses, second.losses, strict=False), start=1):
        if None in (loss, other) or abs(loss - other) > parity.loss_tolerance:
            losses = " and ".join("NaN" if one is None else f"{one:.4f}" for one in (loss, other))
            return f"{sentence}: step-{step} loss {losses} on the same batches"
    return f"{sentence}: gradient norm ratio {parity.grad_norm_ratio:.4g} on the same batches"


def compare_with(
    reference: RunRecord,
    record: RunRecord,
    *,
    control: RunRecord | None = None,
    loss_tolerance: float | None = None,
) -> Parity:
    """Losses and norms of the steps that both have. Raises ValueError where they share none.

    Where a reference was asked for, all of its steps count, and what is allowed grows with their number
    beyond PARITY_STEPS; else the first PARITY_STEPS do. Norms: the first GRAD_NORM_STEPS.
    """
    num_steps = len(reference.losses) if reference.is_parity_reference else PARITY_STEPS
    gaps = _gaps(reference, record, num_steps)
    if not gaps:
        raise ValueError(f"{record.run_name} and {reference.run_name} share no step")
    precision = precision_of(record.asked["config"])
    allowed = _allowed(precision, len(gaps))
    limit = 1 + GRAD_NORM_TOLERANCE[precision]
    if control is not None:
        own = [gap if isfinite(gap) else 0.0 for gap in _gaps(reference, control, num_steps)]
        allowed = [
            max(pair) for pair in zip(allowed, (2 * gap for gap in accumulate(own, max)), strict=False)
        ]
        ratio = _grad_norm_ratio(reference, control)
        limit = max(limit, _at_least_1(ratio) ** 2) if ratio is not None and isfinite(ratio) else limit
    if loss_tolerance is not None:
        allowed = [loss_tolerance] * len(gaps)
    parts = [gap / each for gap, each in zip(gaps, allowed, strict=False)]
    worst = parts.index(max(parts))
    parity = Parity(
        reference=FP32_REFERENCE if _is_fp32_reference(reference) else reference.strategy,
        num_steps=len(gaps),
        loss_difference=gaps[worst],
        worst_step=worst + 1,
        grad_norm_ratio=_grad_norm_ratio(reference, record),
        loss_tolerance=allowed[worst],
        grad_norm_limit=limit,
    )
    return parity if parity.holds else replace(parity, cause=cause_of(record, reference))


@cache
def _allowed(precision: str, num_steps: int) -> list[float]:
    return [LOSS_TOLERANCE[precision] * max(1.0, step / PARITY_STEPS) for step in range(1, num_steps + 1)]


def _gaps(reference: RunRecord, record: RunRecord, num_steps: int) -> list[float]:
    losses = list(zip(reference.losses, record.losses, strict=False))[:num_steps]
    return [float("inf") if None in pair else abs(pair[1] - pair[0]) for pair in losses]


def _grad_norm_ratio(reference: RunRecord, record: RunRecord) -> float | None:
    """The farthest from 1 of the first steps'; None where none is known, infinite for a missing one."""
    if any(all(norm is None for norm in run.grad_norms) for run in (reference, record)):
        return None
    norms = list(zip(reference.grad_norms, record.grad_norms, strict=False))[:GRAD_NORM_STEPS]
    ratios = [norm / wanted if wanted and norm else float("inf") for wanted, norm in norms if wanted != norm]
    return max(ratios, key=_at_least_1, default=1.0)


def _at_least_1(ratio: float) -> float:
    return max(ratio, 1 / ratio)


@dataclass(frozen=True)
class _Known:
    """The records that others can be held against, by what makes them comparable."""

    fp32_references: dict[bytes, list[RunRecord]]
    "by task, those that were asked for first"
    controls: dict[tuple[str, bytes], RunRecord]
    "by numerics and task"
    ddp_or_single: dict[bytes, RunRecord]
    "by all that was asked"


def _known(records: list[RunRecord]) -> _Known:
    known = _Known(defaultdict(list), {}, {})
    usable = list(filter(_usable, records))
    for record in sorted(usable, key=lambda record: not record.is_parity_reference):
        if _is_fp32_reference(record):
            known.fp32_references[_task_of(record)].append(record)
        if record.is_parity_reference:
            known.controls.setdefault((record.asked["config"]["numerics"], _task_of(record)), record)
    for record in usable:
        if record.engine in ("ddp", "single"):
            known.ddp_or_single.setdefault(_asked_of(record), record)
    return known


def _reference_of(record: RunRecord, known: _Known) -> RunRecord | None:
    if known.fp32_references:
        for other in known.fp32_references.get(_task_of(record), []):
            if other is not record and (other.is_parity_reference or other.identity != record.identity):
                return other
    if record.engine in ("ddp", "single"):
        return None
    return known.ddp_or_single.get(_asked_of(record))


def _usable(record: RunRecord) -> bool:
    return (
        record.status == "ok" and bool(record.losses) and record.first_step == 0 and not record.is_rehearsal
    )


def _is_fp32_reference(record: RunRecord) -> bool:
    return record.engine == "single" and record.asked["config"]["numerics"] == "fp32"


def _control_of(record: RunRecord, known: _Known) -> RunRecord | None:
    """One process of the same numerics; for a single process's row, another launch of it."""
    numerics = record.asked["config"]["numerics"]
    if numerics == "fp32" or not known.controls:
        return None
    return known.controls.get((numerics, _task_of(record)))


def _asked_of(record: RunRecord) -> bytes:
    asked = [record.asked["config"], record.asked["files"], record.world_size, record.gpu]
    return orjson.dumps(asked, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)


def _task_of(record: RunRecord) -> bytes:
    """What decides the losses: model, data and schedule, and the sequences of one step over all ranks.

    Epochs, too, end after whole steps.
    """
    config = record.asked["config"]
    settings = {name: value for name, value in config.items() if name not in _ANY_VALUE_COMPUTES_THE_SAME}
    settings["max_grad_norm"] = settings["max_grad_norm"] or 0.0  # stock: the script asks for none
    sequences = (
        config["per_device_train_batch_size"]
        * config["gradient_accumulation_steps"]
        * record.asked["num_processes"]
    )
    task = [settings, sequences, record.asked["files"]]
    return orjson.dumps(task, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
