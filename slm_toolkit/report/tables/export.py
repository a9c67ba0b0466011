"""Rows for other programs: CSV, Parquet, JSON, Markdown, LaTeX, SVG, and runs in experiment trackers."""

import contextlib
import csv
import io
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
from rich.console import Console

from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.columns import Column, columns_of
from slm_toolkit.report.tables.comparison import comparison_table, heading, notes
from slm_toolkit.report.tables.fitted import PIPE_WIDTH, columns_that_fit, table_width

_LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "`": r"\textasciigrave{}",
    "[": "{[}",  # after the \\ of the line before, it would be that line's height
    "]": "{]}",
    "*": "{*}",  # and this would forbid a page break there
    "±": r"$\pm$",
    "Δ": r"$\Delta$",
    "×": r"$\times$",
}


def json_rows(rows: list[Row]) -> list[dict[str, Any]]:
    """One object per row; `dataclasses.asdict` would copy each loss, which takes as long as all the rest."""
    return [dict(vars(row)) for row in rows]


def json_text(content: list[dict[str, Any]]) -> str:
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def csv_text(content: list[dict[str, Any]]) -> str:
    """The names and rows of `--json`; lists and objects are JSON text, unknown is an empty cell.

    Text that a spreadsheet would compute (=, +, -, @ at its beginning) gets an apostrophe before it.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(content[0])
    writer.writerows([_csv_cell(value) for value in row.values()] for row in content)
    return text.getvalue()


def write_parquet(content: list[dict[str, Any]], path: Path) -> None:
    """The names and rows of `--json`; lists stay lists, objects are JSON text, unknown is null."""
    import pyarrow
    from pyarrow import parquet

    hints = get_type_hints(Row)
    columns = {}
    for name in content[0]:
        kind = _arrow_type(hints.get(name, dict[str, Any]))
        values = [row[name] for row in content]
        if kind == pyarrow.string():
            values = [_as_text(value) for value in values]
        columns[name] = pyarrow.array(values, kind)
    parquet.write_table(pyarrow.table(columns), path)


def markdown_text(rows: list[Row]) -> str:
    """The table that `slm report` prints, all columns of it, between its heading and its notes."""
    columns = columns_of(rows)
    titles = [_markdown(column.title) for column in columns]
    rules = ["---:" if column.is_numeric else "---" for column in columns]
    cells = [[_markdown(cell) for cell in column.cells] for column in columns]
    lines = [f"| {' | '.join(line)} |" for line in (titles, rules, *zip(*cells, strict=True))]
    said = [f"- {_markdown(note.plain)}" for note in notes(rows, [])]
    return "\n".join([_markdown(heading(rows).plain), "", *lines, "", *said]) + "\n"


def latex_text(rows: list[Row]) -> str:
    """The same as a LaTeX table with booktabs' rules: the heading is its caption, empty columns would make it
    wider than a page."""
    columns = [column for column in columns_of(rows) if column.has_values]
    cells = [[_latex(cell) for cell in column.cells] for column in columns]
    lines = [f"{' & '.join(line)} \\\\" for line in zip(*cells, strict=True)]
    said = " \\\\\n".join(_latex(note.plain) for note in notes(rows, []))
    return f"""\
% needs \\usepackage{{booktabs}}
\\begin{{table}}
\\caption{{{_latex(heading(rows).plain)}}}
\\begin{{tabular}}{{{"".join("r" if column.is_numeric else "l" for column in columns)}}}
\\toprule
{" & ".join(_latex_title(column) for column in columns)} \\\\
\\midrule
{chr(10).join(lines)}
\\bottomrule
\\end{{tabular}}

{{\\footnotesize
{said}
}}
\\end{{table}}
"""


def svg_text(rows: list[Row]) -> str:
    """The printed table, its heading and its notes as an SVG picture."""
    columns, _ = columns_that_fit(columns_of(rows), width=PIPE_WIDTH)
    console = Console(record=True, file=io.StringIO(), width=table_width(columns), markup=False, emoji=False)
    console.print(comparison_table(rows, width=PIPE_WIDTH))
    return console.export_svg(title="slm report")


def _latex_title(column: Column) -> str:
    side = "r" if column.is_numeric else "l"
    lines = [_latex(line) for line in column.title.split("\n")]
    stacked = r" \\ ".join(lines)
    return rf"\shortstack[{side}]{{{stacked}}}" if len(lines) > 1 else stacked


def _csv_cell(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return _as_text(value) if isinstance(value, bool | list | dict) else value


def _as_text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value).decode()


def _arrow_type(hint: Any) -> Any:
    """Of `list[float | None]` a list of doubles; of an object the text that it becomes."""
    import pyarrow

    (kind,) = [kind for kind in get_args(hint) if kind is not type(None)] if _is_union(hint) else [hint]
    if get_origin(kind) is list:
        return pyarrow.list_(_arrow_type(get_args(kind)[0]))
    known = {int: pyarrow.int64(), float: pyarrow.float64(), bool: pyarrow.bool_()}
    return known.get(kind, pyarrow.string())


def _is_union(hint: Any) -> bool:
    return type(None) in get_args(hint)


def _markdown(text: str) -> str:
    """GitHub's dialect: an underscore inside a word is none of emphasis, and stays readable."""
    text = re.sub(r"([\\`*|<>\[\]~&$])", r"\\\1", text)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text).replace("\n", " ")


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text.replace("\n", " "))
    return re.sub("-(?=-)", "-{}", escaped)  # two hyphens would become one dash


# A comparison as runs in trackio, TensorBoard or wandb: one for each row, with the names of `--json`.

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
