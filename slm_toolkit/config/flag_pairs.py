"""Pairs of a verb's own flags that make no sense, as tables. Flags of runs have `Excludes` instead."""

import argparse
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A flag that must not stand beside another, or not without it."""

    flag: str
    other: str
    "its name, with the value that is meant if there is one: `launcher slurm`"
    why: str = ""
    "the rest of the sentence, with its comma or colon"
    is_needed: bool = False
    "whether the other flag must be there, not absent"
    on_cpu: bool = False
    "whether the rule holds only without a GPU"

    def problem(self, given: Collection[str]) -> str | None:
        has_other = self.other.split()[0] in given
        if self.flag not in given or has_other == self.is_needed:
            return None
        return f"--{self.flag} {'without' if self.is_needed else 'with'} --{self.other}{self.why}"

    @property
    def hint(self) -> str:
        return f"add --{self.other}" if self.is_needed else "give one"


def flags_given(args: argparse.Namespace) -> list[str]:
    """Names of a verb's flags that ask for something else than their default does."""
    default = args.parser.get_default
    return names_given({name: value for name, value in vars(args).items() if value != default(name)})


def names_given(flags: Mapping[str, Any]) -> list[str]:
    """Names of the flags that ask for something: None and false don't."""
    return [name for name, value in flags.items() if _asks(value)]


def pair_problems(given: Collection[str], pairs: Iterable[Pair], *, has_gpu: bool = False) -> list[str]:
    """A sentence for each pair that is broken by the flags `given`, by name."""
    broken = (pair.problem(given) for pair in pairs if not (pair.on_cpu and has_gpu))
    return [problem for problem in broken if problem is not None]


def check_pairs(
    given: Collection[str], pairs: Collection[Pair], *, has_gpu: bool = False, hint: str | None = None
) -> None:
    """Raises one ValueError with all `pair_problems`."""
    if problems := pair_problems(given, pairs, has_gpu=has_gpu):
        hints = dict.fromkeys(pair.hint for pair in pairs if pair.problem(given) in problems)
        raise ValueError("\n".join(problems) + f"\nhint: {hint or '; '.join(hints)}")


def _asks(value: Any) -> bool:
    return any(map(_asks, value)) if isinstance(value, list) else value is not None and value is not False
