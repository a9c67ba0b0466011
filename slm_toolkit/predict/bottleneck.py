"""Find changes to a configuration that would make its step faster."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from slm_toolkit.config.run_config import FLAGS
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.model_spec import ModelSpec, padded_spec
from slm_toolkit.predict.choices import allowed_kernels
from slm_toolkit.predict.estimate import estimate
from slm_toolkit.predict.setup.setup import Setup, with_flags
from slm_toolkit.predict.speed.matmul import is_aligned, next_aligned

WORTH_SAYING = 1.03
"smallest speedup that is reported: predictions are not more precise"


@dataclass(frozen=True)
class Lever:
    """One change to a configuration, and its expected speedup."""

    change: str
    "as flags of `slm`; of an alignment also the widths that differ, or another shape"
    speedup: float
    "tokens/s after over before"
    fits: bool | None
    "whether the changed setup fits; None if the GPU's memory is unknown"


def levers(setup: Setup) -> list[Lever]:
    """Return the changes that raise the tokens per second of a setup, best first; the setup needs a GPU.

    Each change is tried alone. If the setup fits, changes that make it too large are left out. A kernel does
    not change the arithmetic; a larger batch changes the training.
    """
    before = estimate(setup.launched)
    if before.tokens_per_second is None:
        return []
    tried = []
    for words, changed in _changes(setup):
        if kernel_problems(changed.spec, changed.config) or changed.config.problems():
            continue
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

    if config.attn_implementation == "eager":
        yield changed(attn_implementation="sdpa")
    for name in ("fused", "compiled") if config.peft == "none" else ("fused",):
        allowed = allowed_kernels(name, [config], [spec], [setup.strategy])
        kernels = config.with_kernels(*FLAGS["kernels"].parts_of(allowed)).kernels
        if kernels != config.kernels:
            yield changed(kernels=kernels)
    if config.optim == "adamw_torch":
        yield changed(optim="adamw_torch_fused")
    if config.gradient_checkpointing != "none":
        yield changed(gradient_checkpointing="none")
    yield changed(per_device_train_batch_size=2 * config.per_device_train_batch_size)


def alignment_gain(setup: Setup) -> Lever | None:
    """Compare a setup with a padded one, or else with its own shape rounded up to multiples of 8.

    Return None if all widths are aligned, or if an adapter is trained, which can't change the shape of its
    frozen model.
    """
    spec = setup.launched.spec
    if not misaligned_widths(spec) or setup.config.peft != "none":
        return None
    change, aligned = "--pad_widths", with_flags(setup, pad_widths=True)
    can_pad = not kernel_problems(spec, aligned.config) and not setup.strategy.builds_in_shards
    if not can_pad or misaligned_widths(padded_spec(setup.spec)):
        change, aligned = "another shape", dataclasses.replace(setup, spec=_rounded(spec))
    before, after = estimate(setup.launched), estimate(aligned.launched)
    if before.tokens_per_second is None or after.tokens_per_second is None:
        return None
    return Lever(change, after.tokens_per_second / before.tokens_per_second, after.fits)


def misaligned_widths(spec: ModelSpec) -> dict[str, int]:
    """Return the widths of matrix products that are not multiples of 8, by name."""
    widths = {
        "FFN": spec.ffn_size,
        "hidden": spec.hidden_size,
        "heads": spec.num_heads * spec.head_dim,
        "key-value heads": spec.num_kv_heads * spec.head_dim,
        "vocabulary": spec.vocab_size,
    }
    return {name: width for name, width in widths.items() if not is_aligned(width)}


def _rounded(spec: ModelSpec) -> ModelSpec:
    names = ["ffn_size", "hidden_size", "vocab_size"]
    if not is_aligned(spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim):
        names.append("head_dim")
    return dataclasses.replace(spec, **{name: next_aligned(getattr(spec, name)) for name in names})
