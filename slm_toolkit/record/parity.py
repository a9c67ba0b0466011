"""Parity: whether two runs computed the same, and whether a run used its settings.

It compares losses, gradient norms, weights and live settings.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import msgspec

from slm_toolkit.config.run_config import FLAGS, SYNTHETIC, rule_of
from slm_toolkit.config.schedule import share_of_peak
from slm_toolkit.record.measurement_warnings import rank_differences
from slm_toolkit.record.numerics import (
    ALIGNMENTS,
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

JUMP = 0.5
"loss above that of the first step, the loss of random weights: such a training diverges, if only for a while"
_NORM_EPS = "1e-06"
"default in transformers' configurations of the presets' architectures"
_CLOSE = 1e-4
"relative tolerance: records have six digits of a setting"


def settings_not_as_asked(record: RunRecord) -> list[str]:
    """Return a sentence for each setting that differs from its flag; empty for older records without them."""
    numerics = numerics_from(record.numerics)
    if numerics is None or record.first_step > 0 or record.is_rehearsal or record.is_of_script:
        return []
    dtypes = {"master weights": numerics.master_weight_dtype}
    config = record.config
    if config.adam_beta1 and config.adam_beta2:  # with beta 0 a moment is the gradient, which may be bf16
        dtypes["moments"] = numerics.optimizer_state_dtype
    rounded = [f"{name} are {dtype}" for name, dtype in dtypes.items() if ROUNDED in str(dtype)]
    return [*_wrong_optimizer_settings(record, numerics), *_wrong_model_settings(record, numerics), *rounded]


def _wrong_optimizer_settings(record: RunRecord, numerics: Numerics) -> list[str]:
    config = record.config
    peak = config.learning_rate
    num_steps = config.steps_asked or len(record.losses)
    problems = []
    clipping = config.max_grad_norm
    if clipping is not None and numerics.clipping not in (None, clipping):
        problems.append(f"gradients clipped at {numerics.clipping:g}, not {clipping:g}")
    steps = ((record.num_probed_steps - 1, numerics.optimizer_settings, "at the first step"),)
    if len(record.losses) == num_steps:
        steps += ((num_steps - 1, numerics.optimizer_settings_at_end, "at the last step"),)
    for step, line, when in steps:
        rate = peak * share_of_peak(config, step, num_steps)
        for group in line.split("; ") if line else ():
            number = r"(lr|eps|decay|momentum) ([-+.\de]+)"
            ran = {name: float(value) for name, value in re.findall(number, group)}
            expected = {"lr": rate}
            if "momentum" not in ran:  # AdamW's group, not Muon's
                beta1, beta2 = re.findall(r"betas (\S+) (\S+),", group)[0]
                ran |= {"beta1": float(beta1), "beta2": float(beta2)}
                expected |= {
                    "beta1": config.adam_beta1,
                    "beta2": config.adam_beta2,
                    "eps": config.adam_epsilon,
                }
            expected["decay"] = config.weight_decay if ran["decay"] else 0.0
            problems += [
                f"{name} {ran[name]:g} {when}, not {value:g}"
                for name, value in expected.items()
                if not _is_close(ran[name], value)
            ]
        rule = "muon" if line and "momentum" in line else "adamw"
        if line and rule != config.optimizer_rule:
            problems.append(f"the optimizer is {rule} {when}, not {config.optimizer_rule}")
        decays = re.findall(r"decay ([-+.\de]+)", line or "")
        if line and config.weight_decay and config.peft == "none" and "0" not in decays:
            problems.append(f"weight decay also applies to norms {when}")
        if line and config.weight_decay and set(decays) == {"0"}:
            problems.append(f"no weight decay {when}, not {config.weight_decay:g}")
    return list(dict.fromkeys(problems))


def _wrong_model_settings(record: RunRecord, numerics: Numerics) -> list[str]:
    """Check the model's settings; of a user's own config.json, only whether embedding and head are tied."""
    spec, config = record.spec, record.config
    problems = []
    if numerics.dropout not in (None, "none") and not config.lora_dropout and spec.path is None:
        problems.append(f"dropout {numerics.dropout}, but no flag sets it")
    if numerics.tied not in (None, "tied" if spec.tied else "untied"):
        problems.append(f"embedding and head are {numerics.tied}")
    if config.peft == "none" and numerics.frozen not in (None, "none"):
        problems.append(f"not trained: {numerics.frozen}")
    if spec.path is not None:
        return problems
    if numerics.norm_eps not in (None, _NORM_EPS):
        problems.append(f"eps of the norms {numerics.norm_eps}, not {_NORM_EPS}")
    last = spec.rope_theta ** -((spec.head_dim - 2) / spec.head_dim)
    if numerics.rope and not _is_close(float(re.findall(r"to (\S+),", numerics.rope)[0]), last):
        problems.append(f"RoPE frequencies {numerics.rope}, but the last should be {last:g}")
    if numerics.rope and not numerics.rope.startswith("float32"):
        problems.append(f"RoPE frequencies are in {numerics.rope.split()[0]}, not float32")
    scales = re.findall(r"scale (\S+?)(?: and|$)", numerics.attention_call or "")
    wrong = [scale for scale in scales if not _is_close(float(scale), spec.head_dim**-0.5)]
    problems += [f"attention scale {scale}, not {spec.head_dim**-0.5:g}" for scale in wrong]
    drops = re.findall(r"dropout (\S+),", numerics.attention_call or "")
    problems += [f"attention has dropout {drop}" for drop in drops if float(drop)]
    masks = (numerics.attention_call or "").split(" and ")
    problems += [f"attention {mask.split(',')[0]}" for mask in masks if mask.startswith("without a mask")]
    return problems


def _is_close(value: float, other: float) -> bool:
    return abs(value - other) <= _CLOSE * abs(other)


def cause_of(record: RunRecord, reference: RunRecord) -> str | None:
    """Return why two runs differ, without a full stop; None if the records show no cause."""
    ran, expected = numerics_from(record.numerics), numerics_from(reference.numerics)
    causes = []
    if _weights_differ(record, reference):
        causes.append("the weights before step 1 differ")
    if record.skipped_steps != reference.skipped_steps:
        skipped = ", ".join(map(str, record.skipped_steps)) or "none"
        other = ", ".join(map(str, reference.skipped_steps)) or "none"
        causes.append(f"skipped steps: {skipped} (not {other})")
    if ran is None or expected is None:
        return causes[0] if causes else None
    same_ranks = len(ran.batch_hashes or []) == len(expected.batch_hashes or [])
    if (
        same_ranks
        and record.num_probed_steps == reference.num_probed_steps
        and ran.batch_hashes != expected.batch_hashes
    ):
        causes.append("the batches of step 1 differ")
    if _have_same_flags(record, reference):
        causes += [str(other) for other in differences(ran, expected) if other.field != "batch_hashes"]
    return "; ".join(causes) or None


def _weights_differ(record: RunRecord, reference: RunRecord) -> bool:
    pair = (record.weights_fingerprint, reference.weights_fingerprint)
    in_fp16 = {run.config.numerics == "fp16" for run in (record, reference) if not run.is_of_script}
    # fp16 has other digits of tiny weights than the fingerprint's bf16
    return None not in pair and pair[0] != pair[1] and len(in_fp16) < 2


def _have_same_flags(record: RunRecord, reference: RunRecord) -> bool:
    """Return whether flags and world size are equal; then the strategy causes different numerics."""
    same_flags = record.asked["config"] == reference.asked["config"]
    return same_flags and record.world_size == reference.world_size


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
            parts.append((_at_least_1(self.grad_norm_ratio) - 1) / (self.grad_norm_limit - 1))
        if self.parameter_ratio is not None:
            parts.append((_at_least_1(self.parameter_ratio) - 1) / (self.parameter_limit - 1))
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
    reference are compared with each other, if their flags and batches are equal.
    """
    references = _references(records)
    judged: list[Parity | None] = [None] * len(records)
    others: dict[bytes, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        if record.is_parity_reference or not _usable(record):
            continue
        if comparisons := _comparisons(record, references):
            # readers expect the fp32 reference, unless another comparison exceeds its limits
            judged[index] = max(
                comparisons, key=lambda parity: (not parity.agrees, parity.reference == FP32_REFERENCE)
            )
        else:
            others[_settings_of(record)].append(index)
    for indices in _comparable(others, records):
        if len({records[index].strategy for index in indices}) == 1:  # repeats
            continue
        parities = _among_each_other([records[index] for index in indices])
        for index, parity in zip(indices, parities, strict=True):
            judged[index] = parity
    for index, record in enumerate(records):
        if _usable(record) and not record.is_parity_reference and (faults := _faults(record)):
            parity = judged[index] or _alone(record)
            judged[index] = replace(parity, faults=faults)
    return judged


def _comparable(by_settings: dict[bytes, list[int]], records: list[RunRecord]) -> Iterator[list[int]]:
    """Yield groups of comparable runs; in a group without DDP, all runs must have the same batches."""
    for indices in by_settings.values():
        if any(records[index].engine in ("ddp", "single") for index in indices):
            yield indices
            continue
        by_batches: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for index in indices:
            if hashes := (records[index].numerics or {}).get("batch_hashes"):
                by_batches[tuple(hashes)].append(index)
        yield from by_batches.values()


def _comparisons(record: RunRecord, references: "_References") -> list[Parity]:
    """Compare a record with its references; empty if there is no fp32 reference.

    Compares the run and its fp32 steps with the fp32 reference, and the run with one process of the same
    numerics and kernels. That process is compared with fp32, too: its fault would be in every run.
    """
    fp32 = None if record.is_of_script else _fp32_reference_of(record, references)
    if fp32 is None:
        return []
    limits = _limits_to_fp32(record)
    comparisons = [compare_with(fp32, record, limits=limits)]
    if record.fp32_pass and record.fp32_pass["status"] == "ok":
        names = ("losses", "grad_norms", "parameter_grad_norms", "numerics")
        in_fp32 = replace(record, **{name: record.fp32_pass[name] for name in names})
        comparisons.append(compare_with(fp32, in_fp32, limits=ALIKE["fp32"], what=" in fp32"))
    control = _control_of(record, references)
    if control is not None and control is not record:
        is_plain = is_computed_plainly(record.asked["config"]) and not record.config.compiles
        same_limits = _same_numerics_limits(record) if is_plain else limits
        comparisons.append(compare_with(control, record, limits=same_limits))
        control_parity = compare_with(fp32, control, limits=limits)
        if not control_parity.agrees:
            name = f"one process in {control.asked['config']['numerics']}"
            conflict = f"{name} itself differs, {control_parity.difference}"
            comparisons.append(replace(control_parity, conflict=conflict))
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


def _alone(record: RunRecord) -> Parity:
    """Return the Parity of a record without any reference: it agrees with itself."""
    return Parity(record.strategy, len(record.losses), 0.0, 1, None, 1.0, 1.0)


def _among_each_other(records: list[RunRecord]) -> list[Parity | None]:
    """Return the Parity of each of several runs of the same flags and batches, without a reference.

    Runs that agree form a group. If one group has the most strategies, its DDP run, or else its first run,
    becomes the reference of all. If two groups have equally many, it is unknown which group is right, and no
    run's parity holds. Runs of other trainers count only if there are none of ours.
    """
    groups: list[list[int]] = []
    first_ddp = sorted(range(len(records)), key=lambda index: _order(records[index]))
    for index in first_ddp:
        for group in groups:
            if _compare_same_numerics(records[group[0]], records[index]).agrees:
                group.append(index)
                break
        else:
            groups.append([index])
    of_ours = {index for index, record in enumerate(records) if not record.is_of_script}
    counted = of_ours or set(range(len(records)))
    sizes = [len({records[index].strategy for index in counted.intersection(group)}) for group in groups]
    if sizes.count(max(sizes)) == 1:
        largest = groups[sizes.index(max(sizes))]
        reference = records[largest[0]]
        repeats = [index for index in largest if records[index].strategy == reference.strategy]
        return [
            None if index in repeats else _compare_same_numerics(reference, record)
            for index, record in enumerate(records)
        ]
    judged: list[Parity | None] = []
    for index, record in enumerate(records):
        other = next(group[0] for group in groups if index not in group)
        parity = _compare_same_numerics(records[other], record)
        first, second = records[min(index, other)], records[max(index, other)]
        judged.append(replace(parity, conflict=_conflict(first, second, parity)))
    return judged


def _order(record: RunRecord) -> tuple[bool, bool]:
    """Sort key of references: ours before a user's script, DDP before other engines."""
    return record.is_of_script, record.engine != "ddp"


def _compare_same_numerics(reference: RunRecord, record: RunRecord) -> Parity:
    """Compare two runs of the same numerics, flags and batches."""
    limits = _same_numerics_limits(record)
    return compare_with(reference, record, limits=limits)


def _same_numerics_limits(record: RunRecord) -> Limits:
    precision = precision_of(record.asked["config"])
    if not record.config.parity:
        return ALIKE[precision]
    limits = ALIKE_IN_TASK[precision]
    # gradients of weights that were not drawn for the task may be small, as those of a new adapter are
    return replace(limits, norm=ALIKE[precision].norm) if _has_own_weights(record) else limits


def _has_own_weights(record: RunRecord) -> bool:
    return not (record.weights or "random").startswith("random")


def _conflict(first: RunRecord, second: RunRecord, parity: Parity) -> str:
    """Return a sentence with both losses of the first step whose difference exceeds the tolerance."""
    sentence = f"{first.strategy} and {second.strategy} compute different things"
    for step, (loss, other) in enumerate(zip(first.losses, second.losses, strict=False), start=1):
        if None in (loss, other) or abs(loss - other) > parity.loss_tolerance:
            losses = " and ".join("NaN" if value is None else f"{value:.4f}" for value in (loss, other))
            return f"{sentence}: step-{step} loss {losses} on the same batches"
    return f"{sentence}: {parity.difference}"


def compare_with(
    reference: RunRecord,
    record: RunRecord,
    *,
    limits: Limits,
    what: str = "",
) -> Parity:
    """Compare losses and gradient norms of the steps that both runs have.

    With a reference of `slm compare --parity`, all its steps count; with another run, the first PARITY_STEPS.
    Against fp32, those before the first one that overflowed in fp16.
    Raises ValueError if the runs share no step.
    """
    num_steps = len(reference.losses) if reference.is_parity_reference else PARITY_STEPS
    num_norms = num_steps
    if record.skipped_steps and reference.config.numerics == "fp32":  # which has no overflows to skip
        num_steps = min(num_steps, record.skipped_steps[0])
        num_norms = num_steps - 1
    gaps = [
        float("inf") if None in pair else abs(pair[1] - pair[0])
        for pair in list(zip(reference.losses, record.losses, strict=False))[:num_steps]
    ]
    if not gaps:
        raise ValueError(f"{record.run_name} and {reference.run_name} share no step")
    changes = [abs((loss or 0.0) - (reference.losses[0] or 0.0)) for loss in reference.losses]
    allowed = [
        at_step.loss + limits.loss_change * change
        for at_step, change in zip(limits_by_step(limits, len(gaps)), changes, strict=False)
    ]
    worst = max(range(len(gaps)), key=lambda step: gaps[step] / allowed[step])
    ratio, norm_limit = _grad_norm_ratio(reference, record, limits, num_norms)
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
    # losses near ln(V) of other random weights may agree by chance
    by_chance = record.is_of_script and _weights_differ(record, reference)
    if parity.agrees and not by_chance:
        return parity
    if (jump := _jump(reference, record)) and not by_chance:
        end = max(1, jump - 2)
        before = compare_with(
            replace(reference, losses=reference.losses[:end], grad_norms=reference.grad_norms[:end]),
            replace(record, losses=record.losses[:end], grad_norms=record.grad_norms[:end]),
            limits=limits,
            what=what,
        )
        if before.agrees:
            loss = f"to {reference.losses[jump - 1]:.3g} in step {jump}"
            hint = "a lower learning rate, or one that warms up, keeps them comparable"
            return replace(before, unlike=f"both jump, {loss}, where rounding errors grow ({hint})")
    return replace(parity, cause=cause_of(record, reference), unlike=_unlike_beginning(record, reference))


def _jump(reference: RunRecord, record: RunRecord) -> int | None:
    """Return the first step whose losses exceed the first loss by JUMP in both runs; None if there is none.

    There a step multiplies the rounding errors of the steps before, from the step before it on: its gradient
    is as steep as the next loss shows.
    """
    for step, pair in enumerate(zip(reference.losses, record.losses, strict=False), start=1):
        firsts = (reference.losses[0], record.losses[0])
        if None not in (*pair, *firsts) and all(a > b + JUMP for a, b in zip(pair, firsts, strict=True)):
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
    if reference.is_parity_reference:
        return f"one process in {reference.asked['config']['numerics']}"
    return reference.strategy


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
    """Return name and ratio of the parameter whose gradient norm in step 1 differs most."""
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
    return max(ratio, 1 / ratio) if ratio else inf  # a quotient of tiny norms may round to 0


@dataclass(frozen=True)
class _References:
    """The records that other records can be compared with."""

    fp32_references: dict[bytes, list[RunRecord]]
    "by task; the references of `slm compare --parity` come first"
    controls: dict[tuple[str, str, bytes], RunRecord]
    "by numerics, kernels and task"


def _references(records: list[RunRecord]) -> _References:
    references = _References(defaultdict(list), {})
    usable = list(filter(_usable, records))
    for record in sorted(usable, key=lambda record: not record.is_parity_reference):
        if _is_fp32_reference(record):
            references.fp32_references[_task_of(record)].append(record)
        if record.is_parity_reference:
            references.controls.setdefault(_key_of_control(record), record)
    return references


def _fp32_reference_of(record: RunRecord, references: _References) -> RunRecord | None:
    for other in references.fp32_references.get(_task_of(record), []) if references.fp32_references else ():
        if other is not record and (other.is_parity_reference or other.identity != record.identity):
            return other
    return None


def _usable(record: RunRecord) -> bool:
    return (
        record.status == "ok" and bool(record.losses) and record.first_step == 0 and not record.is_rehearsal
    )


def _is_fp32_reference(record: RunRecord) -> bool:
    return record.engine == "single" and record.config.numerics == "fp32" and not record.is_of_script


def _control_of(record: RunRecord, references: _References) -> RunRecord | None:
    """Return the reference run of one process with the same numerics and kernels; None without one."""
    if record.config.numerics == "fp32" or not references.controls:
        return None
    return references.controls.get(_key_of_control(record))


def _key_of_control(record: RunRecord) -> tuple[str, str, bytes]:
    return record.config.numerics, record.config.kernels, _task_of(record)


def _settings_of(record: RunRecord) -> bytes:
    settings = [record.asked["config"], record.asked["files"], record.world_size, record.gpu]
    return msgspec.json.encode(settings, order="sorted")


def _task_of(record: RunRecord) -> bytes:
    """Return a key of all settings that decide the losses.

    These are the model, data and schedule, and the number of sequences per step over all ranks; it also
    decides where an epoch ends, since epochs end after whole steps.
    """
    config = record.asked["config"]
    settings = {name: value for name, value in config.items() if name not in _SAME_TASK}
    settings["max_grad_norm"] = (
        settings["max_grad_norm"] or 0.0
    )  # stock numerics: the script sets no clipping
    settings["optim"] = rule_of(config.get("optim", "adamw"))
    task = [settings, _sequences_per_step(record), record.asked["files"]]
    return msgspec.json.encode(task, order="sorted")


def _sequences_per_step(record: RunRecord) -> int:
    config = record.config
    sequences_per_rank = config.per_device_train_batch_size * config.gradient_accumulation_steps
    return sequences_per_rank * record.asked["num_processes"]
