"""Flag: the metadata of a RunConfig field, such as its help, range, and the flags it excludes."""

import dataclasses
import functools
import operator
from collections.abc import Collection, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar, dataclass_transform

# limit of every flag that has no smaller one
LARGEST_NUMBER = 10**12
_LONGEST_QUOTE = 40  # characters
_Config = TypeVar("_Config")


@dataclass(frozen=True)
class Excludes:
    """A flag that can't be combined with this one, or strategies under which this one can't be used."""

    other: str
    "name of a flag, or of a boolean property of Strategy"
    why: str
    values: tuple[Any, ...] = ()
    "values of the other flag that are excluded; empty: any but its default"
    own: tuple[Any, ...] = ()
    "values of this flag that exclude it; empty: any but the default"


@dataclass(frozen=True)
class Flag:
    """All metadata of one flag. Defaults mean: nothing special."""

    default: Any
    help: str
    "argparse.SUPPRESS: only the script has the flag, for the commands that `slm compare` writes"
    _: KW_ONLY
    group: str | None = None
    "heading of --help under which the flag stands; None: that of the field before"
    basic: bool = False
    "whether `--help` shows it; `--help all` shows every flag"
    choices: tuple[str, ...] | None = None
    sets: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    "words of a value that joins them by +, and the parts that each stands for"
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    "other names, shown by --help; foreign_flags.yaml has those that it does not show"
    bare: str | None = None
    "value if the flag is typed without one"
    synonyms: dict[str, str] = dataclasses.field(default_factory=dict)
    "other spellings of values"
    grid: bool = False
    "whether `slm compare` takes several values"
    one_run_only: bool = False
    "True if the flag makes no sense for several runs: `slm compare` does not have it"

    least: float = -LARGEST_NUMBER
    most: float = LARGEST_NUMBER
    above: float | None = None
    below: float | None = None
    needs: tuple[str, ...] = ()
    "flags that must be given with it"
    excludes: tuple[Excludes, ...] = ()

    identity: bool = True
    "whether another value makes another run"
    may_change_on_resume: bool = True
    "False if the flag decides which tensors a checkpoint has, or which sequences were already trained on"
    losses: Literal["others", "rounded", "same"] = "others"
    "losses under another value: of another task (others), equal up to rounding (rounded), or equal (same)"

    estimate: Literal["counts", "ignores", "refuses"] = "refuses"
    "what the closed forms do with it; refuses: `slm estimate` does not have the flag"
    no_closed_form: str | None = None
    "hint for values without a closed form: what to do instead"
    closed_form_for: tuple[Any, ...] = ()
    "values with a closed form; empty: only the default"

    column: str | None = None
    "title of its column in tables; None: the flag's name, '': no column"
    heading: str | None = None
    "line above a table if all rows have the same value, not the default; {} becomes the value"

    def value_of(self, word: str) -> str:
        """Return a typed value in our spelling."""
        if all(map(self.sets.get, word.split("+"))):
            return self.joined(self.parts_of(word))
        return self.synonyms.get(word.lower(), word)

    def parts_of(self, value: Any) -> tuple[Any, ...]:
        """Return the parts of a value in their order, each once; of a flag without `sets`, the value."""
        if not self.sets or not isinstance(value, str):
            return (value,)
        found = {part for word in value.split("+") for part in self.sets.get(word, (word,))}
        return tuple(sorted(found, key=list(self.sets).index)) if found <= self.sets.keys() else (value,)

    def joined(self, parts: Collection[str]) -> str:
        """Return the fewest words that stand for these parts, joined by +."""
        words, left = [], set(parts)
        for word, of_word in sorted(self.sets.items(), key=lambda item: -len(item[1])):
            if left.intersection(of_word) and set(of_word) <= set(parts):
                words.append(word)
                left -= set(of_word)
        return "+".join(sorted(words, key=list(self.sets).index)) or "plain"

    def has_closed_form(self, value: Any) -> bool:
        known = self.closed_form_for or (self.default,)
        return self.no_closed_form is None or all(part in known for part in self.parts_of(value))


