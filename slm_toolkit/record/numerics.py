"""Numerics: how a probed step was really computed, how two of them differ, and the limits of parity."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slm_toolkit.config.run_config import FLAGS, RunConfig

FP32_STEPS = 5
"steps that `slm compare --parity` first runs in fp32 for each strategy"
ROUNDED = " rounded to "
"between the dtype of fp32 tensors and that of 16 bits which has all their values"
PARITY_STEPS = 20
"default number of steps over which two runs are compared"


@dataclass(frozen=True)
class Limits:
    """The allowed differences of two runs of the same training in their first GROWTH_STEPS steps."""

    loss: float
    "allowed absolute difference of a step's losses"
    norm: float
    "allowed difference of the ratio of gradient norms from 1"
    parameter_norm: float | None = None
    "the same for each parameter's gradient in step 1; None: not compared"
    loss_change: float = 0.0
    "added to `loss` for each unit by which the loss has changed since step 1"


GROWTH_STEPS = 5


def growth(step: int) -> float:
    """Return the factor of the limits at a step, counted from 1.

    Rounding errors add up like a random walk: they grow with the square root of the steps.
    """
    return max(1.0, (step / GROWTH_STEPS) ** 0.5)


_FP32 = Limits(1e-5, 5e-5, 1e-4)
# About three times the largest difference of a correct pair in results/parity/README.md.
ALIKE = {
    "fp32": _FP32,
    "aligned": Limits(1e-3, 2.5e-2, 5e-3),  # with small random weights, norms drift before losses do
    "stock": Limits(2.5e-2, 5e-2),  # DeepSpeed clips and keeps master weights; others don't
    "pure_bf16": Limits(2e-3, 2.5e-2, 5e-3),
    "fp16": Limits(5e-4, 1e-2, 2e-3),
    "fp8": Limits(2e-2, 5e-2),
}
"limits for two runs of the same numerics, by `precision_of`"
ALIKE_IN_TASK = {
    **ALIKE,
    "aligned": Limits(3e-3, 5e-3, 5e-3),
    "stock": Limits(7e-3, 8e-3, 4e-2),
    "pure_bf16": Limits(3e-3, 5e-3, 5e-3),
    "fp16": Limits(5e-4, 7e-4, 5e-4),
}
"the same for runs of `--parity`, whose weights and tokens magnify each difference"
LOW_PRECISION = {
    "fp32": _FP32,
    "aligned": Limits(7e-3, 1e-2, 2.5e-2),
    "stock": Limits(7e-3, 1e-2, 2.5e-2),
    "pure_bf16": Limits(4e-2, 6e-2, 2.5e-2),
    "fp16": Limits(2e-3, 2e-3, 5e-3),
    "fp8": Limits(5e-2, 5e-2),
}
"limits for a run and an fp32 run, both on the weights and tokens of `--parity`"


def precision_of(config: Mapping[str, Any]) -> str:
    """Return the key of the limits: fp8 if `config` sets it, else the value of `--numerics`."""
    return "fp8" if config.get("fp8", "none") != "none" else config["numerics"]


_SEQUENCES_OF_A_STEP = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seq_len",
    "world_size",
)
_OF_OPTIMIZER = (
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "optim",
    "lr_scheduler_type",
    "warmup_steps",
    "max_steps",
    "max_tokens",
    "num_train_epochs",
    "dataset",
    "seq_len",
    "model",
    "peft",
    "lora_r",
    "lora_target_modules",
)


def is_computed_plainly(config: Mapping[str, Any]) -> bool:
    """Return whether all flags but --kernels keep the rounding of one plain process of the same numerics."""
    return config["attn_implementation"] in ("eager", "sdpa") and all(
        name == "kernels" or config.get(name, plain) == plain for name, plain in PLAIN.items()
    )


PLAIN = {
    name: getattr(RunConfig, name)
    for name, flag in FLAGS.items()
    if flag.losses == "rounded" and name not in ("numerics", "attn_implementation")
} | {"kernels": "plain"}
"the plain values of flags whose other values change the rounding, under any numerics"


def _varies_by(*flags: str) -> Any:
    """Make a field of Numerics; a difference of one of the flags explains a difference of the field."""
    return field(default=None, metadata={"flags": flags})


Settings = dict[str, int | float | list[float] | str | None]


@dataclass(frozen=True)
class Numerics:
    """The observations of `run/observe/probe.py` in a run's first step; None: nothing was observed.

    No field is copied from the RunConfig: clipping and TF32 are read from the live optimizer and from torch,
    and everything else is observed while the step runs. Dtypes are torch's names without `torch.`; if tensors
    of one kind have two dtypes, both are joined by `+`. In older records, Settings are text.
    """

    # weights of the module between steps
    parameter_dtype: str | None = None
    # whether the forward ran under autocast
    autocast: bool | None = None
    # output of the head's matrix product; its input, if fused
    compute_dtype: str | None = None
    # residual stream, the input of the last norm
    residual_dtype: str | None = None
    # logits returned to the training script; None if it receives none
    logits_dtype: str | None = _varies_by("kernels")
    # input of the cross-entropy; None if a kernel of torch.compile or Triton hides it
    cross_entropy_dtype: str | None = _varies_by("kernels")
    # the kernel that computed the loss
    loss_kernel: str | None = _varies_by("kernels")
    # loss returned to the training script
    loss_dtype: str | None = None
    # gradients when the optimizer's step begins
    gradient_dtype: str | None = None
    # tensors of the collectives that reduce gradients; None on one rank
    reduction_dtype: str | None = _varies_by("world_size")
    # weights that the optimizer updates: masters, or parameters
    master_weight_dtype: str | None = None
    # moments of the optimizer
    optimizer_state_dtype: str | None = None
    # largest gradient norm that is not clipped; 0: no clipping
    clipping: float | None = _varies_by("max_grad_norm")
    # forward passes per optimizer step, on each rank
    accumulation: int | None = _varies_by("gradient_accumulation_steps")
    # tokens that went through the model in one optimizer step, over all ranks
    tokens_per_step: int | None = _varies_by(*_SEQUENCES_OF_A_STEP)
    # attention kernel that ran
    attention: str | None = _varies_by("attn_implementation", "kernels", "seq_len")
    # fused, foreach, for-loop or muon, as run
    optimizer_kernel: str | None = _varies_by("optim")
    # whether a graph of torch.compile ran
    compiled: bool | None = _varies_by("kernels")
    # whether backward recomputed activations; None if torch.compile hides it
    recomputed: bool | None = _varies_by("gradient_checkpointing", "kernels", "attn_implementation")
    # float8 types of the decoder layers' matrix products; None without float8, or if torch.compile hides it
    float8: str | None = _varies_by("fp8", "kernels")
    # whether fp32 matrix products may round to TF32
    tf32: bool | None = None
    # hash of the tokens in each rank's first step
    batch_hashes: list[str] | None = _varies_by(
        *_SEQUENCES_OF_A_STEP,
        "seed",
        "model",
        "dataset",
        "text_column",
        "tokenizer_name",
        "streaming",
        "eval_dataset",
        "eval_steps",
        "eval_batches",
    )
    # calls of SDPA with other arguments: mask (causal, given or none), dropout and scale
    attention_call: list[Settings] | str | None = _varies_by(
        "attn_implementation", "kernels", "model", "seq_len", "dataset", "packing"
    )
    # p of the dropout modules and of attention's weights
    dropout: str | None = _varies_by("peft", "lora_dropout")
    # dtype and first, last and sum of RoPE's frequencies
    rope: list[Settings] | str | None = _varies_by("model")
    # eps of the norms
    norm_eps: str | None = _varies_by("model", "kernels")
    # whether the head is the embedding
    tied: str | None = _varies_by("model", "kernels")
    # parameters that are not trained
    frozen: str | None = _varies_by("peft", "model")
    # trained parameters without a gradient in this step
    without_gradient: str | None = _varies_by("peft", "model", "dataset")
    # each group's number of elements, lr, betas, eps (or Muon's momentum) and weight_decay
    optimizer_settings: list[Settings] | str | None = _varies_by(*_OF_OPTIMIZER)
    # the same at the last step
    optimizer_settings_at_end: list[Settings] | str | None = _varies_by(*_OF_OPTIMIZER)
    # classes of the optimizer and its wrappers, outermost first; not compared
    optimizer_class: str | None = None


ALIGNMENTS = {
    # the same mixed_precision gives all engines this dtype, and several of them other dtypes elsewhere
    "compute_dtype": "give all YAMLs the same mixed_precision, and the JSON the same bf16 or fp16 section",
    "clipping": "clip with accelerator.clip_grad_norm_, and gradient_clipping: auto in the JSON",
    "accumulation": "give micro-steps to the Accelerator, and gradient_accumulation_steps: auto in the JSON",
    "tokens_per_step": "give every strategy as many sequences per step",
    "batch_hashes": "call set_seed before the DataLoader is made, and shuffle alike",
    "optimizer_settings": "leave optimizer and scheduler out of the DeepSpeed JSON",
    "optimizer_kernel": "leave optimizer and scheduler out of the DeepSpeed JSON",
    "recomputed": "set activation checkpointing in the script, not in the YAML",
    "compiled": "compile in the script, or set the same dynamo_config in all YAMLs",
}
"""by field of Numerics: what makes the strategies of a user's own script alike; strategies of our own trainer
are alike by --numerics aligned"""


def alignments(found: Iterable["Difference"]) -> list[str]:
    """Return the changes that would make a script's run compute what its reference computes."""
    return list(dict.fromkeys(ALIGNMENTS[one.field] for one in found if one.field in ALIGNMENTS))


