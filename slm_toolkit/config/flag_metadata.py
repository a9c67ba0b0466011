"""What a field of RunConfig knows of its flag: text, range, other flags it excludes, where it counts."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar, dataclass_transform

LARGEST_NUMBER = 10**12
"of any flag that has no smaller limit of its own"
_LONGEST_QUOTE = 40  # characters
_Config = TypeVar("_Config")


@dataclass(frozen=True)
class Excludes:
    """Another flag that makes no sense beside this one: one sentence, written once."""

    other: str
    why: str
    values: tuple[Any, ...] = ()
    "of the other flag; empty: any but its default"
    own: tuple[Any, ...] = ()
    "values of this flag that exclude it; empty: any but the default"


@dataclass(frozen=True)
class ExcludesStrategy:
    """Strategies that can't do what a flag asks."""

    property: str
    "of Strategy, true or false"
    why: str
    "the sentence; {flag}: as typed, {strategy}: its name"
    own: tuple[Any, ...] = ()
    "values of this flag that exclude them; empty: any but the default"
    unless: bool = False
    "whether those are excluded that don't have the property"


@dataclass(frozen=True)
class Flag:
    """All that is known of one flag; what only some places need has a default that means: nothing special."""

    default: Any
    help: str
    _: KW_ONLY
    group: str
    "heading of --help under which the flag stands"
    basic: bool = False
    "whether `--help` shows it; `--help all` shows every flag"
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    "other names, shown by --help"
    other_names: tuple[str, ...] = ()
    "names that other trainers have for it: accepted, not shown"
    bare: str | None = None
    "the value of the flag without one"
    synonyms: dict[str, str] = dataclasses.field(default_factory=dict)
    "other words for values"
    grid: bool = False
    "whether `slm compare` takes several values"

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    range_note: str = ""
    "follows the range where a value is outside it"
    is_printable: bool = False
    "whether a value must consist of characters that can be shown"
    needs: tuple[str, ...] = ()
    "flags that must be given beside it"
    excludes: tuple[Excludes, ...] = ()
    excludes_strategies: tuple[ExcludesStrategy, ...] = ()
    extra: str | None = None
    "the optional packages, as in base/errors.py, that any value but the default needs"

    identity: bool = True
    "whether another value makes another run"
    may_change_on_resume: bool = True
    "False: decides which tensors a checkpoint has, or which sequences were already seen"
    losses: Literal["others", "rounded", "same"] = "others"
    "that another value gives: those of another task; the same, rounded otherwise; the very same"

    estimate: Literal["counts", "ignores", "refuses"] = "refuses"
    "what closed forms of time and memory do with it; refuses: `slm estimate` has no such flag"
    no_closed_form: str | None = None
    "of values that estimates don't cover: what to do instead"
    closed_form_for: tuple[Any, ...] = ()
    "values that estimates cover, where that is not the default alone"

    column: str | None = None
    "title of its column in tables; None: its name, '': it has none"
    label: str | None = None
    "its name in the label of a row; None: its name"
    heading: str | None = None
    "above a table whose rows all have a value that is not the default; {}: the value"

    def has_closed_form(self, value: Any) -> bool:
        return self.no_closed_form is None or value in (self.closed_form_for or (self.default,))


@dataclass_transform(frozen_default=True, field_specifiers=(Flag,))
def dataclass_of_flags(cls: type[_Config]) -> type[_Config]:
    """A frozen dataclass of a class whose fields are Flags: each gets its Flag's default, and the Flag."""
    for name in cls.__annotations__:
        of_flag = vars(cls)[name]
        setattr(cls, name, dataclasses.field(default=of_flag.default, metadata={"flag": of_flag}))
    return dataclass(frozen=True)(cls)


def flags_of_fields(config: Any) -> dict[str, Flag]:
    """By name, in order."""
    return {f.name: f.metadata["flag"] for f in dataclasses.fields(config)}


def shortened(text: str) -> str:
    """A word of a command line as it can be quoted back."""
    return text if len(text) <= _LONGEST_QUOTE else f"{text[:20]}...{text[-10:]}"


def field_problems(config: Any) -> list[str]:
    """A sentence for each value out of its range or choices, and each pair of flags that makes no sense."""
    known = flags_of_fields(config)
    return [
        problem
        for name, of_flag in known.items()
        for problem in (
            *_value_problems(name, of_flag, getattr(config, name)),
            *_pair_problems(name, of_flag, config, known),
        )
    ]


