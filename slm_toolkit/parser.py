"""The command line's parsers: errors in one line with a hint, and verbs that load when they are asked for."""

import argparse
import sys
from importlib import import_module
from typing import Any

from slm_toolkit.errors import user_errors
from slm_toolkit.flag_names import hint_for, in_our_names
from slm_toolkit.garbage import no_garbage_collection


def with_underscores(argv: list[str]) -> list[str]:
    """Accept `--seq-len` where the flag is `--seq_len`; after `--` or `-m` come another command's words."""
    words = []
    ours = min((argv.index(mark) for mark in ("--", "-m") if mark in argv), default=len(argv))
    for word in argv[:ours]:
        name, equals, value = word.partition("=")
        words.append(
            name.replace("-", "_").replace("__", "--", 1) + equals + value if name[:2] == "--" else word
        )
    return words + argv[ours:]


class Parser(argparse.ArgumentParser):
    """argparse that accepts other trainers' names of flags, and ends errors with a hint and exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(in_our_names(words, self._option_string_actions), namespace)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(found, "parser", self)  # the verb's
            hint = hint_for(unknown, parser._option_string_actions)
            parser.error(f"unknown: {' '.join(unknown)}" + (f"\nhint: {hint}" if hint else ""))
        return found

    def error(self, message: str) -> None:
        problem, _, hint = message.partition("\nhint: ")
        with user_errors():
            raise ValueError(f"{problem}\nhint: {f'{hint}; ' if hint else ''}{self.prog} --help")


class VerbParser(Parser):
    """A verb's parser, filled by `fill(parser)` of the module `filled_by` when the verb is used.

    So `slm --help` loads no verb, and a verb none of the others.
    """

    def __init__(self, *, filled_by: str, **options: Any) -> None:
        super().__init__(**options)
        self._filled_by: str | None = filled_by

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._filled_by is not None:
            with no_garbage_collection():
                import_module(self._filled_by).fill(self)
            self._filled_by = None
            self.set_defaults(parser=self)
        return super().parse_known_args(args, namespace)


def positive_number(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return float(text)


def price_per_hour(text: str) -> float:
    """A price that a report can show: no less than a millionth, no more than a million."""
    if not 1e-6 <= float(text) <= 1e6:
        raise argparse.ArgumentTypeError(f"{text} is no price per GPU-hour: 0.000001 to 1000000")
    return float(text)


def count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return int(text)


def whole_number(text: str) -> int:
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return int(text)
