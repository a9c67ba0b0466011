"""Numerics: how a probed step was really computed, how two of them differ, and the limits of parity."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
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

    def at(self, step: int) -> "Limits":
        """Return the limits at a step, counted from 1.

        Rounding errors add up like a random walk: they grow with the square root of the steps.
        """
        factor = max(1.0, (step / GROWTH_STEPS) ** 0.5)
        return replace(self, loss=self.loss * factor, norm=self.norm * factor)


@cache
def limits_by_step(limits: Limits, num_steps: int) -> tuple[Limits, ...]:
    """Return the limits of each of the first `num_steps` steps."""
    return tuple(limits.at(step) for step in range(1, num_steps + 1))


GROWTH_STEPS = 5
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
    *("per_device_train_batch_size", "gradient_accumulation_steps", "seq_len", "world_size"),
)
_OF_OPTIMIZER = (
    *(
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
        "model",
        "peft",
    ),
    *(
        "num_train_epochs",
        "dataset",
        "seq_len",
        "lora_r",
        "lora_target_modules",
    ),
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


def _probed(meaning: str, *, settings: tuple[str, ...] = (), compared: bool = True) -> Any:
    """Make a field of Numerics; a difference of the flags `settings` explains a difference of the field."""
    return field(default=None, metadata={"help": meaning, "settings": settings, "compared": compared})


@dataclass(frozen=True)
class Numerics:
    """The observations of `run/observe/probe.py` in a run's first step; None: nothing was observed.

    No field is copied from the RunConfig: clipping and TF32 are read from the live optimizer and from torch,
    and everything else is observed while the step runs. Dtypes are torch's names without `torch.`; if tensors
    of one kind have two dtypes, both are joined by `+`.
    """

    parameter_dtype: str | None = _probed("weights of the module between steps")
    autocast: bool | None = _probed("whether the forward ran under autocast")
    compute_dtype: str | None = _probed("output of the head's matrix product; its input, if fused")
    residual_dtype: str | None = _probed("residual stream, the input of the last norm")
    logits_dtype: str | None = _probed(
        "logits returned to the training script; None if it receives none", settings=("kernels",)
    )
    cross_entropy_dtype: str | None = _probed(
        "input of the cross-entropy; None if a kernel of torch.compile or Triton hides it",
        settings=("kernels",),
    )
    loss_kernel: str | None = _probed("the kernel that computed the loss", settings=("kernels",))
    loss_dtype: str | None = _probed("loss returned to the training script")
    gradient_dtype: str | None = _probed("gradients when the optimizer's step begins")
    reduction_dtype: str | None = _probed(
        "tensors of the collectives that reduce gradients; None on one rank", settings=("world_size",)
    )
    master_weight_dtype: str | None = _probed("weights that the optimizer updates: masters, or parameters")
    optimizer_state_dtype: str | None = _probed("moments of the optimizer")
    clipping: float | None = _probed(
        "largest gradient norm that is not clipped; 0: no clipping", settings=("max_grad_norm",)
    )
    accumulation: int | None = _probed(
        "forward passes per optimizer step, on each rank", settings=("gradient_accumulation_steps",)
    )
    tokens_per_step: int | None = _probed(
        "tokens that went through the model in one optimizer step, over all ranks",
        settings=_SEQUENCES_OF_A_STEP,
    )
    attention: str | None = _probed(
        "attention kernel that ran", settings=("attn_implementation", "kernels", "seq_len")
    )
    optimizer_kernel: str | None = _probed("fused, foreach, for-loop or muon, as run", settings=("optim",))
    compiled: bool | None = _probed("whether a graph of torch.compile ran", settings=("kernels",))
    recomputed: bool | None = _probed(
        "whether backward recomputed activations; None if torch.compile hides it",
        settings=("gradient_checkpointing", "kernels", "attn_implementation"),
    )
    float8: str | None = _probed(
        "float8 types of the decoder layers' matrix products; None without float8, or if torch.compile hides "
        "it",
        settings=("fp8", "kernels"),
    )
    tf32: bool | None = _probed("whether fp32 matrix products may round to TF32")
    batch_hashes: list[str] | None = _probed(
        "hash of the tokens in each rank's first step",
        settings=(
            *_SEQUENCES_OF_A_STEP,
            *("seed", "model", "dataset", "text_column", "tokenizer_name"),
            *("streaming", "eval_dataset", "eval_steps", "eval_batches"),
        ),
    )
    attention_call: str | None = _probed(
        "arguments of SDPA: causal or with a mask, dropout, scale; None for other kernels",
        settings=("attn_implementation", "kernels", "model", "seq_len", "dataset", "packing"),
    )
    dropout: str | None = _probed(
        "p of the dropout modules and of attention's weights", settings=("peft", "lora_dropout")
    )
    rope: str | None = _probed("dtype and first, last and sum of RoPE's frequencies", settings=("model",))
    norm_eps: str | None = _probed("eps of the norms", settings=("model", "kernels"))
    tied: str | None = _probed("whether the head is the embedding", settings=("model", "kernels"))
    frozen: str | None = _probed("parameters that are not trained", settings=("peft", "model"))
    without_gradient: str | None = _probed(
        "trained parameters without a gradient in this step", settings=("peft", "model", "dataset")
    )
    optimizer_settings: str | None = _probed(
        "each group's number of elements, learning rate, betas, eps (or Muon's momentum) and weight decay",
        settings=_OF_OPTIMIZER,
    )
    optimizer_settings_at_end: str | None = _probed("the same at the last step", settings=_OF_OPTIMIZER)
    optimizer_class: str | None = _probed(
        "classes of the optimizer and its wrappers, outermost first", compared=False
    )


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
_NAMES = frozenset(f.name for f in _FIELDS)


@dataclass(frozen=True)
class Difference:
    """A field with different values in a run and its reference."""

    field: str
    ran: Any
    reference: Any

    def __str__(self) -> str:
        name = self.field.removesuffix("_dtype").replace("_", " ")
        return f"{name} {_text(self.ran)} (not {_text(self.reference)})"


def differences(
    numerics: Numerics, reference: Numerics, *, other_settings: frozenset[str] = frozenset()
) -> list[Difference]:
    """Return the fields that differ between `numerics` and `reference`.

    Leaves out differences that a flag in `other_settings` explains: the names of the flags (and `world_size`)
    with different values in the two runs.
    """
    return [
        Difference(f.name, getattr(numerics, f.name), getattr(reference, f.name))
        for f in _FIELDS
        if f.metadata["compared"]
        and not other_settings.intersection(f.metadata["settings"])
        and getattr(numerics, f.name) != getattr(reference, f.name)
    ]


def merged(of_ranks: list[dict[str, Any]]) -> Numerics:
    """Merge the observations of all ranks: tokens are added, hashes are listed in order of rank.

    None is ignored: a rank without a shard of a tiny model observes nothing. If two ranks differ in a field,
    the field has both values, joined by ` / `.
    """
    merged_fields: dict[str, Any] = {}
    for f in dataclasses.fields(Numerics):
        values = [of_rank[f.name] for of_rank in of_ranks]
        if f.name == "tokens_per_step":
            merged_fields[f.name] = sum(value or 0 for value in values) or None
        elif f.name == "batch_hashes":
            merged_fields[f.name] = [batch_hash for value in values for batch_hash in value]
        else:
            distinct = list(dict.fromkeys(value for value in values if value is not None))
            merged_fields[f.name] = (
                " / ".join(map(str, distinct)) if len(distinct) > 1 else next(iter(distinct), None)
            )
    return Numerics(**merged_fields)


def numerics_from(content: dict[str, Any] | None) -> Numerics | None:
    """Read Numerics from a record's JSON; None for a run that ended before it was probed."""
    return Numerics(**{key: value for key, value in content.items() if key in _NAMES}) if content else None


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unknown" if value is None else str(value)
