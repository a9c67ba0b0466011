"""Pair: two flags of a verb that contradict or need each other. Flags of runs have `Excludes` instead."""

import argparse
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A flag that can't be combined with another flag, or that needs it."""

    flag: str
    other: str
    "name of the other flag, with the value if only one value counts: `launcher slurm`"
    why: str = ""
    "rest of the sentence, beginning with a comma or colon"
    is_needed: bool = False
    "True: the other flag is required; False: it is excluded"
    on_cpu: bool = False
    "True: the rule holds only without a GPU"

    def problem(self, given: Collection[str]) -> str | None:
        has_other = self.other.split()[0] in given
        if self.flag not in given or has_other == self.is_needed:
            return None
        return f"--{self.flag} {'without' if self.is_needed else 'with'} --{self.other}{self.why}"


def flags_given(args: argparse.Namespace) -> list[str]:
    """Return the names of a verb's flags whose value is not the default."""
    default = args.parser.get_default
    return [name for name, value in vars(args).items() if value != default(name) and _is_given(value)]


def pair_problems(given: Collection[str], pairs: Iterable[Pair], *, has_gpu: bool = False) -> list[str]:
    """Return a sentence for each pair that the flags `given` break."""
    broken = (pair.problem(given) for pair in pairs if not (pair.on_cpu and has_gpu))
    return [problem for problem in broken if problem is not None]


def check_pairs(given: Collection[str], pairs: Iterable[Pair], *, has_gpu: bool = False) -> None:
    """Raise one ValueError with all `pair_problems`."""
    if problems := pair_problems(given, pairs, has_gpu=has_gpu):
        raise ValueError("\n".join(problems) + "\nhint: leave one out, or add the one that is missing")


def _is_given(value: Any) -> bool:
    return any(map(_is_given, value)) if isinstance(value, list) else value is not None and value is not False
