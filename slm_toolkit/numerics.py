"""Numerics: how one training step was really computed, as probed, and what tells two of them apart."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PARITY_STEPS = 20
"over which two runs are held against each other; training itself lets rounding grow beyond"
LOSS_TOLERANCE = {"fp32": 1e-5, "aligned": 1e-2, "stock": 5e-2, "pure_bf16": 5e-2, "fp8": 5e-2, "tf32": 5e-3}
"absolute, of each of the first PARITY_STEPS steps' losses, by `precision_of`"
GRAD_NORM_STEPS = 5
"over which gradient norms are compared: at a high learning rate they drift apart sooner than losses"
GRAD_NORM_TOLERANCE = {
    "fp32": 1e-3,
    "aligned": 5e-2,
    "stock": 5e-2,
    "pure_bf16": 5e-2,
    "fp8": 5e-2,
    "tf32": 1e-2,
}
"how far from 1 the ratio of gradient norms may lie"


def precision_of(config: Mapping[str, Any]) -> str:
    """What decides how far losses may lie: fp8 or tf32 where `config` asks for it, else `--numerics`."""
    if config.get("fp8", "none") != "none":
        return "fp8"
    return "tf32" if config.get("tf32") else config["numerics"]


def _probed(meaning: str, *, settings: tuple[str, ...] = (), compared: bool = True) -> Any:
    """A field; `settings` are the flags of which another value explains another value of the field."""
    return field(default=None, metadata={"help": meaning, "settings": settings, "compared": compared})


@dataclass(frozen=True)
class Numerics:
    """What `run/probe.py` read off the live objects in a run's first step; None where it saw nothing.

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
