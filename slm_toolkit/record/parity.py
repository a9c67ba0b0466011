"""Whether a run computed what others did and what was asked: losses, norms, weights, live settings."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite

import msgspec

from slm_toolkit.config.run_config import FLAGS
from slm_toolkit.config.schedule import learning_rate
from slm_toolkit.record.measurement_warnings import rank_differences
from slm_toolkit.record.numerics import (
    ALIKE,
    ALIKE_IN_TASK,
    LOW_PRECISION,
    PARITY_STEPS,
    ROUNDED,
    Limits,
    Numerics,
    differences,
    is_computed_plainly,
    limits_by_step,
    numerics_from,
    precision_of,
)
from slm_toolkit.record.run_record import FP32_REFERENCE, RunRecord

_NORM_EPS = "1e-06"
"of transformers' configurations of the presets' architectures, where nothing else is given"
_CLOSE = 1e-4
"relative: settings are kept with six digits"


def settings_not_as_asked(record: RunRecord) -> list[str]:
    """A sentence for each setting that is another; empty for older records, which don't show them."""
    numerics = numerics_from(record.numerics)
    if numerics is None or record.first_step > 0 or record.is_rehearsal:
        return []
    of_state = {"master weights": numerics.master_weight_dtype}
    config = record.config
    if config.adam_beta1 and config.adam_beta2:  # else a moment is the gradient, which bf16 may hold
        of_state["moments"] = numerics.optimizer_state_dtype
    rounded = [f"{name} are {dtype}" for name, dtype in of_state.items() if ROUNDED in str(dtype)]
    return [*_of_optimizer(record, numerics), *_of_model(record, numerics), *rounded]


def _of_optimizer(record: RunRecord, numerics: Numerics) -> list[str]:
    config = record.config
    scaled = replace(config, learning_rate=config.learning_rate_of(_sequences_per_step(record)))
    num_steps = config.steps_asked or len(record.losses)
    found = []
    clipping = config.max_grad_norm
    if clipping is not None and numerics.clipping not in (None, clipping):
        found.append(f"gradients clipped at {numerics.clipping:g}, not {clipping:g}")
    steps = ((record.num_probed_steps - 1, numerics.optimizer_settings, "at the first step"),)
    if len(record.losses) == num_steps:
        steps += ((num_steps - 1, numerics.optimizer_settings_at_end, "at the last step"),)
    for step, line, when in steps:
        rate = learning_rate(scaled, step, num_steps)
        for group in line.split("; ") if line else ():
            ran = {name: float(value) for name, value in re.findall(r"(lr|eps|decay) ([-+.\de]+)", group)}
            betas = [float(beta) for beta in re.findall(r"betas (\S+) (\S+),", group)[0]]
            ran |= {"beta1": betas[0], "beta2": betas[1]}
            asked = {
                "lr": rate,
                "eps": config.adam_epsilon,
                "beta1": config.adam_beta1,
                "beta2": config.adam_beta2,
            }
            asked["decay"] = config.weight_decay if ran["decay"] else 0.0
            found += [
                f"{name} {ran[name]:g} {when}, not {value:g}"
                for name, value in asked.items()
                if not _is_close(ran[name], value)
            ]
        decays = re.findall(r"decay ([-+.\de]+)", line or "")
        if line and config.weight_decay and config.peft == "none" and "0" not in decays:
            found.append(f"weight decay on norms, too, {when}")
        if line and config.weight_decay and set(decays) == {"0"}:
            found.append(f"no weight decay {when}, not {config.weight_decay:g}")
    return list(dict.fromkeys(found))


def _of_model(record: RunRecord, numerics: Numerics) -> list[str]:
    """A user's own configuration has rope, norms and dropout of its own, so only its ties are known here."""
    spec, config = record.spec, record.config
    found = []
    if numerics.dropout not in (None, "none") and not config.lora_dropout and spec.path is None:
        found.append(f"dropout {numerics.dropout}, which nobody asked for")
    if numerics.tied not in (None, "tied" if spec.tied else "untied"):
        found.append(f"embedding and head {numerics.tied}")
    if config.peft == "none" and numerics.frozen not in (None, "none"):
        found.append(f"not trained: {numerics.frozen}")
    if spec.path is not None:
        return found
    if numerics.norm_eps not in (None, _NORM_EPS):
        found.append(f"norms' eps {numerics.norm_eps}, not {_NORM_EPS}")
    last = spec.rope_theta ** -((spec.head_dim - 2) / spec.head_dim)
    if numerics.rope and not _is_close(float(re.findall(r"to (\S+),", numerics.rope)[0]), last):
        found.append(f"RoPE's frequencies {numerics.rope}, the last should be {last:g}")
    if numerics.rope and not numerics.rope.startswith("float32"):
        found.append(f"RoPE's frequencies in {numerics.rope.split()[0]}")
    scales = re.findall(r"scale (\S+?)(?: and|$)", numerics.attention_call or "")
    wrong = [scale for scale in scales if not _is_close(float(scale), spec.head_dim**-0.5)]
    found += [f"attention's scale {scale}, not {spec.head_dim**-0.5:g}" for scale in wrong]
    drops = re.findall(r"dropout (\S+),", numerics.attention_call or "")
    found += [f"attention drops {drop} of its weights" for drop in drops if float(drop)]
    masks = (numerics.attention_call or "").split(" and ")
    found += [f"attention {mask.split(',')[0]}" for mask in masks if mask.startswith("without a mask")]
    return found


