"""Export rows to other programs: CSV, JSON, Markdown, SVG, and experiment trackers."""

import contextlib
import csv
import html
import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.rows import Row, labelled
from slm_toolkit.report.tables.columns import columns_of
from slm_toolkit.report.tables.comparison import (
    commands_of,
    comparison_table,
    heading,
    notes,
    parity_notes,
    provenance,
)
from slm_toolkit.report.tables.fitted import PIPE_WIDTH, columns_that_fit, table_width
from slm_toolkit.report.verdict import verdict


def json_rows(rows: list[Row]) -> list[dict[str, Any]]:
    """Return one object per row; `dataclasses.asdict` would copy each loss, which doubles the time."""
    return [dict(vars(row)) for row in rows]


def json_text(content: list[dict[str, Any]]) -> str:
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def csv_text(content: list[dict[str, Any]]) -> str:
    """Return the names and rows of `--json` as CSV: lists and objects as JSON text, unknown as empty cells.

    Text that a spreadsheet would compute (it begins with =, +, - or @) gets a leading apostrophe.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(content[0])
    writer.writerows([_csv_cell(value) for value in row.values()] for row in content)
    return text.getvalue()


def markdown_text(rows: list[Row]) -> str:
    """Return the table of `slm report` with all columns, its heading, notes and commands, as Markdown."""
    columns = columns_of(rows)
    titles = [_markdown(column.title) for column in columns]
    rules = ["---:" if column.is_numeric else "---" for column in columns]
    cells = [[_markdown(cell) for cell in column.cells] for column in columns]
    lines = [f"| {' | '.join(line)} |" for line in (titles, rules, *zip(*cells, strict=True))]
    all_notes = (*notes(rows, []), *parity_notes(labelled(rows)))
    note_lines = [f"- {_markdown(note.plain)}" for note in all_notes]
    conclusion = [f"- **{_markdown(line)}**" for line in verdict(rows)]
    conclusion.append(f"- {_markdown(provenance(rows))}")
    parts = [_markdown(heading(rows).plain), "", *lines, "", *conclusion, *note_lines, *_commands(rows)]
    return "\n".join(parts) + "\n"


def _commands(rows: list[Row]) -> list[str]:
    """Return the launch commands as lines of Markdown, folded up."""
    text = commands_of(labelled(rows))
    if not text:
        return []
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)  # so that no command ends the block
    return ["", "<details><summary>commands</summary>", "", f"{fence}text", text, fence, "", "</details>"]


def svg_text(rows: list[Row]) -> str:
    """The printed table, its heading and its notes as an SVG picture."""
    columns, _ = columns_that_fit(columns_of(rows), width=PIPE_WIDTH)
    console = Console(record=True, file=io.StringIO(), width=table_width(columns), markup=False, emoji=False)
    console.print(comparison_table(rows, width=PIPE_WIDTH))
    return console.export_svg(title="slm report")


def _csv_cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return msgspec.json.encode(value).decode() if isinstance(value, bool | list | dict) else value


def _markdown(text: str) -> str:
    """Escape text for GitHub's Markdown; underscores inside words need no escape there.

    HTML is escaped by entities: mkdocs knows no backslash before < and &.
    """
    text = html.escape(re.sub(r"([\\`*|\[\]~$])", r"\\\1", text), quote=False)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text).replace("\n", " ")


# A comparison as runs in trackio, TensorBoard or wandb: one run per row, with the names of `--json`.

PROJECT = "slm_comparisons"
"project name in trackio and wandb; training reports its own runs to another project"
_SETTINGS = (  # together with the flags; all other numbers of a row are results
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
    """The data of one row for a tracker."""

    name: str
    settings: dict[str, Any]
    results: dict[str, float]
    curves: dict[str, list[float | None]]
    "losses, and the slowest rank's step_seconds, of each step of the first launch"
    first_step: int

    @property
    def steps(self) -> list[tuple[int, dict[str, float]]]:
        """Return each step's number, counted from 1, and its known values."""
        num_steps = max(map(len, self.curves.values()))
        steps = []
        for index in range(num_steps):
            values = {name: curve[index] for name, curve in self.curves.items() if index < len(curve)}
            known = {name: value for name, value in values.items() if value is not None}
            steps.append((self.first_step + index + 1, known))
        return steps


