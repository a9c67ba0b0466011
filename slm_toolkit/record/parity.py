"""Parity: whether two runs computed the same, and whether a run used its settings.

It compares losses, gradient norms, weights and live settings.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import msgspec

from slm_toolkit.config.run_config import FLAGS, SYNTHETIC, rule_of
from slm_toolkit.config.schedule import learning_rate
from slm_toolkit.record.measurement_warnings import rank_differences
from slm_toolkit.record.numerics import (
    ALIGNMENTS,
    ALIKE,
    ALIKE_IN_TASK,
    LOW_PRECISION,
    PARITY_STEPS,
    ROUNDED,
    Difference,
    Limits,
    Numerics,
    differences,
    growth,
    is_computed_plainly,
    numerics_from,
    precision_of,
    settings_that_differ,
)
from slm_toolkit.record.run_record import FP32_REFERENCE, RunRecord

JUMP = 0.5
"loss above that of the first step, the loss of random weights: such a training diverges, if only for a while"
_NORM_EPS = "1e-06"
"default in transformers' configurations of the presets' architectures"
_CLOSE = 1e-4
"relative tolerance: records have six digits of a setting"


def settings_not_as_asked(record: RunRecord) -> list[str]:
    """Return a phrase for each setting that differs from its flag; empty for older records without them."""
    numerics = numerics_from(record.numerics)
    if numerics is None or record.first_step > 0 or record.is_rehearsal or record.is_of_script:
        return []
    settings = [*_optimizer_settings(record, numerics), *_model_settings(record, numerics)]
    wrong = [
        str(Difference(name, ran, asked))
        for name, ran, asked in settings
        if None not in (ran, asked) and not _is_close(ran, asked)
    ]
    dtypes = {"master weights": numerics.master_weight_dtype}
    config = record.config
    if config.adam_beta1 and config.adam_beta2:  # with beta 0 a moment is the gradient, which may be bf16
        dtypes["moments"] = numerics.optimizer_state_dtype
    wrong += [f"{name} are {dtype}" for name, dtype in dtypes.items() if ROUNDED in str(dtype)]
    return list(dict.fromkeys(wrong))


def _optimizer_settings(record: RunRecord, numerics: Numerics) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, observed value and asked value; a value that is None is not compared."""
    config = record.config
    yield "clipping", numerics.clipping, config.max_grad_norm
    num_steps = config.steps_asked or len(record.losses)
    observed = {"first": (record.num_probed_steps - 1, numerics.optimizer_settings)}
    if len(record.losses) == num_steps:
        observed["last"] = (num_steps - 1, numerics.optimizer_settings_at_end)
    for when, (step, groups) in observed.items():
        if not isinstance(groups, list):  # older records have text
            continue
        is_muon = any("momentum" in group for group in groups)
        yield f"optimizer at the {when} step", "muon" if is_muon else "adamw", rule_of(config.optim)
        asked = {
            "lr": learning_rate(config, step, num_steps),
            "beta1": config.adam_beta1,
            "beta2": config.adam_beta2,
            "eps": config.adam_epsilon,
        }
        for group in groups:
            for name, value in asked.items():
                yield f"{name} at the {when} step", group.get(name), value
        decays = {group["weight_decay"] for group in groups if _is_number(group.get("weight_decay"))}
        for decay in decays - {0.0} or decays:
            yield f"weight decay at the {when} step", decay, config.weight_decay
        if config.weight_decay and config.peft == "none":
            yield f"weight decay of norms at the {when} step", min(decays, default=None), 0.0


