"""All panels of a report, in the order of a page."""

from pathlib import Path

from slm_toolkit.record.memory_timeline import TIMELINE_FILE, read_segments
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.charts import figures
from slm_toolkit.report.charts import memory as memory_figures
from slm_toolkit.report.charts.figures import Panel
from slm_toolkit.report.recorded_estimate import estimate_of
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.memory import MemoryPicture, memory_picture


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
    panels = [
        figures.speed_panel(rows),
        memory_figures.parts_panel(rows, estimates),
        figures.loss_panel(rows),
        memory_figures.timeline_panel(rows, pictures_of(rows, problems=problems)),
    ]
    return [panel for panel in panels if panel is not None]


def pictures_of(rows: dict[str, Row], *, problems: list[str]) -> dict[str, MemoryPicture]:
    """Return the memory picture of each labelled row whose allocations were followed."""
    found = {}
    for label, row in rows.items():
        if row.memory_at_peak is not None:
            path = Path(row.record).with_name(TIMELINE_FILE)
            try:
                segments = read_segments(path) if path.is_file() else []
            except ValueError as error:
                problems.append(str(error).splitlines()[0])
                segments = []
            found[label] = memory_picture(row.memory_at_peak, segments)
    return found
