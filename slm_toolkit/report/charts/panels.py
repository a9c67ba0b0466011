"""All panels of a report, in the order of a page."""

from pathlib import Path

from slm_toolkit.record.memory_timeline import TIMELINE_FILE, Segment, read_segments
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.charts import figures
from slm_toolkit.report.charts import memory as memory_figures
from slm_toolkit.report.charts.figures import Panel
from slm_toolkit.report.recorded_estimate import estimate_of
from slm_toolkit.report.rows import Row


def panels_of(
    records: list[tuple[Path, RunRecord]], rows: dict[str, Row], *, problems: list[str]
) -> list[Panel]:
    """Return all panels that apply to these labelled rows.

    `problems` takes a line for each damaged memory timeline.
    """
    by_path = {str(path): record for path, record in records}
    estimates = {
        label: made for label, row in rows.items() if (made := estimate_of(by_path[row.record])) is not None
    }
    return [
        figures.speed_panel(rows),
        memory_figures.parts_panel(rows, estimates),
        figures.loss_panel(rows),
        memory_figures.timeline_panel(_timelines(rows, problems=problems)),
    ]


def _timelines(rows: dict[str, Row], *, problems: list[str]) -> dict[str, list[Segment]]:
    """Return the segments of each labelled row with a timeline next to its record."""
    found = {}
    for label, row in rows.items():
        path = Path(row.record).with_name(TIMELINE_FILE)
        if row.memory_at_peak is not None and path.is_file():
            try:
                found[label] = read_segments(path)
            except ValueError as error:
                problems.append(str(error).splitlines()[0])
    return {label: segments for label, segments in found.items() if segments}
