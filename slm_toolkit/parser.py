"""The command line's parsers: errors in one line with a hint, and verbs that load when they are asked for."""

import argparse
import sys
from importlib import import_module
from typing import Any

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
    """argparse whose errors look like ours: one line, a hint, exit code 2."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> None:
        print(f"error: {message}\nhint: {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


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