def _model_settings(record: RunRecord, numerics: Numerics) -> Iterator[tuple[str, Any, Any]]:
    """Yield as above; of a user's own config.json, only whether embedding and head are tied, and frozen."""
    spec, config = record.spec, record.config
    yield "embedding and head", numerics.tied, "tied" if spec.tied else "untied"
    if config.peft == "none":
        yield "not trained:", numerics.frozen, "none"
    if spec.path is not None:
        return
    if not config.lora_dropout:
        yield "dropout", numerics.dropout, "none"
    yield "eps of the norms", numerics.norm_eps, _NORM_EPS
    for frequencies in numerics.rope if isinstance(numerics.rope, list) else ():
        last = spec.rope_theta ** -((spec.head_dim - 2) / spec.head_dim)
        yield "last of RoPE's frequencies", frequencies.get("last"), last
        yield "RoPE frequencies", frequencies.get("dtype"), "float32"
    for call in numerics.attention_call if isinstance(numerics.attention_call, list) else ():
        yield "attention scale", call.get("scale"), spec.head_dim**-0.5
        yield "attention dropout", call.get("dropout"), 0.0
        if call.get("mask") == "none":
            yield "attention mask", "none", "causal"


def _is_close(value: Any, asked: Any) -> bool:
    numbers = _is_number(value) and _is_number(asked)
    return abs(value - asked) <= _CLOSE * abs(asked) if numbers else value == asked


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def cause_of(record: RunRecord, reference: RunRecord) -> str | None:
    """Return why two runs differ, without a full stop; None if the records show no cause."""
    causes = ["the weights before step 1 differ"] if _weights_differ(record, reference) else []
    ran, expected = numerics_from(record.numerics), numerics_from(reference.numerics)
    if ran is not None and expected is not None:
        settings = ({**run.asked["config"], "world_size": run.world_size} for run in (record, reference))
        causes += map(str, differences(ran, expected, other_settings=settings_that_differ(*settings)))
    return "; ".join(causes) or None


def _weights_differ(record: RunRecord, reference: RunRecord) -> bool:
    pair = (record.weights_fingerprint, reference.weights_fingerprint)
    in_fp16 = {run.config.numerics == "fp16" for run in (record, reference) if not run.is_of_script}
    # fp16 has other digits of tiny weights than the fingerprint's bf16
    return None not in pair and pair[0] != pair[1] and len(in_fp16) < 2


_SAME_TASK = frozenset(name for name, flag in FLAGS.items() if flag.losses != "others")
"flags that may differ between two runs of the same task: other values should give the same losses"
_SMALL_SHARE = 1e-3
"share of the largest parameter gradient norm; a smaller gradient may be only rounding noise"


@dataclass(frozen=True)
class Parity:
    """The difference between a run and its reference over `num_steps` steps, and the run's own faults."""

    reference: str
    num_steps: int
    loss_difference: float
    "absolute difference at `worst_step`; infinite if a loss is not finite"
    worst_step: int
    "step with the largest ratio of difference to tolerance; counted from 1"
    grad_norm_ratio: float | None
    "ratio at the step where it is worst relative to its limit; None if an engine reports no norms"
    loss_tolerance: float
    "allowed difference at `worst_step`"
    grad_norm_limit: float
    "largest allowed ratio at the step of `grad_norm_ratio`; its inverse is the smallest allowed"
    parameter: str | None = None
    "parameter whose gradient norm in step 1 differs most from the reference's; None: not compared"
    parameter_ratio: float | None = None
    parameter_limit: float | None = None
    what: str = ""
    "names the compared steps if they are not the run's own steps"
    conflict: str | None = None
    "a sentence with both runs, if it is unknown which of them is right"
    faults: tuple[str, ...] = ()
    "faults apart from the losses: ranks with different weights, settings that differ from the flags"
    cause: str | None = None
    "why parity does not hold, if the records show it"
    unlike: str | None = None
    """why losses can't be compared: a user's own script began with other weights or batches, or both losses
    jump. Our trainer begins alike under every strategy, so that such a difference is its fault"""

    @property
    def holds(self) -> bool:
        return not self.faults and self.agrees

    @property
    def agrees(self) -> bool:
        """Return whether losses and gradient norms are within their limits."""
        return self.excess <= 1

    @property
    def excess(self) -> float:
        """Return the largest ratio of a difference to its limit; infinite if a number is missing."""
        parts = [self.loss_difference / self.loss_tolerance]
        if self.grad_norm_ratio is not None:
            parts.append(_excess(self.grad_norm_ratio) / (self.grad_norm_limit - 1))
        if self.parameter_ratio is not None:
            parts.append(_excess(self.parameter_ratio) / (self.parameter_limit - 1))
        return max(parts)

    def __str__(self) -> str:
        comparison = [] if self.agrees and self.faults else [self.conflict or self.difference]
        return "; ".join([*self.faults, *comparison]) + (f". Cause: {self.cause}" if self.cause else "")

    @property
    def difference(self) -> str:
        """Return a phrase with all differences and their limits."""
        norms = (
            "gradient norms unknown"
            if self.grad_norm_ratio is None
            else f"gradient norm ratio {self.grad_norm_ratio:.4g} (allowed {self.grad_norm_limit:.4g})"
        )
        if self.parameter_ratio is not None:
            norms += f", for {self.parameter} in step 1: {self.parameter_ratio:.5g}"
            norms += f" (allowed {self.parameter_limit:.5g})"
        return (
            f"against {self.reference} over {self.num_steps} steps{self.what}: "
            f"|Δloss| {self.loss_difference:.2g} at step {self.worst_step} "
            f"(allowed {self.loss_tolerance:.2g}), {norms}"
        )