def _is_close(value: float, other: float) -> bool:
    return abs(value - other) <= _CLOSE * abs(other)


def cause_of(record: RunRecord, reference: RunRecord) -> str | None:
    """A sentence without its full stop; None where the records show no cause."""
    ran, expected = numerics_from(record.numerics), numerics_from(reference.numerics)
    found = []
    if _weights_differ(record, reference):
        found.append("the weights before step 1 differ")
    elif record.weights_fingerprint is None and _draws_other_weights(record):
        found.append("zero3_init_flag drew other random weights in that older run (--force: run it anew)")
    if ran is None or expected is None:
        return found[0] if found else None
    same_ranks = len(ran.batch_hashes or []) == len(expected.batch_hashes or [])
    if same_ranks and ran.batch_hashes != expected.batch_hashes:
        found.append("the batches of step 1 differ")
    if _asked_alike(record, reference):
        other = [each for each in differences(ran, expected) if each.field != "batch_hashes"]
        found += map(str, other)
    return "; ".join(found) or None


def _weights_differ(record: RunRecord, reference: RunRecord) -> bool:
    pair = (record.weights_fingerprint, reference.weights_fingerprint)
    return None not in pair and pair[0] != pair[1]


def _draws_other_weights(record: RunRecord) -> bool:
    """Random weights in pieces, of a record from before those were drawn as under every other strategy."""
    path = record.model.get("path")
    is_random = path is None or str(path).endswith(".json")
    section = (record.asked.get("accelerate_config") or {}).get("deepspeed_config") or {}
    in_pieces = str(section.get("zero3_init_flag", True)).lower() == "true"  # accelerate's default
    return is_random and record.zero_stage == 3 and in_pieces


def _asked_alike(record: RunRecord, reference: RunRecord) -> bool:
    """Whether other numerics are the strategy's doing: no flag asked for them."""
    one, other = record.asked["config"], reference.asked["config"]
    return one == other and record.world_size == reference.world_size


_SAME_TASK = frozenset(name for name, flag in FLAGS.items() if flag.losses != "others")
"other values of these flags are other ways to the same losses"
_SMALL_SHARE = 1e-3
"of the largest parameter's gradient norm: a smaller one may be nothing but rounding"


@dataclass(frozen=True)
class Parity:
    """How far a run lies from another over `num_steps` steps, and what else is wrong with it."""

    reference: str
    num_steps: int
    loss_difference: float
    "absolute, at `worst_step`; infinite where a loss is not a number"
    worst_step: int
    "where the difference is the largest part of what is allowed; counted from 1"
    grad_norm_ratio: float | None
    "at the step where it is the largest part of what is allowed; None where an engine tells no norms"
    loss_tolerance: float
    "at `worst_step`"
    grad_norm_limit: float
    "largest ratio that passes at that ratio's step, and the inverse of the smallest"
    parameter: str | None = None
    "whose gradient's norm in step 1 is farthest from the reference's; None where they were not compared"
    parameter_ratio: float | None = None
    parameter_limit: float | None = None
    what: str = ""
    "which steps were compared, where it is not the run's own"
    conflict: str | None = None
    "where neither run is known to be right: a sentence that names both"
    faults: tuple[str, ...] = ()
    "what is wrong whatever the losses: ranks that hold different weights, settings that nobody asked for"
    cause: str | None = None
    "why it does not hold, where the records show it"

    @property
    def holds(self) -> bool:
        return not self.faults and self.agrees

    @property
    def agrees(self) -> bool:
        """Whether losses and gradient norms are within what is allowed."""
        return self.excess <= 1

    @property
    def excess(self) -> float:
        """The largest part of what is allowed; infinite where a number is missing."""
        parts = [self.loss_difference / self.loss_tolerance]
        if self.grad_norm_ratio is not None:
            parts.append((_at_least_1(self.grad_norm_ratio) - 1) / (self.grad_norm_limit - 1))
        if self.parameter_ratio is not None:
            parts.append((_at_least_1(self.parameter_ratio) - 1) / (self.parameter_limit - 1))
        return max(parts)

    def __str__(self) -> str:
        said = [] if self.agrees and self.faults else [self.conflict or self.difference]
        return "; ".join([*self.faults, *said]) + (f". Cause: {self.cause}" if self.cause else "")

    @property
    def difference(self) -> str:
        """All figures, and what is allowed."""
        norms = (
            "gradient norms unknown"
            if self.grad_norm_ratio is None
            else f"gradient norm ratio {self.grad_norm_ratio:.4g} (allowed {self.grad_norm_limit:.4g})"
        )
        if self.parameter_ratio is not None:
            norms += f", of one parameter in step 1 {self.parameter_ratio:.5g}"
            norms += f" (allowed {self.parameter_limit:.5g}; {self.parameter})"
        return (
            f"against {self.reference} over {self.num_steps} steps{self.what}: "
            f"|Δloss| {self.loss_difference:.2g} at step {self.worst_step} "
            f"(allowed {self.loss_tolerance:.2g}), {norms}"
        )


