"""What a run does around its steps: the interface of its observers, and the progress that it shows."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from slm_toolkit.base.safe_files import write_new
from slm_toolkit.record.run_record import PROGRESS_FILE


class Observer:
    """A part of a run that the loop calls around each step, and once after the last one; all do nothing here.

    Every rank has the same observers, because some of them communicate.
    """

    def before_step(self, step: int) -> None:
        """`step` counts from 0, here and below."""

    def after_step(self, step: int, loss: torch.Tensor, norm: torch.Tensor | float | None) -> None:
        """`loss`: this rank's mean over the micro-steps.

        `norm`: of all gradients before clipping; None if the engine has none.
        """

    def end(self, observed: dict[str, Any]) -> None:
        """Add this observer's fields of the record to `observed`. Observers end in reverse order."""


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
    """Show a stage before the first step. If it fails, the run's folder is left as it was."""
    show_stage(run_dir, stage)
    try:
        yield
    except BaseException:
        remove_state(run_dir)
        raise


def show_stage(run_dir: Path, stage: str) -> None:
    """Tell a terminal, and `slm compare` through the progress file, what rank 0 does."""
    if is_rank_0():
        if sys.stderr.isatty():
            say(f"starting: {stage}")
        write_state(run_dir, {"stage": stage})


def remove_state(run_dir: Path) -> None:
    if is_rank_0():
        with suppress(OSError):
            (run_dir / PROGRESS_FILE).unlink(missing_ok=True)


def write_state(run_dir: Path, state: dict[str, Any]) -> None:
    """Replace the progress file at once, so that a reader never sees half of it.

    Only the display of `slm compare` needs the file, so a run does without it where it can't be written, as
    in a folder that does not exist yet.
    """
    path = run_dir / PROGRESS_FILE
    with suppress(OSError):
        unfinished = path.with_suffix(".new")
        write_new(unfinished, json.dumps(state))
        unfinished.replace(path)
