"""The export flags of `slm compare` and `slm report`: rows to files, or to stdout in place of the table."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slm_toolkit.errors import user_errors

if TYPE_CHECKING:
    from slm_toolkit.report.rows import Row

STDOUT = Path("-")
EXPORTS = ("csv", "markdown", "latex", "parquet")


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("exports", "to a file beside the table, or with - instead of it")
    group.add_argument("--csv", type=Path, metavar="FILE|-", help="the names and rows of --json")
    group.add_argument("--parquet", type=Path, metavar="FILE", help="the same")
    group.add_argument("--markdown", type=Path, metavar="FILE|-", help="the table, all columns of it")
    group.add_argument(
        "--latex", type=Path, metavar="FILE|-", help="without empty columns, with booktabs' rules"
    )


def exports_asked(args: argparse.Namespace) -> list[str]:
    return [name for name in EXPORTS if getattr(args, name) is not None]


def on_stdout(args: argparse.Namespace) -> list[str]:
    """The flags that want stdout for themselves."""
    named = [name for name in exports_asked(args) if getattr(args, name) == STDOUT]
    return [*named, *(["json"] if args.json else [])]


def check_exports(args: argparse.Namespace) -> None:
    """Raises ValueError for a file that can't be written, before anything runs, and for two on stdout."""
    problems = []
    if args.parquet == STDOUT:
        problems.append("--parquet -: Parquet is no text\nhint: --parquet rows.parquet")
    elif len(taken := on_stdout(args)) > 1:
        problems.append(f"--{' and --'.join(taken)} both go to stdout\nhint: give one of them a file")
    for name in exports_asked(args):
        path = getattr(args, name)
        if path != STDOUT and (path.is_dir() or not path.parent.is_dir()):
            what = "is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            problems.append(f"--{name} {path}: {what}\nhint: a file in a folder that is there")
    if problems:
        raise ValueError("\n".join(problems))


def write_exports(rows: list["Row"], content: list[dict[str, Any]], args: argparse.Namespace) -> bool:
    """All that was asked for; returns whether it took stdout. `content`: the objects of `--json`."""
    from slm_toolkit.report.export import csv_text, json_text, latex_text, markdown_text, write_parquet

    texts = {
        "csv": lambda: csv_text(content),
        "markdown": lambda: markdown_text(rows),
        "latex": lambda: latex_text(rows),
    }
    for name in exports_asked(args):
        path = getattr(args, name)
        if path == STDOUT:
            sys.stdout.write(texts[name]())
            continue
        with user_errors():
            try:
                if name == "parquet":
                    write_parquet(content, path)
                else:
                    path.write_text(texts[name](), encoding="utf-8")
            except OSError as error:
                raise ValueError(f"--{name} {path}: {error}\nhint: another folder, or more space") from None
        print(f"wrote {path}", file=sys.stderr)
    if args.json:
        print(json_text(content))
    return bool(on_stdout(args))
