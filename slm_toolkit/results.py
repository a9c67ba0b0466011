"""What the verbs of `slm` compute: typed results that print as tables, export, and show in notebooks.

The import loads neither torch nor rich: each function loads what it needs.
"""

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import pandas
    from rich.console import Console, RenderableType

    from slm_toolkit.predict.estimate import Estimate
    from slm_toolkit.recommend.job import GpuOffer
    from slm_toolkit.recommend.plans import Plan
    from slm_toolkit.record.run_record import RunRecord
    from slm_toolkit.report.rows import Row

Item = TypeVar("Item")
_TEXT_WIDTH = 160
"columns of a table as text"
_NOTEBOOK_WIDTH = 120
"columns of a table in a notebook, whose cells are about so wide"


def read_records(paths: str | Path | Sequence[str | Path] = "runs") -> "Records":
    """Read all record.json files in folders, at any depth, and files; in the order of a report.

    Raises ValueError for a path that does not exist, and if there is no record at all.
    """
    from slm_toolkit.record.files import find_records
    from slm_toolkit.record.run_record import RECORD_FILE
    from slm_toolkit.report.rows import report_order

    folders = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    found, problems = find_records(folders)
    if not found:
        nothing = f"no {RECORD_FILE} under {folders[0]}\nhint: `slm compare` writes records"
        raise ValueError(problems[0] if problems else nothing)
    return Records(sorted(found, key=report_order), problems)


class _Result(Sequence[Item]):
    """A sequence of rows that shows as its table: `print(result)`, rich consoles and notebooks."""

    rows: list[Item]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        return self.rows[index]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {len(self)} rows>"

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the objects that the verb prints with --json."""
        return [row.as_json() for row in self.rows]

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a line for each row, with the names of `to_dicts`."""
        import pandas

        return pandas.DataFrame(self.to_dicts())

    def table(self, *, width: int = _TEXT_WIDTH) -> "RenderableType":
        """Return what the verb prints, as a rich renderable that fits `width` columns."""
        raise NotImplementedError

    def __rich_console__(self, console: Any, options: Any) -> Iterator["RenderableType"]:
        yield self.table(width=options.max_width)

    def __str__(self) -> str:
        return self._printed(_TEXT_WIDTH).export_text().rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the table with rich's colours; a notebook scrolls what is wider than its cell."""
        style = "white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace;font-size:12px"
        code = f'<pre style="{style}">{{code}}</pre>'
        return self._printed(_NOTEBOOK_WIDTH).export_html(inline_styles=True, code_format=code)

    def _printed(self, width: int) -> "Console":
        """Print the table to a console that records it."""
        from rich.console import Console

        console = Console(file=io.StringIO(), width=width, record=True, force_jupyter=False)
        console.print(self.table(width=width), crop=False)
        return console


@dataclass(frozen=True, repr=False)
class Estimates(_Result["Estimate"]):
    """Estimates of a grid, in its order."""

    rows: list["Estimate"]
    notes: list[str]
    "sentences on what the estimates do not follow, and on strategies that were left out"
    found_largest_batch: bool = False

    def table(self, *, width: int = _TEXT_WIDTH) -> "RenderableType":
        """Return the table of `slm estimate` as a rich renderable; print it with `crop=False`."""
        from slm_toolkit.report.tables.estimate import estimate_table

        return estimate_table(self.rows, width=width, largest_batch=self.found_largest_batch)


@dataclass(frozen=True, repr=False)
class Recommendation(_Result["Plan"]):
    """Plans for a whole training, the best first."""

    plans: list["Plan"]
    "empty: none is within the limits"
    considered: list["Plan"]
    "all that fit the GPUs"
    left_out: list[str]
    "what was not considered, as sentences with the reason"
    notes: list[str]
    offers: list["GpuOffer"]
    objective: str
    deadline_hours: float | None = None
    budget_usd: float | None = None

    @property
    def rows(self) -> list["Plan"]:
        return self.plans

    @property
    def unpriced(self) -> list[str]:
        """Names of offered GPUs without a known price."""
        names = (offer.gpu.name for offer in self.offers if offer.deployment.price is None)
        return list(dict.fromkeys(names))

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the objects of `slm recommend --json`."""
        from slm_toolkit.recommend.plans import as_json

        return [as_json(plan) for plan in self.plans]

    def table(self, *, width: int = _TEXT_WIDTH, top: int = 10) -> "RenderableType":
        """Return what `slm recommend` prints, with the first `top` rows; print it with `crop=False`."""
        from slm_toolkit.recommend.plan_table import nothing_found, plan_report

        if not self.plans:
            limits = {"deadline_hours": self.deadline_hours, "budget_usd": self.budget_usd}
            return nothing_found(self.considered, **limits)
        return plan_report(self.plans, top=top, objective=self.objective, width=width)

    def write(self, folder: str | Path) -> list[Path]:
        """Write the first plan's YAML and launch script; return the files.

        Raises ValueError if there is no plan, and for a folder that can't be used.
        """
        from slm_toolkit.recommend.launch_files import write_launch

        if not self.plans:
            raise ValueError("there is no plan to write\nhint: table() says what comes nearest")
        return write_launch(self.plans[0], Path(folder))


@dataclass(frozen=True, repr=False)
class Records(Sequence["RunRecord"]):
    """Records of runs with their files, in the order of a report."""

    pairs: list[tuple[Path, "RunRecord"]]
    problems: list[str] = field(default_factory=list)
    "a sentence for each file that could not be read"

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> "RunRecord":
        return self.pairs[index][1]


@dataclass(frozen=True, repr=False)
class Report(_Result["Row"]):
    """Ranked rows of recorded runs. Each row's fields are the keys of `slm report --json`."""

    rows: list["Row"]
    records: Records
    problems: list[str] = field(default_factory=list)
    "a sentence for each record that could not be read or shown"

    def to_markdown(self) -> str:
        from slm_toolkit.report.tables.export import markdown_text

        return markdown_text(self.rows)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return one HTML page with the table and the charts, which fetches nothing; write it to `path`."""
        from slm_toolkit.report.charts.html_page import html_page

        text = html_page(self.rows, left_out=[f"left out: {line}" for line in self.problems])
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    def table(self, *, width: int = _TEXT_WIDTH) -> "RenderableType":
        """Return the tables and notes of `slm report` as a rich renderable; print it with `crop=False`."""
        from rich.console import Group

        from slm_toolkit.report.tables.comparison import failed_references, sections

        unchecked = failed_references(self.records.pairs)
        return Group(*sections(self.rows, width=width, unchecked=unchecked))