def judge(records: list[RunRecord]) -> list[Parity | None]:
    """Return the Parity of each record: with the fp32 reference, or another one if that exceeds its limits.

    Returns None for references and for records that can't be compared. Runs of several strategies without a
    reference are compared with each other, if their flags are equal.
    """
    references: dict[bytes, list[RunRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: not record.is_parity_reference):
        if _usable(record) and (record.is_parity_reference or _is_fp32_reference(record)):
            references[_task_of(record)].append(record)
    judged: list[Parity | None] = [None] * len(records)
    compared = [i for i, record in enumerate(records) if _usable(record) and not record.is_parity_reference]
    others: dict[bytes, list[int]] = defaultdict(list)
    for index in compared:
        record = records[index]
        if comparisons := _comparisons(record, references[_task_of(record)] if references else []):
            # readers expect the fp32 reference, unless another comparison exceeds its limits
            judged[index] = max(
                comparisons, key=lambda parity: (not parity.agrees, parity.reference == FP32_REFERENCE)
            )
        else:
            asked = [record.asked["config"], record.asked["files"], record.world_size, record.gpu]
            others[msgspec.json.encode(asked, order="sorted")].append(index)
    for indices in others.values():
        if len({records[index].strategy for index in indices}) > 1:  # else repeats
            parities = _among_each_other([records[index] for index in indices])
            for index, parity in zip(indices, parities, strict=True):
                judged[index] = parity
    for index in compared:
        record = records[index]
        if faults := _faults(record):
            alone = Parity(record.strategy, len(record.losses), 0.0, 1, None, 1.0, 1.0)
            judged[index] = replace(judged[index] or alone, faults=faults)
    return judged


def _comparisons(record: RunRecord, references: list[RunRecord]) -> list[Parity]:
    """Compare a record with the references of its task; empty if there is no fp32 reference.

    Compares the run and its fp32 steps with the fp32 reference, and the run with one process of the same
    numerics and kernels. That process is compared with fp32, too: its fault would be in every run.
    """
    fp32_runs = (
        other
        for other in references
        if _is_fp32_reference(other) and (other.is_parity_reference or other.identity != record.identity)
    )
    fp32 = next(fp32_runs, None)
    if fp32 is None or record.is_of_script:
        return []
    limits, config = _limits_to_fp32(record), record.config
    comparisons = [compare_with(fp32, record, limits=limits)]
    if record.fp32_pass and record.fp32_pass["status"] == "ok":
        names = ("losses", "grad_norms", "parameter_grad_norms", "numerics")
        in_fp32 = replace(record, **{name: record.fp32_pass[name] for name in names})
        comparisons.append(replace(compare_with(fp32, in_fp32, limits=ALIKE["fp32"]), what=" in fp32"))
    for control in references:
        other = control.config
        is_like = control.is_parity_reference and other.kernels == config.kernels
        if config.numerics != "fp32" and is_like and other.numerics == config.numerics:
            is_plain = is_computed_plainly(record.asked["config"]) and not config.compiles
            same_limits = _same_numerics_limits(record) if is_plain else limits
            comparisons.append(compare_with(control, record, limits=same_limits))
            control_parity = compare_with(fp32, control, limits=limits)
            if not control_parity.agrees:
                conflict = f"{_name_of(control)} itself differs, {control_parity.difference}"
                comparisons.append(replace(control_parity, conflict=conflict))
            break
    return comparisons


def _limits_to_fp32(record: RunRecord) -> Limits:
    """Return the limits for a run and an fp32 run.

    A rounded gradient changes an update by a few percent. On synthetic tokens the first updates hardly change
    the loss; text and chats are learned so fast that the loss differs by as many percent of its change. One
    process differs from fp32 as much as any engine, so a fault of an engine shows against that process.
    """
    precision = precision_of(record.asked["config"])
    limits = LOW_PRECISION[precision]
    if (record.config.dataset != SYNTHETIC or _has_own_weights(record)) and precision != "fp32":
        # three times the most that clean runs on chats, mixtures and text, and with LoRA, differed by: 3.2
        # times limits.loss for each unit of change, 13.5 times limits.norm (slm-1m, 2026-11-28)
        return Limits(limits.loss, 40 * limits.norm, loss_change=10 * limits.loss)
    return limits if record.config.parity else Limits(2 * limits.loss, 2 * limits.norm)


def _faults(record: RunRecord) -> tuple[str, ...]:
    """Return the faults that a run shows without a comparison."""
    checks = [*record.weights_of_ranks, *((record.fp32_pass or {}).get("weights_of_ranks") or ())]
    weight_faults = [sentence for check in checks if (sentence := rank_differences(check)) is not None]
    return (*weight_faults[:1], *settings_not_as_asked(record))


def _among_each_other(records: list[RunRecord]) -> list[Parity | None]:
    """Return the Parity of each of several runs of the same flags, without a reference.

    Runs that agree form a group. If one group has the most strategies, its DDP run, or else its first run,
    becomes the reference of all. If two groups have equally many, it is unknown which group is right, and no
    run's parity holds. Runs of other trainers count only if there are none of ours.
    """

    def compared(reference: int, index: int) -> Parity:
        record = records[index]
        return compare_with(records[reference], record, limits=_same_numerics_limits(record))

    groups: list[list[int]] = []
    order = sorted(
        range(len(records)), key=lambda index: (records[index].is_of_script, records[index].engine != "ddp")
    )
    for index in order:
        group = next((group for group in groups if compared(group[0], index).agrees), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    of_scripts = {index for index, record in enumerate(records) if record.is_of_script}
    ignored = of_scripts if len(of_scripts) < len(records) else set()
    sizes = [len({records[index].strategy for index in group if index not in ignored}) for group in groups]
    judged: list[Parity | None] = []
    for index, record in enumerate(records):
        if sizes.count(max(sizes)) == 1:
            largest = groups[sizes.index(max(sizes))]
            is_repeat = index in largest and record.strategy == records[largest[0]].strategy
            judged.append(None if is_repeat else compared(largest[0], index))
            continue
        other = next(group[0] for group in groups if index not in group)
        parity = compared(other, index)
        first, second = (records[place].strategy for place in sorted((index, other)))
        conflict = f"{first} and {second} compute different things, {parity.difference}"
        judged.append(replace(parity, conflict=conflict))
    return judged


def _same_numerics_limits(record: RunRecord) -> Limits:
    precision = precision_of(record.asked["config"])
    if not record.config.parity:
        return ALIKE[precision]
    limits = ALIKE_IN_TASK[precision]
    # gradients of weights that were not drawn for the task may be small, as those of a new adapter are
    return replace(limits, norm=ALIKE[precision].norm) if _has_own_weights(record) else limits


def _has_own_weights(record: RunRecord) -> bool:
    return not (record.weights or "random").startswith("random")


def compare_with(reference: RunRecord, record: RunRecord, *, limits: Limits) -> Parity:
    """Compare losses and gradient norms of the steps that both runs have.

    With a reference of `slm compare --parity`, all its steps count; with another run, the first PARITY_STEPS.
    """
    num_steps = len(reference.losses) if reference.is_parity_reference else PARITY_STEPS
    parity = _compared(reference, record, limits, num_steps)
    # losses near ln(V) of other random weights may agree by chance
    by_chance = record.is_of_script and _weights_differ(record, reference)
    if parity.agrees and not by_chance:
        return parity
    if (jump := _jump(reference, record)) and not by_chance:
        before = _compared(reference, record, limits, min(num_steps, max(1, jump - 2)))
        if before.agrees:
            loss = f"to {reference.losses[jump - 1]:.3g} in step {jump}"
            hint = "a lower learning rate, or one that warms up, keeps them comparable"
            return replace(before, unlike=f"both jump, {loss}, where rounding errors grow ({hint})")
    return replace(parity, cause=cause_of(record, reference), unlike=_unlike_beginning(record, reference))


def _compared(reference: RunRecord, record: RunRecord, limits: Limits, num_steps: int) -> Parity:
    """Compare the first steps. Against fp32, only those before the first one that overflowed in fp16."""
    num_norms = num_steps
    if record.skipped_steps and reference.config.numerics == "fp32":  # which has no overflows to skip
        num_steps = min(num_steps, record.skipped_steps[0])
        num_norms = num_steps - 1
    pairs = list(zip(reference.losses, record.losses, strict=False))[:num_steps]
    gaps = [inf if None in pair else abs(pair[1] - pair[0]) for pair in pairs]
    allowed = [
        limits.loss * growth(step) + limits.loss_change * abs((loss or 0.0) - (pairs[0][0] or 0.0))
        for step, (loss, _) in enumerate(pairs, start=1)
    ]
    worst = max(range(len(gaps)), key=lambda step: gaps[step] / allowed[step])
    ratio, norm_limit = _grad_norm_ratio(reference, record, limits, num_norms)
    parameter, parameter_ratio = _worst_parameter(reference, record, limits)
    return Parity(
        reference=FP32_REFERENCE if _is_fp32_reference(reference) else _name_of(reference),
        num_steps=len(pairs),
        loss_difference=gaps[worst],
        worst_step=worst + 1,
        grad_norm_ratio=ratio,
        loss_tolerance=allowed[worst],
        grad_norm_limit=norm_limit,
        parameter=parameter,
        parameter_ratio=parameter_ratio,
        parameter_limit=None if parameter is None else 1 + limits.parameter_norm,
    )


def _jump(reference: RunRecord, record: RunRecord) -> int | None:
    """Return the first step whose losses exceed the first loss by JUMP in both runs; None if there is none.

    There a step multiplies the rounding errors of the steps before, from the step before it on: its gradient
    is as steep as the next loss shows.
    """
    first, own_first = reference.losses[0], record.losses[0]
    for step, (loss, own) in enumerate(zip(reference.losses, record.losses, strict=False), start=1):
        if None not in (loss, own, first, own_first) and min(loss - first, own - own_first) > JUMP:
            return step
    return None


def _unlike_beginning(record: RunRecord, reference: RunRecord) -> str | None:
    """Return how a script's run began unlike its reference; None if it began alike, or for our trainer."""
    if not record.is_of_script:
        return None
    name, ran, expected = reference.strategy, record.numerics or {}, reference.numerics or {}
    reasons = []
    if _weights_differ(record, reference):
        reasons.append(f"its weights before step 1 are not those of {name} (call set_seed before the model)")
    if ran.get("accumulation") != expected.get("accumulation"):
        micro_steps = (
            f"{ran.get('accumulation')} micro-steps per step, and {name} {expected.get('accumulation')}"
        )
        reasons.append(f"it has {micro_steps} ({ALIGNMENTS['accumulation']})")
    elif ran.get("batch_hashes") != expected.get("batch_hashes"):
        reasons.append(f"its batches of step 1 are not those of {name} ({ALIGNMENTS['batch_hashes']})")
    return "; ".join(reasons) or None


def _name_of(reference: RunRecord) -> str:
    is_control = reference.is_parity_reference
    return f"one process in {reference.config.numerics}" if is_control else reference.strategy


def _grad_norm_ratio(
    reference: RunRecord, record: RunRecord, limits: Limits, num_steps: int
) -> tuple[float | None, float]:
    """Return the gradient norm ratio that is worst relative to its limit, and the limit.

    The ratio is None if a run has no norms, and infinite if a step's norm is missing.
    """
    if any(all(norm is None for norm in run.grad_norms) for run in (reference, record)):
        return None, 1 + limits.norm
    norms = list(zip(reference.grad_norms, record.grad_norms, strict=False))[:num_steps]
    ratios = [
        (norm / wanted if wanted and norm else inf if wanted != norm else 1.0, limits.norm * growth(step))
        for step, (wanted, norm) in enumerate(norms, start=1)
    ]
    ratio, limit = max(ratios, key=lambda pair: _excess(pair[0]) / pair[1], default=(1.0, limits.norm))
    return ratio, 1 + limit


def _worst_parameter(
    reference: RunRecord, record: RunRecord, limits: Limits
) -> tuple[str | None, float | None]:
    """Return name and ratio of the parameter whose gradient norm in step 1 differs most."""
    norms, wanted = record.parameter_grad_norms, reference.parameter_grad_norms
    same_step = record.num_probed_steps == reference.num_probed_steps == 1
    if limits.parameter_norm is None or not norms or not wanted or not same_step:
        return None, None
    floor = _SMALL_SHARE * max(norm or 0.0 for norm in wanted.values())
    ratios = {name: _ratio(norms.get(name), wanted.get(name), floor) for name in {**norms, **wanted}}
    name = max(ratios, key=lambda name: _excess(ratios[name]))
    return name, ratios[name]


def _ratio(norm: float | None, wanted: float | None, floor: float) -> float:
    if norm == wanted:
        return 1.0
    return (norm + floor) / (wanted + floor) if norm and wanted else inf


def _excess(ratio: float) -> float:
    return max(ratio, 1 / ratio) - 1 if ratio else inf  # a quotient of tiny norms may round to 0


def _usable(record: RunRecord) -> bool:
    return (
        record.status == "ok" and bool(record.losses) and record.first_step == 0 and not record.is_rehearsal
    )


def _is_fp32_reference(record: RunRecord) -> bool:
    return record.engine == "single" and record.config.numerics == "fp32" and not record.is_of_script


def _task_of(record: RunRecord) -> bytes:
    """Return a key of all settings that decide the losses.

    These are the model, data and schedule, and the number of sequences per step over all ranks; it also
    decides where an epoch ends, since epochs end after whole steps.
    """
    asked, config = record.asked["config"], record.config
    settings = {name: value for name, value in asked.items() if name not in _SAME_TASK}
    settings["max_grad_norm"] = settings["max_grad_norm"] or 0.0  # stock numerics set no clipping
    settings["optim"] = rule_of(asked.get("optim", "adamw"))
    per_rank = config.per_device_train_batch_size * config.gradient_accumulation_steps
    task = [settings, per_rank * record.asked["num_processes"], record.asked["files"]]
    return msgspec.json.encode(task, order="sorted")
