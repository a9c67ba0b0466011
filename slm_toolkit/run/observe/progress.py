"""Show what a run does before its first step, on the terminal and to `slm compare`."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from slm_toolkit.base.safe_files import write_new
from slm_toolkit.record.run_record import PROGRESS_FILE


def is_rank_0() -> bool:
    """Return True if the launcher made this process rank 0; works before the ranks are connected."""
    return os.environ.get("RANK", "0") == "0"


def say(line: str) -> None:
    """Print a line on rank 0, above a progress bar if there is one.

    A log on a full disk ends the run later, at a line about its steps, when a record can name the cause.
    """
    if is_rank_0():
        with suppress(OSError):
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()


@contextmanager
def starting(run_dir: Path, stage: str) -> Iterator[None]:
    """Show a stage before the first step, on rank 0. If it fails, the run's folder is left as it was."""
    show_stage(run_dir, stage)
    try:
        yield
    except BaseException:
        remove_state(run_dir)
        raise


def show_stage(run_dir: Path, stage: str) -> None:
    """Tell a terminal, and `slm compare` through the progress file, what the run does."""
    if is_rank_0() and sys.stderr.isatty():
        say(f"starting: {stage}")
    if is_rank_0() and run_dir.is_dir():  # `slm compare` made it
        with suppress(OSError):  # the run itself does not need the file
            write_state(run_dir / PROGRESS_FILE, {"stage": stage})


def remove_state(run_dir: Path) -> None:
    if is_rank_0():
        with suppress(OSError):
            (run_dir / PROGRESS_FILE).unlink(missing_ok=True)


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Replace the file at once, so that a reader never sees half of it."""
    unfinished = path.with_suffix(".new")
    write_new(unfinished, json.dumps(state))
    unfinished.replace(path)