def judge(records: list[RunRecord], *, loss_tolerance: float | None = None) -> list[Parity | None]:
    """The Parity of each record, the one of its `comparisons` that is nearest to what is allowed, or beyond.

    None for a reference itself and for what can't be compared. Strategies without a reference that had the
    very same flags and batches are compared with each other. `loss_tolerance` replaces every tolerance of
    losses.
    """
    known = _known(records)
    judged: list[Parity | None] = [None] * len(records)
    others: dict[bytes, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        if record.is_parity_reference or not _usable(record):
            continue
        if found := _comparisons(record, known, loss_tolerance):
            # the reference in fp32 is what a reader wants to see, unless another one is worse than allowed
            judged[index] = max(
                found, key=lambda parity: (not parity.agrees, parity.reference == FP32_REFERENCE)
            )
        else:
            others[_asked_of(record)].append(index)
    for indices in _comparable(others, records):
        if len({records[index].strategy for index in indices}) == 1:  # repeats
            continue
        parities = _among_each_other([records[index] for index in indices], loss_tolerance)
        for index, parity in zip(indices, parities, strict=True):
            judged[index] = parity
    for index, record in enumerate(records):
        if _usable(record) and not record.is_parity_reference and (faults := _faults(record)):
            parity = judged[index] or _alone(record)
            judged[index] = replace(parity, faults=faults)
    return judged


def _comparable(asked_alike: dict[bytes, list[int]], records: list[RunRecord]) -> Iterator[list[int]]:
    """Groups of runs that can be held against each other: without DDP only those of the same batches."""
    for indices in asked_alike.values():
        if any(records[index].engine in ("ddp", "single") for index in indices):
            yield indices
            continue
        by_batches: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for index in indices:
            if hashes := (records[index].numerics or {}).get("batch_hashes"):
                by_batches[tuple(hashes)].append(index)
        yield from by_batches.values()


def _comparisons(record: RunRecord, known: "_Known", loss_tolerance: float | None) -> list[Parity]:
    """Of a record with references: its steps against fp32 and against one process of the same numerics, its
    fp32 steps against fp32, and that one process against fp32, whose own fault would be everybody's."""
    fp32 = _fp32_reference_of(record, known)
    if fp32 is None:
        return []
    limits = LOW_PRECISION[precision_of(record.asked["config"])]
    if not record.config.parity_task:
        limits = _wider(limits)
    options = {"loss_tolerance": loss_tolerance}
    found = [compare_with(fp32, record, limits=limits, **options)]
    if record.fp32_pass and record.fp32_pass["status"] == "ok":
        names = ("losses", "grad_norms", "parameter_grad_norms", "numerics")
        in_fp32 = replace(record, **{name: record.fp32_pass[name] for name in names})
        found.append(compare_with(fp32, in_fp32, limits=ALIKE["fp32"], what=" in fp32", **options))
    control = _control_of(record, known)
    if control is not None and control is not record:
        alike = _alike_limits(record) if is_computed_plainly(record.asked["config"]) else limits
        found.append(compare_with(control, record, limits=alike, **options))
        own = compare_with(fp32, control, limits=limits, **options)
        if not own.agrees:
            name = f"one process in {control.asked['config']['numerics']}"
            found.append(replace(own, conflict=f"{name} itself differs, {own.difference}"))
    return found


def _wider(limits: Limits) -> Limits:
    """For weights and data of a user's own, whose distance from fp32 nobody has measured."""
    return Limits(loss=2 * limits.loss, norm=2 * limits.norm)


def _faults(record: RunRecord) -> tuple[str, ...]:
    """What is wrong with a run whatever others computed."""
    checks = [*record.weights_of_ranks, *((record.fp32_pass or {}).get("weights_of_ranks") or ())]
    found = [sentence for check in checks if (sentence := rank_differences(check)) is not None]
    return (*found[:1], *settings_not_as_asked(record))


def _alone(record: RunRecord) -> Parity:
    """Of a record with nothing to compare: it agrees with itself."""
    return Parity(record.strategy, len(record.losses), 0.0, 1, None, 1.0, 1.0)


def _among_each_other(records: list[RunRecord], loss_tolerance: float | None) -> list[Parity | None]:
    """The Parity of each of several runs of the same flags and batches, none of which is a reference.

    Runs that agree make a group. If one group has more strategies than every other, one of it (DDP, if it is
    there, else the first) is the reference of all; else nobody knows which group is right, and no run's
    parity holds.
    """
    groups: list[list[int]] = []
    first_ddp = sorted(range(len(records)), key=lambda index: records[index].engine != "ddp")
    for index in first_ddp:
        for group in groups:
            if _alike(records[group[0]], records[index], loss_tolerance).agrees:
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
            None if index in own else _alike(reference, record, loss_tolerance)
            for index, record in enumerate(records)
        ]
    judged: list[Parity | None] = []
    for index, record in enumerate(records):
        other = next(group[0] for group in groups if index not in group)
        parity = _alike(records[other], record, loss_tolerance)
        first, second = records[min(index, other)], records[max(index, other)]
        judged.append(replace(parity, conflict=_conflict(first, second, parity)))
    return judged


