"""The settings in which the rows of a report differ, and the rows' labels made of them."""

from collections import Counter
from pathlib import Path

from slm_toolkit.config.run_config import COLUMN_TITLES, FIRST_COLUMNS, FLAGS
from slm_toolkit.report.rows import Row

_FACTS = {
    "evidence": "evidence",
    "gpu": "GPU",
    "allocator": "allocator",
    "world_size": "ranks",
    "num_machines": "machines",
}
_TITLES = COLUMN_TITLES | _FACTS
"title of a column by the flag or figure of the row that it shows"
_SEEN_OF_SCRIPTS = ("seq_len", "per_device_train_batch_size")
"flags whose values are observed if a user's own script did the run: they follow from the script's arguments"


def value_of(row: Row, name: str) -> object:
    """Return the value of a figure or of a flag."""
    if name == "gpu" and row.gpu is None and row.status == "ok" and not row.is_rehearsed:
        return "CPU"
    return getattr(row, name) if name in Row.FIELDS else row.asked.get(name)


def common(rows: list[Row], name: str) -> object:
    """Return the value that is common to all rows with a value; None if they differ."""
    if _differs(rows, name):
        return None
    return next((value for row in rows if (value := value_of(row, name)) is not None), None)


def varying(rows: list[Row]) -> dict[str, str]:
    """Return the title of each setting in which rows differ, by name; each becomes a column."""
    newer = {name: name.replace("_", " ") for row in rows for name in row.asked if name not in FLAGS}
    titles = _TITLES | newer
    names = dict.fromkeys(("model", *_FACTS, *FIRST_COLUMNS, *titles))
    found = {name: titles[name] for name in names if _differs(rows, name)}
    if newer.keys() & found.keys() and any(row.script for row in rows):
        found = {name: title for name, title in found.items() if name not in _SEEN_OF_SCRIPTS}
    if all(row.largest_batch == row.per_device_train_batch_size for row in rows):  # has its own column
        found.pop("per_device_train_batch_size", None)
    return found


def _differs(rows: list[Row], name: str) -> bool:
    return len({str(value) for row in rows if (value := value_of(row, name)) is not None}) > 1


def labelled(rows: list[Row]) -> dict[str, Row]:
    """Return the rows by unique labels: the strategy, and the settings of a grid in which rows differ."""
    of_scripts = any(row.script for row in rows)
    titles = {
        name: title
        for name, title in varying(rows).items()
        if (name in _FACTS or (FLAGS[name].grid if name in FLAGS else of_scripts)) and name != "num_machines"
    }

    def words(row: Row) -> list[str]:
        values = ((name, value_of(row, name)) for name in titles)
        return [
            str(value) if name in ("model", "numerics", "evidence") else f"{titles[name]}={value}"
            for name, value in values
            if value is not None
        ]

    labels = [" ".join([row.strategy, *words(row)]) for row in rows]
    count = Counter(labels)
    return {
        label if count[label] == 1 else f"{label} {Path(row.record).parent}": row
        for label, row in zip(labels, rows, strict=True)
    }
