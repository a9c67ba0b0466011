"""A comparison as runs in trackio, TensorBoard or wandb: one for each row, with the names of `--json`."""

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.rows import Row

PROJECT = "slm_comparisons"
"in trackio and wandb; the runs that training itself reports are in another"
_SETTINGS = (  # beside the flags; what of a row is neither of both and a number is a result
    *("model", "strategy", "status", "reason", "evidence", "engine", "zero_stage", "reshard_after_forward"),
    *(
        "world_size",
        "num_machines",
        "gpu",
        "cpu",
        "allocator",
        "started_at",
        "price",
        "numerics_reference",
        "parity",
        "record",
    ),
)


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of one row."""

    name: str
    settings: dict[str, Any]
    results: dict[str, float]
    curves: dict[str, list[float | None]]
    "losses and step_seconds, of the slowest rank, of each step of the first launch"
    first_step: int

    @property
    def steps(self) -> list[tuple[int, dict[str, float]]]:
        """Of each step its number, counted from 1, and what is known of it."""
        num_steps = max(map(len, self.curves.values()))
        found = []
        for index in range(num_steps):
            values = {name: curve[index] for name, curve in self.curves.items() if index < len(curve)}
            known = {name: value for name, value in values.items() if value is not None}
            found.append((self.first_step + index + 1, known))
        return found


def tracked_run(name: str, row: Row, record: RunRecord) -> TrackedRun:
    """`record`: of the row's first launch."""
    settings = {**row.asked, **{name: getattr(row, name) for name in _SETTINGS}}
    results: dict[str, float] = {}
    for key, value in vars(row).items():
        parts = {f"{key}/{part}": each for part, each in value.items()} if isinstance(value, dict) else {}
        for full_name, each in (parts or {key: value}).items():
            if type(each) in (int, float) and key not in (*settings, "asked", "numerics_probed"):
                results[full_name] = each
    curves = {"losses": row.losses, "step_seconds": record.slowest_rank_seconds}
    return TrackedRun(name, settings, results, curves, record.first_step)


def check_installed(tracker: str) -> None:
    """Raises ValueError unless the tracker's package is there."""
    if find_spec(tracker) is None:
        raise ValueError(f"--report_to {tracker}: {tracker} is not installed\nhint: pip install {tracker}")


def track(runs: list[TrackedRun], tracker: str, *, folder: Path, group: str) -> str:
    """Tell `tracker` of all runs; returns how to look at them. What it prints goes to stderr.

    Nothing leaves the machine: trackio keeps a database of its own, the others write under `folder`.
    """
    with contextlib.redirect_stdout(sys.stderr):
        return TRACKERS[tracker](runs, folder, group)


def _to_trackio(runs: list[TrackedRun], folder: Path, group: str) -> str:
    import trackio

    for run in runs:
        begun = trackio.init(
            project=PROJECT,
            name=run.name,
            group=group,
            config=run.settings,
            embed=False,
            auto_log_gpu=False,  # of this machine, now
            auto_log_cpu=False,
        )
        for step, values in run.steps:
            begun.log(values, step=step)
        begun.log(run.results, step=_last_step(run))
        trackio.finish()  # the run's own leaves it to be finished, and printed of, once more at exit
    return f"trackio show --project {PROJECT}   # group {group}"


def _to_tensorboard(runs: list[TrackedRun], folder: Path, group: str) -> str:
    from torch.utils.tensorboard import SummaryWriter

    of_comparison = folder / group
    for run in runs:
        with SummaryWriter(of_comparison / _folder_name(run.name)) as writer:
            for step, values in run.steps:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
            settings = {name: _plain(value) for name, value in run.settings.items()}
            writer.add_hparams(settings, run.results, run_name=".", global_step=_last_step(run))
    return f"tensorboard --logdir {of_comparison}"


def _to_wandb(runs: list[TrackedRun], folder: Path, group: str) -> str:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        begun = wandb.init(
            project=PROJECT, name=run.name, group=group, config=run.settings, mode="offline", dir=folder
        )
        for step, values in run.steps:
            begun.log(values, step=step)
        begun.summary.update(run.results)
        begun.finish()
    return f"wandb sync {folder}/wandb/offline-run-*   # group {group}"


def _folder_name(label: str) -> str:
    """One folder, below the comparison's: a label holds words of records."""
    return re.sub(r"[^\w .=+,-]", "_", label).strip(". ")[:200] or "run"


def _last_step(run: TrackedRun) -> int:
    return run.steps[-1][0] if run.steps else run.first_step


def _plain(value: Any) -> str | float | bool:
    """TensorBoard's settings are numbers and text."""
    return value if isinstance(value, bool | int | float | str) else "-" if value is None else str(value)


TRACKERS: dict[str, Callable[[list[TrackedRun], Path, str], str]] = {
    "trackio": _to_trackio,
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
}