def _alike(reference: RunRecord, record: RunRecord, loss_tolerance: float | None) -> Parity:
    """Two runs of the same numerics, flags and batches."""
    return compare_with(reference, record, limits=_alike_limits(record), loss_tolerance=loss_tolerance)


def _alike_limits(record: RunRecord) -> Limits:
    alike = ALIKE_IN_TASK if record.config.parity_task else ALIKE
    return alike[precision_of(record.asked["config"])]


def _conflict(first: RunRecord, second: RunRecord, parity: Parity) -> str:
    """A sentence with both losses of the first step that differs beyond the tolerance."""
    sentence = f"{first.strategy} and {second.strategy} compute different things"
    for step, (loss, other) in enumerate(zip(first.losses, second.losses, strict=False), start=1):
        if None in (loss, other) or abs(loss - other) > parity.loss_tolerance:
            losses = " and ".join("NaN" if one is None else f"{one:.4f}" for one in (loss, other))
            return f"{sentence}: step-{step} loss {losses} on the same batches"
    return f"{sentence}: {parity.difference}"


def compare_with(
    reference: RunRecord,
    record: RunRecord,
    *,
    limits: Limits,
    loss_tolerance: float | None = None,
    what: str = "",
) -> Parity:
    """Losses and norms of the steps that both have. Raises ValueError where they share none.

    Where a reference was asked for, all of its steps count; else the first PARITY_STEPS do.
    """
    num_steps = len(reference.losses) if reference.is_parity_reference else PARITY_STEPS
    gaps = [
        float("inf") if None in pair else abs(pair[1] - pair[0])
        for pair in list(zip(reference.losses, record.losses, strict=False))[:num_steps]
    ]
    if not gaps:
        raise ValueError(f"{record.run_name} and {reference.run_name} share no step")
    allowed = [loss_tolerance or at_step.loss for at_step in limits_by_step(limits, len(gaps))]
    worst = max(range(len(gaps)), key=lambda step: gaps[step] / allowed[step])
    ratio, norm_limit = _grad_norm_ratio(reference, record, limits, num_steps)
    parameter, parameter_ratio = _worst_parameter(reference, record, limits)
    parity = Parity(
        reference=FP32_REFERENCE if _is_fp32_reference(reference) else _name_of(reference),
        num_steps=len(gaps),
        loss_difference=gaps[worst],
        worst_step=worst + 1,
        grad_norm_ratio=ratio,
        loss_tolerance=allowed[worst],
        grad_norm_limit=norm_limit,
        parameter=parameter,
        parameter_ratio=parameter_ratio,
        parameter_limit=None if parameter is None else 1 + limits.parameter_norm,
        what=what,
    )
    return parity if parity.agrees else replace(parity, cause=cause_of(record, reference))


