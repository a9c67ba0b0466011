"""Numerics: how one training step was really computed, as probed, and what tells two of them apart."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from slm_toolkit.config.run_config import FLAGS, RunConfig

FP32_STEPS = 5
"of each strategy, that `slm compare --parity` does in fp32 first"
ROUNDED = " rounded to bfloat16"
"after the dtype of fp32 tensors that hold values of bf16 only"
PARITY_STEPS = 20
"over which two runs are held against each other, where no other number was asked for"


@dataclass(frozen=True)
class Limits:
    """How far two runs of the same training may lie apart in their first GROWTH_STEPS steps."""

    loss: float
    "absolute, of a step's loss"
    norm: float
    "of the ratio of gradient norms, from 1"
    parameter_norm: float | None = None
    "the same of each parameter's gradient in step 1; None: not compared"

    def at(self, step: int) -> "Limits":
        """At a step, counted from 1: rounding adds up as a random walk does, with the root of the steps."""
        factor = max(1.0, (step / GROWTH_STEPS) ** 0.5)
        return Limits(self.loss * factor, self.norm * factor, self.parameter_norm)


@cache
def limits_by_step(limits: Limits, num_steps: int) -> tuple[Limits, ...]:
    """Those of the first `num_steps` steps."""
    return tuple(limits.at(step) for step in range(1, num_steps + 1))


GROWTH_STEPS = 5
_FP32 = Limits(1e-5, 5e-5, 1e-4)
# About three times the farthest of the clean pairs in results/parity/README.md.
ALIKE = {
    "fp32": _FP32,
    "aligned": Limits(1e-3, 2.5e-2, 5e-3),  # from small random weights norms drift sooner than losses
    "stock": Limits(2.5e-2, 5e-2),  # DeepSpeed clips and keeps masters, the others don't
    "pure_bf16": Limits(2e-3, 2.5e-2, 5e-3),
    "fp8": Limits(2e-2, 5e-2),
    "tf32": Limits(1e-3, 5e-3),
}
"two runs of the same numerics, by `precision_of`"
ALIKE_IN_TASK = {
    **ALIKE,
    "aligned": Limits(3e-3, 5e-3, 5e-3),
    "stock": Limits(7e-3, 8e-3, 4e-2),
    "pure_bf16": Limits(3e-3, 5e-3, 5e-3),
}
"the same on the weights and tokens of `--parity_task`, which magnify each difference"
LOW_PRECISION = {
    "fp32": _FP32,
    "aligned": Limits(7e-3, 1e-2, 2.5e-2),
    "stock": Limits(7e-3, 1e-2, 2.5e-2),
    "pure_bf16": Limits(4e-2, 6e-2, 2.5e-2),
    "fp8": Limits(5e-2, 5e-2),
    "tf32": Limits(5e-3, 1e-2),
}
"a run and one in fp32, on the weights and tokens of `--parity_task`"


def precision_of(config: Mapping[str, Any]) -> str:
    """What decides how far losses may lie: fp8 or tf32 where `config` asks for it, else `--numerics`."""
    if config.get("fp8", "none") != "none":
        return "fp8"
    return "tf32" if config.get("tf32") else config["numerics"]


_OF_OPTIMIZER = (
    *(
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "lr_scheduler_type",
        "lr_decay_steps",
        "warmup_steps",
        "max_steps",
        "model",
        "peft",
    ),
    *(
        "num_train_epochs",
        "scale_lr",
        "base_batch_size",
        "dataset",
        "seq_len",
        "lora_r",
        "lora_target_modules",
    ),
)


def is_computed_plainly(config: Mapping[str, Any]) -> bool:
    """Whether nothing was asked for that rounds otherwise than one plain process of the same numerics."""
    return config["attn_implementation"] in ("eager", "sdpa") and all(
        config.get(name, plain) == plain for name, plain in PLAIN.items()
    )


PLAIN = {
    name: getattr(RunConfig, name)
    for name, flag in FLAGS.items()
    if flag.losses == "rounded" and name not in ("numerics", "attn_implementation")
}
"flags of which another value rounds otherwise, under any numerics, and the plain value"


def _probed(meaning: str, *, settings: tuple[str, ...] = (), compared: bool = True) -> Any:
    """A field; `settings` are the flags of which another value explains another value of the field."""
    return field(default=None, metadata={"help": meaning, "settings": settings, "compared": compared})


@dataclass(frozen=True)
class Numerics:
    """What `run/observe/probe.py` read off the live objects in a run's first step; None where it saw nothing.

    Nothing here is copied from the RunConfig: clipping and TF32 are what the live optimizer and torch go by,
    all else was seen to happen. Dtypes are torch's names without `torch.`; two of them, joined by `+`, where
    tensors of one kind differ.
    """

    parameter_dtype: str | None = _probed("weights that the module holds between steps")
    autocast: bool | None = _probed("whether the forward ran under autocast")
    compute_dtype: str | None = _probed("what the output head's matrix product gives, fused: takes")
    residual_dtype: str | None = _probed("residual stream, as the last norm takes it in")
    logits_dtype: str | None = _probed(
        "logits that the training script gets back, None where it gets none", settings=("loss_kernel",)
    )
    cross_entropy_dtype: str | None = _probed(
        "logits that the cross-entropy is computed of; None where a compiled kernel hides it",
        settings=("torch_compile",),
    )
    loss_kernel: str | None = _probed("what computes the loss, as run", settings=("loss_kernel",))
    loss_dtype: str | None = _probed("loss that the training script gets back")
    gradient_dtype: str | None = _probed("gradients as the optimizer's step begins")
    reduction_dtype: str | None = _probed(
        "what the collectives that reduce gradients carry; None on one rank", settings=("world_size",)
    )
    master_weight_dtype: str | None = _probed("weights that the optimizer updates: masters, or parameters")
    optimizer_state_dtype: str | None = _probed("moments of the optimizer")
    clipping: float | None = _probed(
        "largest gradient norm let through; 0: no clipping", settings=("max_grad_norm",)
    )
    accumulation: int | None = _probed(
        "forward passes per optimizer step, on each rank", settings=("gradient_accumulation_steps",)
    )
    tokens_per_step: int | None = _probed(
        "tokens that went through the model in one optimizer step, over all ranks",
        settings=(*("per_device_train_batch_size", "gradient_accumulation_steps", "seq_len", "world_size"),),
    )
    attention: str | None = _probed(
        "attention kernel that ran", settings=("attn_implementation", "torch_compile", "seq_len")
    )
    optimizer_kernel: str | None = _probed("fused, foreach or for-loop, as run", settings=("optim",))
    compiled: bool | None = _probed("whether a graph of torch.compile ran", settings=("torch_compile",))
    recomputed: bool | None = _probed(
        "whether backward computed activations again; None where torch.compile hides it",
        settings=("gradient_checkpointing", "torch_compile", "attn_implementation"),
    )
    float8: str | None = _probed(
        "float8 types that the decoder layers' matrix products are rounded to; None where they are not, or "
        "where torch.compile hides it",
        settings=("fp8", "torch_compile"),
    )
    tf32: bool | None = _probed("whether fp32 matrix products may round to TF32", settings=("tf32",))
    batch_hashes: list[str] | None = _probed(
        "of the tokens of each rank's first step",
        settings=(
            *("per_device_train_batch_size", "gradient_accumulation_steps", "seq_len", "world_size"),
            *("seed", "model", "dataset", "dataset_config_name", "text_column", "tokenizer_name"),
            *("streaming", "validation_split_percentage", "eval_steps", "eval_batches"),
        ),
    )
    attention_call: str | None = _probed(
        "what SDPA was called with: causal or with a mask, dropout, scale; None of other kernels",
        settings=("attn_implementation", "torch_compile", "model", "seq_len", "dataset", "packing"),
    )
    dropout: str | None = _probed(
        "p of the dropout modules and of attention's weights", settings=("peft", "lora_dropout")
    )
    rope: str | None = _probed("dtype and first, last and sum of RoPE's frequencies", settings=("model",))
    norm_eps: str | None = _probed("of the norms", settings=("model", "norm_kernel", "use_liger_kernel"))
    tied: str | None = _probed("whether the head is the embedding", settings=("model", "loss_kernel"))
    frozen: str | None = _probed("parameters that are not trained", settings=("peft", "model"))
    without_gradient: str | None = _probed(
        "trained parameters without a gradient in this step", settings=("peft", "model", "dataset")
    )
    optimizer_settings: str | None = _probed(
        "of each group: elements, learning rate, betas, eps, weight decay",
        settings=_OF_OPTIMIZER,
    )
    optimizer_settings_at_end: str | None = _probed("the same at the last step", settings=_OF_OPTIMIZER)
    optimizer_class: str | None = _probed("what steps, outermost first", compared=False)


_FIELDS = dataclasses.fields(Numerics)
_NAMES = frozenset(f.name for f in _FIELDS)


@dataclass(frozen=True)
class Difference:
    """One field in which a run was computed otherwise than the run it is compared with."""

    field: str
    ran: Any
    reference: Any

    def __str__(self) -> str:
        name = self.field.removesuffix("_dtype").replace("_", " ")
        return f"{name} {_shown(self.ran)} (not {_shown(self.reference)})"


def differences(
    numerics: Numerics, reference: Numerics, *, other_settings: frozenset[str] = frozenset()
) -> list[Difference]:
    """Where `numerics` differs from `reference`, but for what flags in `other_settings` explain.

    `other_settings`: names of the flags that were asked otherwise of the two runs, `world_size` included.
    """
    return [
        Difference(f.name, getattr(numerics, f.name), getattr(reference, f.name))
        for f in _FIELDS
        if f.metadata["compared"]
        and not other_settings.intersection(f.metadata["settings"])
        and getattr(numerics, f.name) != getattr(reference, f.name)
    ]


def merged(of_ranks: list[dict[str, Any]]) -> Numerics:
    """One Numerics of what every rank saw: tokens are added up, hashes kept in order of rank.

    A rank that saw nothing of a kind (it holds no shard of a tiny model) says None and is not counted. Where
    two ranks computed differently, the field holds both values, joined by ` / `.
    """
    together: dict[str, Any] = {}
    for f in dataclasses.fields(Numerics):
        values = [of_rank[f.name] for of_rank in of_ranks]
        if f.name == "tokens_per_step":
            together[f.name] = sum(values)
        elif f.name == "batch_hashes":
            together[f.name] = [one for value in values for one in value]
        else:
            seen = list(dict.fromkeys(value for value in values if value is not None))
            together[f.name] = " / ".join(map(str, seen)) if len(seen) > 1 else next(iter(seen), None)
    return Numerics(**together)


def numerics_from(content: dict[str, Any] | None) -> Numerics | None:
    """The Numerics of a record's JSON; None for a run that ended before it was probed."""
    return Numerics(**{key: value for key, value in content.items() if key in _NAMES}) if content else None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, bool):
        return "on" if value else "off"
    return "unknown" if value is None else str(value)
