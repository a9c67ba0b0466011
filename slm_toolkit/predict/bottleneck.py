"""What a step's time goes to most, and what would move it."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from slm_toolkit.model.model_spec import PRESETS, ModelSpec
from slm_toolkit.predict.estimate import estimate
from slm_toolkit.predict.setup.setup import Setup, with_flags
from slm_toolkit.predict.speed.matmul import ALIGNMENT, is_aligned

ALIGNED_TO = 64
"what a width off the multiple of 8 is rounded to: a tile's edge, and no more than 32 elements away"
WORTH_SAYING = 1.01


@dataclass(frozen=True)
class Lever:
    """One change to a configuration, and what it is expected to give."""

    change: str
    "in the flags of `slm`, or in words"
    speedup: float
    "tokens/s after over before"
    fits: bool | None
    "with the change; None where the GPU's memory is unknown"


def levers(setup: Setup) -> list[Lever]:
    """Changes that make the tokens of a setup's step faster, best first; the setup needs a GPU.

    Each is tried alone, and what no longer fits is left out. Kernels change no arithmetic, alignment changes
    the model, a larger batch the training.
    """
    before = estimate(setup.launched)
    if before.tokens_per_second is None:
        return []
    tried = []
    for words, changed in _changes(setup):
        after = estimate(changed.launched)
        if before.fits and not after.fits:
            continue
        tried.append(Lever(words, after.tokens_per_second / before.tokens_per_second, after.fits))
    worth = [lever for lever in tried if lever.speedup >= WORTH_SAYING]
    return sorted(worth, key=lambda lever: -lever.speedup)


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    spec, config = setup.spec, setup.config

    def changed(**flags: object) -> tuple[str, Setup]:
        words = " ".join(
            f"--{name}" + ("" if value is True else f" {value}") for name, value in flags.items()
        )
        return words, with_flags(setup, **flags)

    aligned = aligned_sibling(spec)
    trains_all = config.peft == "none"  # else the weights are what they are
    if aligned != spec and trains_all:
        words = f"widths in multiples of 8: {describe_alignment(spec, aligned)}"
        yield words, dataclasses.replace(setup, spec=aligned)
    if config.attn_implementation == "eager":
        yield changed(attn_implementation="sdpa")
    if not config.torch_compile and trains_all:
        yield changed(torch_compile=True)
    if config.norm_kernel == "hf" and not config.torch_compile:
        yield changed(norm_kernel="fused")
    if config.loss_kernel == "hf":
        yield changed(loss_kernel="fused_linear")
    if config.optim == "adamw_torch":
        yield changed(optim="adamw_torch_fused")
    if config.gradient_checkpointing != "none":
        yield changed(gradient_checkpointing="none")
    yield changed(per_device_train_batch_size=2 * config.per_device_train_batch_size)


@dataclass(frozen=True)
class AlignmentGain:
    """What widths that tensor cores like give on one GPU type."""

    gpu: str
    sibling: str
    "the model, and what is other in it"
    speedup: float


def alignment_gain(setup: Setup) -> AlignmentGain | None:
    """Against the preset's hardware-friendly sibling, else the same shape rounded; None where all is well,
    and for weights that are there already.

    Tokens per second of both; the siblings' parameters differ by up to 11 % (slm-100m), which is in it.
    """
    spec = setup.spec
    if not misaligned_widths(spec) or setup.config.peft != "none":
        return None
    sibling = hw_sibling(spec) or aligned_sibling(spec)
    before, after = estimate(setup.launched), estimate(dataclasses.replace(setup, spec=sibling).launched)
    if before.tokens_per_second is None or after.tokens_per_second is None:
        return None
    changed = describe_alignment(spec, sibling)
    name = f"{sibling.name} ({changed})" if sibling.name != spec.name else changed
    return AlignmentGain(setup.gpu.name, name, after.tokens_per_second / before.tokens_per_second)


def misaligned_widths(spec: ModelSpec) -> dict[str, int]:
    """The widths of matrix products that are no multiple of 8, by what they are."""
    widths = {
        "FFN": spec.ffn_size,
        "hidden": spec.hidden_size,
        "heads": spec.num_heads * spec.head_dim,
        "key-value heads": spec.num_kv_heads * spec.head_dim,
        "vocabulary": spec.vocab_size,
    }
    return {name: width for name, width in widths.items() if not is_aligned(width)}


def aligned_sibling(spec: ModelSpec) -> ModelSpec:
    """The same shape with its widths rounded to tensor cores' liking; the spec itself where they are.

    FFN and hidden size go to the nearest multiple of 64, a head's width to the nearest of 8, so that a model
    keeps its size; the vocabulary goes up, since every token needs its row.
    """
    changes = {}
    if not is_aligned(spec.ffn_size):
        changes["ffn_size"] = _nearest(spec.ffn_size, ALIGNED_TO)
    if not is_aligned(spec.hidden_size):
        changes["hidden_size"] = _nearest(spec.hidden_size, ALIGNED_TO)
    if not is_aligned(spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim):
        changes["head_dim"] = _nearest(spec.head_dim, ALIGNMENT)
    if not is_aligned(spec.vocab_size):
        changes["vocab_size"] = -(-spec.vocab_size // ALIGNED_TO) * ALIGNED_TO
    return dataclasses.replace(spec, **changes) if changes else spec


def _nearest(width: int, multiple: int) -> int:
    return max(multiple, round(width / multiple) * multiple)


def hw_sibling(spec: ModelSpec) -> ModelSpec | None:
    """The preset of the same size with widths that tensor cores like (`slm-500m-hw` for `slm-500m`)."""
    return PRESETS.get(f"{spec.name}-hw")


def describe_alignment(spec: ModelSpec, aligned: ModelSpec) -> str:
    words = {"FFN": "ffn_size", "hidden": "hidden_size", "heads of": "head_dim", "vocabulary": "vocab_size"}
    pairs = [(word, getattr(aligned, name), getattr(spec, name)) for word, name in words.items()]
    return ", ".join(f"{word} {after} for {before}" for word, after, before in pairs if after != before)
