"""The flags of RunConfig on a command line: one per field, the same for every verb and the script."""

import argparse
import dataclasses
import itertools
from functools import partial
from typing import Any, get_args, get_origin

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.flag_metadata import Flag
from slm_toolkit.config.parser import Parser, foreign_flags, with_underscores
from slm_toolkit.config.run_config import FLAGS, RunConfig

# flags that make no sense for several runs
ONE_RUN_ONLY = tuple(name for name, flag in FLAGS.items() if flag.one_run_only)


def add_flags(parser: Parser, *, grid: bool, leave_out: tuple[str, ...] = (), hidden: bool = False) -> None:
    """Add a flag for every field of RunConfig but those to `leave_out`.

    With `grid`, a flag whose `Flag.grid` is true takes several values. Flags without help are added only with
    `hidden`.
    """
    parser.has_grid = grid
    groups = {
        name: parser.add_argument_group(name) for name in dict.fromkeys(f.group for f in FLAGS.values())
    }
    for f in dataclasses.fields(RunConfig):
        flag = FLAGS[f.name]
        if f.name not in leave_out and (hidden or flag.help != argparse.SUPPRESS):
            names = (f"--{name}" for name in (f.name, *flag.aliases))
            action = groups[flag.group].add_argument(*names, **_options(f, flag, several=grid and flag.grid))
            action.basic = flag.basic and (flag.grid or not grid)


def _options(f: dataclasses.Field, flag: Flag, *, several: bool) -> dict[str, Any]:
    """Return argparse's options for a field."""
    kind = value_type(f.type)
    default = str(f.default).lower() if kind is bool else f.default
    text = flag.help + ("" if f.default is None else f" (default: {default})")
    options: dict[str, Any] = {
        "dest": f.name,
        "type": _bool if kind is bool else partial(_value_of, f.name) if kind is str else kind,
        "default": None,
        "choices": flag.choices,
        "metavar": flag.metavar
        or (None if flag.choices else "true|false" if kind is bool else kind.__name__.upper()),
        "help": text.replace("%", "%%"),
    }
    if kind in (int, float) and f.default is None:
        options["type"] = lambda word: None if word == "auto" else kind(word)
        options["type"].__name__ = kind.__name__  # in argparse's messages
    bare = True if kind is bool else flag.bare
    if several:
        options.update(nargs="+" if bare is None else "*", const=bare, action=_Several)
    elif bare is not None:
        options.update(nargs="?", const=bare)
    return options


def _value_of(name: str, word: str) -> str:
    """Return a typed value in our spelling."""
    if instead := foreign_flags("values").get(f"{name}={word.lower()}"):
        raise argparse.ArgumentTypeError(f"there is no {word}\nhint: {instead}")
    return FLAGS[name].value_of(word)


def config_from_args(args: argparse.Namespace) -> RunConfig:
    """Return the RunConfig of parsed flags; flags that were not given keep their defaults."""
    return RunConfig(**given_flags(args))


def given_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of RunConfig that were given as flags, each a value or a list of values."""
    return {name: value for name, value in vars(args).items() if name in FLAGS and value is not None}


def every_config(given: dict[str, Any]) -> list[RunConfig]:
    """Return a RunConfig for each combination of `given`, which maps field names to a value or a list."""
    several = {name: value if isinstance(value, list) else [value] for name, value in given.items()}
    combinations = itertools.product(*several.values())
    return [RunConfig(**dict(zip(several, values, strict=True))) for values in combinations]


def flags_of(config: RunConfig) -> list[str]:
    """Return the flags that make `config`: one for each field that differs from its default."""
    given = []
    for f in dataclasses.fields(RunConfig):
        value = getattr(config, f.name)
        if value != f.default:
            given += [f"--{f.name}", str(value).lower() if isinstance(value, bool) else str(value)]
    return given


MODULE = "slm_toolkit.train"


def training_config(words: list[str]) -> RunConfig:
    """The RunConfig of the words after `-m slm_toolkit.train`; exits with code 2 on an unknown flag."""
    parser = Parser(
        prog=f"python -m {MODULE}",
        description="Train one configuration, under `accelerate launch` or `slm train`, and record it.",
    )
    add_flags(parser, grid=False, hidden=True)
    with user_errors():
        return config_from_args(parser.parse_args(with_underscores(words)))


class _Several(argparse.Action):
    """Stores a list of values; for a flag without a value, the value that the flag alone means."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: Any = None
    ) -> None:
        setattr(namespace, self.dest, values or [self.const])


def value_type(annotation: Any) -> type:
    """Return the type without None: int for `int | None`."""
    if get_origin(annotation) is None:
        return annotation
    return next(kind for kind in get_args(annotation) if kind is not type(None))


def _bool(text: str) -> bool:
    if text.lower() in ("true", "1", "yes", "false", "0", "no"):
        return text.lower() in ("true", "1", "yes")
    raise argparse.ArgumentTypeError(f"{text!r} is not true or false")
