"""The presets of `--like`: how other trainers train, in our flags and in what only closed forms can follow.

`other_trainers.toml` has one entry per trainer.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.strategy.strategy import Strategy


@dataclass(frozen=True)
class LossBytes:
    """Bytes per logit of a trainer's own loss over bf16 logits, at its peaks."""

    forward: float
    backward: float
    alive: float = 0.0
    "of logits that a variable keeps until the next micro-step's logits replace them; on top of the two peaks"


@dataclass(frozen=True)
class OtherTrainer:
    """A trainer, by its defaults."""

    name: str
    "the value of `--like`"
    title: str
    sources: tuple[str, ...]
    "file and commit or version"
    flags: dict[str, Any] = field(hash=False)
    "our flags that make the same step; the user's flags win"
    strategies: tuple[str, ...]
    "shipped strategies that it has; the first ones are the default"
    runs_under: tuple[str, ...]
    "boolean properties of Strategy; it can run a strategy that has one of them"
    loss: LossBytes | None = None
    "None: its loss takes the memory of transformers' own"
    compiled_loss: LossBytes | None = None
    "with --kernels compile; None: as without"
    root_holds_vocabulary: bool = False
    "FSDP: the root unit, gathered during the whole step, has the embedding, the final norm and the head"
    has_fsdp1: bool = False
    "its FSDP is FSDP1: a flat parameter for each layer, and one for the root; backward gathers ahead"
    gathers_in_fp32: bool = False
    "FSDP: fp32 parameters are gathered in fp32 and cast by autocast; gradients are reduced in bf16"
    reduces_in_fp32: bool = False
    "FSDP: bf16 gradients are reduced in fp32"
    has_fp32_gradients: bool = False
    "with bf16 weights: gradients are summed and reduced in one fp32 buffer, which is never freed"
    zero_1_has_buckets: bool = False
    "ZeRO-1: the model is wrapped in DDP, too, whose bf16 buckets are as large as the gradients"
    notes: tuple[str, ...] = ()
    "what the user's script may set otherwise"
    gaps: tuple[str, ...] = ()
    "what it may set that the closed forms do not follow"

    def problems(self, strategies: list[Strategy]) -> list[str]:
        """Return a sentence for each strategy that the trainer does not have."""
        return [
            f"--like {self.name} with {strategy.name}, which {self.title} does not have: use "
            f"{', '.join(self.strategies)}"
            for strategy in strategies
            if not any(getattr(strategy, name) for name in self.runs_under)
        ]


_FILE = Path(__file__).parent / "other_trainers.toml"
TRAINERS = msgspec.convert(tomllib.loads(_FILE.read_text())["trainer"], tuple[OtherTrainer, ...])
"in the order of --help"
NAMES = tuple(trainer.name for trainer in TRAINERS)


def trainer_named(name: str | None) -> OtherTrainer | None:
    """Return the preset of one of NAMES; None for None."""
    return None if name is None else TRAINERS[NAMES.index(name)]


def as_liked(trainer: OtherTrainer | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given flags with the preset's values for others.

    A flag of the preset that the given flags exclude is left out. Raise ValueError for adapters, which only
    Hugging Face's Trainer trains as we do.
    """
    if trainer is None:
        return dict(given)
    peft = _values(given.get("peft", RunConfig.peft))
    if trainer.name != "trainer" and peft != ["none"]:
        raise ValueError(
            f"--like {trainer.name} with --peft {peft[-1]}: no closed form for adapters as {trainer.title} "
            "trains them\nhint: --like trainer"
        )
    first = {name: _values(value)[0] for name, value in given.items()}
    added: dict[str, Any] = {}
    for name, value in trainer.flags.items():
        before = len(RunConfig(**first, **added).problems())
        if name not in given and len(RunConfig(**first, **added, **{name: value}).problems()) <= before:
            added[name] = value
    in_lists = {name: [value] if FLAGS[name].grid else value for name, value in added.items()}
    return {**in_lists, **given}


def notes_like(trainer: OtherTrainer | None, given: Mapping[str, Any]) -> list[str]:
    """Return lines that name the preset, its source, what it set, and what it can't follow.

    `given`: the user's own flags.
    """
    if trainer is None:
        return []
    flags = as_liked(trainer, given)
    set_here = [
        name
        for name, value in trainer.flags.items()
        if name in flags and name not in given and value != "plain"  # transformers' own kernels are not news
    ]
    words = " ".join(_as_typed(name, _values(flags[name])[0]) for name in set_here)
    return [
        f"like {trainer.title}: {words or 'no flag is left to set'}",
        *(f"{trainer.title}: {note}" for note in trainer.notes),
        *(f"not followed: {gap}" for gap in trainer.gaps),
        f"read in {'; '.join(trainer.sources)}",
    ]


def _values(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _as_typed(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--{name} false"
    return f"--{name} {value:g}" if isinstance(value, float) else f"--{name} {value}"