@dataclass_transform(frozen_default=True, field_specifiers=(Flag,))
def dataclass_of_flags(cls: type[_Config]) -> type[_Config]:
    """Make a frozen dataclass. Each field gets its Flag's default, and the Flag as metadata."""
    group = None
    for name in cls.__annotations__:
        group = vars(cls)[name].group or group
        of_flag = dataclasses.replace(vars(cls)[name], group=group)
        setattr(cls, name, dataclasses.field(default=of_flag.default, metadata={"flag": of_flag}))
    return dataclass(frozen=True)(cls)


@functools.cache
def flags_of_fields(config: type) -> dict[str, Flag]:
    """Return the Flag of each field of a dataclass of flags, by name and in order."""
    return {f.name: f.metadata["flag"] for f in dataclasses.fields(config)}


def shortened(text: str) -> str:
    """Shorten a word of a command line for a message."""
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:20]}...{text[-10:]}"


def field_problems(config: Any, strategy: Any = None) -> list[str]:
    """Return a sentence for each value outside its range or choices, and for each contradicting pair.

    With a Strategy, return only the sentences about flags that can't be used under it.
    """
    known = flags_of_fields(type(config))
    problems = []
    for name, of_flag in known.items():
        if strategy is None:
            problems += _value_problems(name, of_flag, getattr(config, name))
        if _is_given(config, name):
            problems += _pair_problems(name, of_flag, config, known, strategy)
    return problems


def _value_problems(name: str, of_flag: Flag, value: Any) -> Iterator[str]:
    if value is None:
        return
    sets = of_flag.sets
    if sets and value not in sets and not all(map(sets.get, value.split("+"))):
        yield f"--{name} is {shortened(value)!r}: {', '.join(sets)}, or several joined by +"
    if of_flag.choices and value not in of_flag.choices:
        yield f"--{name} is {value!r}: one of {', '.join(of_flag.choices)}"
    if isinstance(value, str) and not value.isprintable():
        yield f"--{name} is {value!r}: it has unprintable characters"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    number = f"{value:g}" if isinstance(value, float) else shortened(str(value))
    for limit, words, is_within in (
        (of_flag.least, "at least", operator.ge),
        (of_flag.above, "above", operator.gt),
        (of_flag.most, "at most", operator.le),
        (of_flag.below, "below", operator.lt),
    ):
        if limit is not None and not is_within(value, limit):  # NaN is within no limit
            yield f"--{name} is {number}: {words} {limit:,}"
            return


def _pair_problems(
    name: str, of_flag: Flag, config: Any, known: dict[str, Flag], strategy: Any
) -> Iterator[str]:
    this = _as_typed(config, name, known)
    for other in of_flag.needs if strategy is None else ():
        if not _is_given(config, other):
            yield f"{this} without --{other}"
    for rule in of_flag.excludes:
        other, is_flag = rule.other, rule.other in known
        own_parts = of_flag.parts_of(getattr(config, name))
        if is_flag == (strategy is not None) or (rule.own and not set(rule.own).intersection(own_parts)):
            continue
        if not is_flag:
            if getattr(strategy, other):
                yield f"{this}: {rule.why}"
        elif (
            set(rule.values).intersection(known[other].parts_of(getattr(config, other)))
            if rule.values
            else _is_given(config, other)
        ):
            yield f"{this} with {_as_typed(config, other, known, named=rule.values)}: {rule.why}"


def _is_given(config: Any, name: str) -> bool:
    """True if a flag has another value than its default, and is not None or false."""
    value = getattr(config, name)
    return value != getattr(type(config), name) and value is not None and value is not False


def _as_typed(config: Any, name: str, known: dict[str, Flag], *, named: tuple[Any, ...] = ()) -> str:
    """Return `--pad_widths`, `--profile time` or `--rehearse 8`; no free text, such as a path."""
    value = getattr(config, name)
    is_word = known[name].choices or known[name].sets or value in named
    if value is True or (isinstance(value, str) and not is_word):
        return f"--{name}"
    text = (
        str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
    )
    return f"--{name} {text}"