def tracked_run(name: str, row: Row, record: RunRecord) -> TrackedRun:
    """Return the data of a row for a tracker; `record` is the row's first launch."""
    settings = {**row.asked, **{name: getattr(row, name) for name in _SETTINGS}}
    results: dict[str, float] = {}
    for key, value in vars(row).items():
        parts = {f"{key}/{part}": number for part, number in value.items()} if isinstance(value, dict) else {}
        for full_name, number in (parts or {key: value}).items():
            if type(number) in (int, float) and key not in (*settings, "asked", "numerics_probed"):
                results[full_name] = number
    curves = {"losses": row.losses, "step_seconds": record.slowest_rank_seconds}
    return TrackedRun(name, settings, results, curves, record.first_step)


def check_installed(tracker: str) -> None:
    """Raise ValueError if the tracker's package is not installed."""
    if find_spec(tracker) is None:
        raise ValueError(f"--report_to {tracker}: {tracker} is not installed\nhint: pip install {tracker}")


def track(runs: list[TrackedRun], tracker: str, *, folder: Path, group: str) -> str:
    """Send all runs to `tracker`, and return a command that shows them. The tracker's output goes to stderr.

    Nothing leaves the machine: trackio has its own database, the others write below `folder`.
    """
    with contextlib.redirect_stdout(sys.stderr):
        return TRACKERS[tracker](runs, folder, group)


def _to_trackio(runs: list[TrackedRun], folder: Path, group: str) -> str:
    import trackio

    for run in runs:
        tracker_run = trackio.init(
            project=PROJECT,
            name=run.name,
            group=group,
            config=run.settings,
            embed=False,
            auto_log_gpu=False,  # it would log this machine's load now
            auto_log_cpu=False,
        )
        for step, values in run.steps:
            tracker_run.log(values, step=step)
        tracker_run.log(run.results, step=_last_step(run))
        trackio.finish()  # after run.finish() alone, trackio would finish and print the run again at exit
    return f"trackio show --project {PROJECT}   # group {group}"


def _to_tensorboard(runs: list[TrackedRun], folder: Path, group: str) -> str:
    from torch.utils.tensorboard import SummaryWriter

    comparison_folder = folder / group
    for run in runs:
        with SummaryWriter(comparison_folder / _folder_name(run.name)) as writer:
            for step, values in run.steps:
                for name, value in values.items():
                    writer.add_scalar(name, value, step)
            settings = {name: _plain(value) for name, value in run.settings.items()}
            writer.add_hparams(settings, run.results, run_name=".", global_step=_last_step(run))
    return f"tensorboard --logdir {comparison_folder}"


def _to_wandb(runs: list[TrackedRun], folder: Path, group: str) -> str:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        tracker_run = wandb.init(
            project=PROJECT, name=run.name, group=group, config=run.settings, mode="offline", dir=folder
        )
        for step, values in run.steps:
            tracker_run.log(values, step=step)
        tracker_run.summary.update(run.results)
        tracker_run.finish()
    return f"wandb sync {folder}/wandb/offline-run-*   # group {group}"


def _folder_name(label: str) -> str:
    """Return a safe name for a folder inside the comparison's: a label has text from records."""
    return re.sub(r"[^\w .=+,-]", "_", label).strip(". ")[:200] or "run"


def _last_step(run: TrackedRun) -> int:
    return run.steps[-1][0] if run.steps else run.first_step


def _plain(value: Any) -> str | float | bool:
    """Convert a setting for TensorBoard, which accepts only numbers and text."""
    return value if isinstance(value, bool | int | float | str) else "-" if value is None else str(value)


TRACKERS: dict[str, Callable[[list[TrackedRun], Path, str], str]] = {
    "trackio": _to_trackio,
    "tensorboard": _to_tensorboard,
    "wandb": _to_wandb,
}