def _name_of(reference: RunRecord) -> str:
    if reference.is_parity_reference:
        return f"one process in {reference.asked['config']['numerics']}"
    return reference.strategy


def _grad_norm_ratio(
    reference: RunRecord, record: RunRecord, limits: Limits, num_steps: int
) -> tuple[float | None, float]:
    """The ratio that is the largest part of what is allowed, and what is; None where none is known, infinite
    for a missing one."""
    if any(all(norm is None for norm in run.grad_norms) for run in (reference, record)):
        return None, 1 + limits.norm
    norms = list(zip(reference.grad_norms, record.grad_norms, strict=False))[:num_steps]
    ratios = [
        (norm / wanted if wanted and norm else float("inf") if wanted != norm else 1.0, at_step.norm)
        for (wanted, norm), at_step in zip(norms, limits_by_step(limits, len(norms)), strict=True)
    ]
    ratio, limit = max(
        ratios, key=lambda pair: (_at_least_1(pair[0]) - 1) / pair[1], default=(1.0, limits.norm)
    )
    return ratio, 1 + limit


def _worst_parameter(
    reference: RunRecord, record: RunRecord, limits: Limits
) -> tuple[str | None, float | None]:
    """Name and ratio of the parameter whose gradient in step 1 is farthest from the reference's."""
    norms, wanted = record.parameter_grad_norms, reference.parameter_grad_norms
    same_step = record.num_probed_steps == reference.num_probed_steps == 1
    if limits.parameter_norm is None or not norms or not wanted or not same_step:
        return None, None
    floor = _SMALL_SHARE * max(norm or 0.0 for norm in wanted.values())
    ratios = {name: _ratio(norms.get(name), wanted.get(name), floor) for name in {**norms, **wanted}}
    name = max(ratios, key=lambda name: _at_least_1(ratios[name]))
    return name, ratios[name]


def _ratio(norm: float | None, wanted: float | None, floor: float) -> float:
    if norm == wanted:
        return 1.0
    return (norm + floor) / (wanted + floor) if norm and wanted else float("inf")


def _at_least_1(ratio: float) -> float:
    return max(ratio, 1 / ratio) if isfinite(ratio) else ratio


@dataclass(frozen=True)
class _Known:
    """The records that others can be held against, by what makes them comparable."""

    fp32_references: dict[bytes, list[RunRecord]]
    "by task, those that were asked for first"
    controls: dict[tuple[str, bytes], RunRecord]
    "by numerics and task"


def _known(records: list[RunRecord]) -> _Known:
    known = _Known(defaultdict(list), {})
    usable = list(filter(_usable, records))
    for record in sorted(usable, key=lambda record: not record.is_parity_reference):
        if _is_fp32_reference(record):
            known.fp32_references[_task_of(record)].append(record)
        if record.is_parity_reference:
            known.controls.setdefault((record.config.numerics, _task_of(record)), record)
    return known


def _fp32_reference_of(record: RunRecord, known: _Known) -> RunRecord | None:
    for other in known.fp32_references.get(_task_of(record), []) if known.fp32_references else ():
        if other is not record and (other.is_parity_reference or other.identity != record.identity):
            return other
    return None


def _usable(record: RunRecord) -> bool:
    return (
        record.status == "ok" and bool(record.losses) and record.first_step == 0 and not record.is_rehearsal
    )


def _is_fp32_reference(record: RunRecord) -> bool:
    return record.engine == "single" and record.config.numerics == "fp32"


def _control_of(record: RunRecord, known: _Known) -> RunRecord | None:
    """One process of the same numerics; for a single process's row, another launch of it."""
    numerics = record.config.numerics
    if numerics == "fp32" or not known.controls:
        return None
    return known.controls.get((numerics, _task_of(record)))


def _asked_of(record: RunRecord) -> bytes:
    asked = [record.asked["config"], record.asked["files"], record.world_size, record.gpu]
    return msgspec.json.encode(asked, order="sorted")


def _task_of(record: RunRecord) -> bytes:
    """What decides the losses: model, data and schedule, and the sequences of one step over all ranks.

    Epochs, too, end after whole steps.
    """
    config = record.asked["config"]
    settings = {name: value for name, value in config.items() if name not in _SAME_TASK}
    settings["max_grad_norm"] = settings["max_grad_norm"] or 0.0  # stock: the script asks for none
    task = [settings, _sequences_per_step(record), record.asked["files"]]
    return msgspec.json.encode(task, order="sorted")


def _sequences_per_step(record: RunRecord) -> int:
    config = record.config
    of_rank = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return of_rank * record.asked["num_processes"]
