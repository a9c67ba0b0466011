"""Whether a run computed what its reference did: losses and gradient norms, step by step."""

import json
from dataclasses import dataclass

from slm_toolkit.numerics import GRAD_NORM_TOLERANCE, LOSS_TOLERANCE
from slm_toolkit.record import RunRecord

_ANY_VALUE_COMPUTES_THE_SAME = (  # other values of these flags are other ways to the same losses
    *("attn_implementation", "gradient_checkpointing", "torch_compile", "numerics", "reduce_dtype", "optim"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "profile"),
    *("timing_warmup_steps", "eval_steps", "eval_batches", "save_steps"),
)


@dataclass(frozen=True)
class Parity:
    """How far a run lies from its reference over the first `num_steps` steps."""

    reference: str
    num_steps: int
    max_loss_difference: float
    "absolute, at `worst_step`; infinite where a loss is not a number"
    worst_step: int
    "counted from 1"
    grad_norm_ratio: float
    "of the step where it is farthest from 1; infinite where a norm is not a number"
    loss_tolerance: float
    grad_norm_tolerance: float

    @property
    def holds(self) -> bool:
        norms_agree = (
            1 / (1 + self.grad_norm_tolerance) <= self.grad_norm_ratio <= 1 + self.grad_norm_tolerance
        )
        return self.max_loss_difference <= self.loss_tolerance and norms_agree

    def __str__(self) -> str:
        return (
            f"against {self.reference} over {self.num_steps} steps: "
            f"max |Δloss| {self.max_loss_difference:.2g} at step {self.worst_step} "
            f"(allowed {self.loss_tolerance:g}), gradient norm ratio {self.grad_norm_ratio:.4g} "
            f"(allowed {1 + self.grad_norm_tolerance:g})"
        )


def judge(records: list[RunRecord]) -> list[Parity | None]:
    """The Parity of each record; None for a reference itself and for what has none among the records.

    The reference is a single process in fp32 that saw the same batches, else DDP (or one process) with the
    very same flags.
    """
    return [
        compare_with(reference, record) if (reference := _reference_of(record, records)) else None
        for record in records
    ]


def compare_with(reference: RunRecord, record: RunRecord) -> Parity:
    """Losses and norms of all steps that both have. Raises ValueError where they share none."""
    losses = list(zip(reference.losses, record.losses, strict=False))
    norms = list(zip(reference.grad_norms, record.grad_norms, strict=False))
    if not losses:
        raise ValueError(f"{record.run_name} and {reference.run_name} share no step")
    gaps = [float("inf") if None in pair else abs(pair[1] - pair[0]) for pair in losses]
    ratios = [float("inf") if None in pair or not min(pair) > 0 else pair[1] / pair[0] for pair in norms]
    numerics = record.asked["config"]["numerics"]
    return Parity(
        reference="single-process fp32" if _is_fp32_reference(reference) else reference.strategy,
        num_steps=len(losses),
        max_loss_difference=max(gaps),
        worst_step=gaps.index(max(gaps)) + 1,
        grad_norm_ratio=max(ratios, key=lambda ratio: max(ratio, 1 / ratio)),
        loss_tolerance=LOSS_TOLERANCE[numerics],
        grad_norm_tolerance=GRAD_NORM_TOLERANCE[numerics],
    )


def _reference_of(record: RunRecord, records: list[RunRecord]) -> RunRecord | None:
    if not _usable(record):
        return None
    usable = [other for other in records if _usable(other) and other.identity != record.identity]
    for other in usable:
        if _is_fp32_reference(other) and _task_of(other) == _task_of(record):
            return other
    asked = json.dumps([record.asked["config"], record.world_size, record.gpu], sort_keys=True)
    if record.engine in ("ddp", "single"):
        return None
    for other in usable:
        same = json.dumps([other.asked["config"], other.world_size, other.gpu], sort_keys=True) == asked
        if same and other.engine in ("ddp", "single"):
            return other
    return None


def _usable(record: RunRecord) -> bool:
    return record.status == "ok" and bool(record.losses) and record.first_step == 0


def _is_fp32_reference(record: RunRecord) -> bool:
    return record.engine == "single" and record.asked["config"]["numerics"] == "fp32"


def _task_of(record: RunRecord) -> str:
    """What decides the losses: model, data and schedule, and the sequences of one step over all ranks."""
    config = record.asked["config"]
    settings = {name: value for name, value in config.items() if name not in _ANY_VALUE_COMPUTES_THE_SAME}
    sequences = (
        config["per_device_train_batch_size"]
        * config["gradient_accumulation_steps"]
        * record.asked["num_processes"]
    )
    return json.dumps([settings, sequences, record.asked["files"]], sort_keys=True)