_FIELDS = dataclasses.fields(Numerics)


@dataclass(frozen=True)
class Difference:
    """A field with different values in a run and its reference."""

    field: str
    ran: Any
    reference: Any

    def __str__(self) -> str:
        name = self.field.removesuffix("_dtype").replace("_", " ")
        return f"{name} {_text(self.ran)} (not {_text(self.reference)})"


def settings_that_differ(settings: Mapping[str, Any], others: Mapping[str, Any]) -> frozenset[str]:
    """Return the names that have other values in two runs."""
    names = settings.keys() | others.keys()
    return frozenset(name for name in names if settings.get(name) != others.get(name))


def differences(
    numerics: Numerics, reference: Numerics, *, other_settings: frozenset[str] = frozenset()
) -> list[Difference]:
    """Return the fields that differ between `numerics` and `reference`.

    Leaves out differences that a flag in `other_settings` explains: the names of the flags (and `world_size`)
    with different values in the two runs.
    """
    return [
        Difference(f.name, ran, expected)
        for f in _FIELDS
        if (ran := getattr(numerics, f.name)) != (expected := getattr(reference, f.name))
        and not other_settings.intersection(f.metadata.get("flags", ()))
        and f.name != "optimizer_class"
    ]


def merged(of_ranks: list[dict[str, Any]]) -> Numerics:
    """Merge the observations of all ranks: tokens are added, hashes are listed in order of rank.

    None is ignored: a rank without a shard of a tiny model observes nothing. If ranks differ in a field, it
    has all their values: in one list, or joined by ` / `.
    """
    fields: dict[str, Any] = {}
    for name in of_ranks[0]:
        values = [of_rank[name] for of_rank in of_ranks if of_rank[name] is not None]
        if name != "batch_hashes":
            values = [value for place, value in enumerate(values) if value not in values[:place]]
        if name == "tokens_per_step":
            fields[name] = sum(of_rank[name] or 0 for of_rank in of_ranks) or None
        elif values and isinstance(values[0], list):
            fields[name] = [item for value in values for item in value]
        else:
            fields[name] = " / ".join(map(str, values)) if len(values) > 1 else next(iter(values), None)
    return Numerics(**fields)


def numerics_from(content: dict[str, Any] | None) -> Numerics | None:
    """Read Numerics from a record's JSON; None for a run that ended before it was probed."""
    return Numerics(**{f.name: content.get(f.name) for f in _FIELDS}) if content else None


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(item)}" for name, item in value.items())
    if isinstance(value, list):
        return " ".join(map(_text, value))
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unknown" if value is None else str(value)