def strategy_problems(config: Any, strategy: Any) -> list[str]:
    """A sentence for each flag of a RunConfig that a Strategy can't do, with two flags of one reason once."""
    known = flags_of_fields(config)
    sentences = [
        rule.why.format(flag=_as_typed(config, name, known), strategy=strategy.name)
        for name, of_flag in known.items()
        if _is_given(config, name)
        for rule in of_flag.excludes_strategies
        if getattr(strategy, rule.property) is not rule.unless
        and (not rule.own or getattr(config, name) in rule.own)
    ]
    return list(dict.fromkeys(sentences))


def _value_problems(name: str, of_flag: Flag, value: Any) -> Iterator[str]:
    if value is None:
        return
    if of_flag.choices and value not in of_flag.choices:
        yield f"--{name} is {value!r}: one of {', '.join(of_flag.choices)}"
    if of_flag.is_printable and not value.isprintable():
        yield f"--{name} is {value!r}: it has characters that can't be shown"
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    number = f"{value:g}" if isinstance(value, float) else shortened(str(value))
    if not _is_within(of_flag, value):
        note = of_flag.range_note and f" {of_flag.range_note}"
        yield f"--{name} is {number}: {_range_text(of_flag)}{note}{_meant(of_flag, value)}"
    elif not -LARGEST_NUMBER <= value <= LARGEST_NUMBER:  # NaN is in no range
        yield f"--{name} is {number}: at most {LARGEST_NUMBER:,}"


def _is_within(of_flag: Flag, value: float) -> bool:
    """NaN is within any range that has no limit, and within no other."""
    return (
        (of_flag.least is None or value >= of_flag.least)
        and (of_flag.above is None or value > of_flag.above)
        and (of_flag.most is None or value <= of_flag.most)
        and (of_flag.below is None or value < of_flag.below)
        and (of_flag.above is None or value < math.inf)
    )


def _range_text(of_flag: Flag) -> str:
    """1 to 50, 0 to below 1, at least 1, not below 0, above 0, ..."""
    if of_flag.least is not None and of_flag.most is not None:
        return f"{of_flag.least} to {of_flag.most}"
    if of_flag.least is not None and of_flag.below is not None:
        return f"{of_flag.least} to below {of_flag.below}"
    limits = (
        ("not below 0" if of_flag.least == 0 else f"at least {of_flag.least}", of_flag.least),
        (f"above {of_flag.above}", of_flag.above),
        (f"at most {of_flag.most}", of_flag.most),
    )
    return ", ".join(text for text, limit in limits if limit is not None)


def _meant(of_flag: Flag, value: float) -> str:
    """3e4 for a number of at most 1 lacks a minus."""
    mantissa, _, power = f"{value:e}".partition("e+")
    is_typo = of_flag.most == 1 and value >= 10 and power
    return f"; did you mean {float(mantissa):g}e-{int(power)}?" if is_typo else ""


def _pair_problems(name: str, of_flag: Flag, config: Any, known: dict[str, Flag]) -> Iterator[str]:
    if not _is_given(config, name):
        return
    this = _as_typed(config, name, known)
    for other in of_flag.needs:
        if not _is_given(config, other):
            yield f"{this} without --{other}"
    for rule in of_flag.excludes:
        value = getattr(config, rule.other)
        if rule.own and getattr(config, name) not in rule.own:
            continue
        if value in rule.values if rule.values else _is_given(config, rule.other):
            yield f"{this} with {_as_typed(config, rule.other, known, named=rule.values)}: {rule.why}"


def _is_given(config: Any, name: str) -> bool:
    """Whether a flag asks for something: it has another value than its default, and is not off."""
    value = getattr(config, name)
    return value != getattr(type(config), name) and value is not None and value is not False


def _as_typed(config: Any, name: str, known: dict[str, Flag], *, named: tuple[Any, ...] = ()) -> str:
    """`--tf32`, `--fp8 rowwise`, `--rehearse 8`; of a path or another text `--eval_dataset` alone."""
    value = getattr(config, name)
    if value is True or (isinstance(value, str) and not known[name].choices and value not in named):
        return f"--{name}"
    text = (
        str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else value
    )
    return f"--{name} {text}"
