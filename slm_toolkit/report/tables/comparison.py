"""The comparison of runs: a table with heading and notes, and a table of losses by dataset."""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from math import exp

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.report.labels import common, varying
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.columns import columns_of, marks_of
from slm_toolkit.report.tables.fitted import (
    DASH,
    Column,
    Heading,
    columns_that_fit,
    filled,
    left_out_note,
    loss,
    table_of,
)
from slm_toolkit.report.verdict import verdict

_ALWAYS_ABOVE = ("numerics", "seq_len", "per_device_train_batch_size", "attn_implementation")
"settings that the heading shows even if they have the default"


def comparison_table(rows: list[Row], *, width: int, all_rows: list[Row] | None = None) -> RenderableType:
    """Make the table with its heading, verdict and notes. Print it with `crop=False`.

    `all_rows`: the rows that the verdict is about, if the table shows only the first of them.
    """
    columns, dropped = columns_that_fit(columns_of(rows), width=width)
    conclusion = [Text(line, style="bold") for line in verdict(all_rows or rows)]
    table = table_of(columns, row_styles=list(map(_style, rows)))
    return Group(heading(rows), table, *conclusion, *notes(rows, columns, dropped))


def _style(row: Row) -> str | None:
    """Return red for a row that computes something else, bold for the fastest row."""
    return "red" if row.parity_holds is False else "bold" if row.rank == 1 else None


def heading(rows: list[Row]) -> Text:
    """Return a line with the evidence and the settings that all rows share."""
    columns = varying(rows)
    same = [] if "model" in columns else [rows[0].model]
    same += _ranks(rows, columns)
    for name in dict.fromkeys((*_ALWAYS_ABOVE, *FLAGS)):
        flag, value = FLAGS[name], common(rows, name)  # a failed run may not have recorded it
        is_special = name in _ALWAYS_ABOVE or value != getattr(RunConfig, name)
        if flag.heading and name not in ("model", *columns) and value is not None and is_special:
            same.append(flag.heading.format(value))
    evidence = " and ".join(dict.fromkeys(row.evidence for row in rows))
    return Text(f"{evidence}: " + ", ".join(same), style="bold")


def _ranks(rows: list[Row], columns: Collection[str]) -> list[str]:
    """Return a phrase with the number of ranks and their device; empty if rows differ in it."""
    size, gpu = common(rows, "world_size"), next((row.gpu for row in rows if row.gpu), None)
    is_same_size = "world_size" not in columns and size is not None
    if any(row.is_rehearsed for row in rows):
        if "evidence" in columns:
            return [f"{size} ranks"] * is_same_size
        ranks = f"of {size}" if is_same_size else "of the ranks below"
        return [f"rank 0 {ranks}, " + (f"alone on one {gpu}" if gpu else "traced without a GPU")]
    ranks = f"{size} x {gpu}" if gpu else f"{size} CPU process{'es' if size != 1 else ''}"
    if "gpu" in columns:
        ranks = f"{size} rank{'s' if size != 1 else ''}"
    num_machines = 1 if "num_machines" in columns else common(rows, "num_machines") or 1
    return [f"{ranks} on {num_machines} machines" if num_machines > 1 else ranks] * is_same_size


_VERSIONS = ("NVIDIA driver", "slm_toolkit", "torch", "accelerate", "deepspeed", "transformers")


def provenance(rows: list[Row]) -> str:
    """Return where and when the rows come from: machines, days, and the versions of driver and packages."""
    machines = dict.fromkeys(_machine(row) for row in rows)
    days = sorted({row.started_at[:10] for row in rows})
    parts = [", ".join(machines), " to ".join(dict.fromkeys((days[0], days[-1])))]
    for name in _VERSIONS:
        if versions := dict.fromkeys(row.versions[name] for row in rows if name in row.versions):
            parts.append(f"{name} {' and '.join(versions)}")
    return "; ".join(parts)


def commands_of(rows: dict[str, Row]) -> str:
    """Return the launch command of each labelled row below a comment with the label; empty without any."""
    commands = {label: row.command for label, row in rows.items() if row.command}
    return "\n".join(f"# {label}\n{command}" for label, command in commands.items())


def _machine(row: Row) -> str:
    cores = f" ({row.num_cores} cores)" if row.num_cores and not row.gpu else ""
    return f"{row.gpu or row.cpu}{cores}"


def notes(rows: list[Row], columns: list[Column], dropped: Sequence[str] = ()) -> list[Text]:
    """Return the notes below the table with these columns; `dropped` has the titles of dropped columns."""
    notes = _reasons(rows)
    for marked, mark in marks_of(rows).items():
        first = next(row for row in rows if tuple(row.numerics_differences) == marked)
        note = f"{mark.strip()} not computed as {first.numerics_reference}: {', '.join(marked)}"
        if first.numerics_alignments:
            note += f". To align: {'; '.join(first.numerics_alignments)}"
        notes.append(Text(note, style="yellow"))
    notes += _warnings(rows)
    explanations = [column.note for column in columns if column.note]
    prices = sorted({f"price: {row.price}" for row in rows if row.price})
    if not prices and any(row.gpu and row.status == "ok" and not row.is_rehearsed for row in rows):
        prices = ["no known price for this hardware: set one with --prices"]
    left_out = [left_out_note(dropped)] * bool(dropped)
    return notes + [Text(note, style="dim") for note in (*explanations, *prices, *left_out)]


def _reasons(rows: list[Row]) -> list[Text]:
    """Return why rows did not end ok; rows with the same reason share a line."""
    reasons = Counter(f"{row.strategy}: {row.status}: {row.reason}" for row in rows if row.reason)
    return [
        Text(f"{reason} ({count} rows)" if count > 1 else reason, style="red")
        for reason, count in reasons.items()
    ]


def _warnings(rows: list[Row]) -> list[Text]:
    """Return the rows' warnings; warnings that differ only in numbers share a line."""
    groups: dict[str, list[tuple[Row, str]]] = {}
    for row in rows:
        for warning in row.warnings:
            groups.setdefault(re.sub(r"[\d.]+", "", warning), []).append((row, warning))
    lines = []
    for group in groups.values():
        names = dict.fromkeys(row.strategy for row, _ in group)
        others = f" ({len(group)} similar warnings in {len(rows)} rows)" if len(group) > 1 else ""
        separator = "; " if any("," in name for name in names) else ", "  # "Hugging Face Trainer, ddp"
        worst = max(text for _, text in group)
        lines.append(Text(f"{separator.join(names)}: {worst}{others}", style="yellow"))
    return lines


def parity_notes(rows: dict[str, Row]) -> list[Text]:
    """Return a line for each reference with which parity holds, and a red line for each other row."""
    broken = [
        f"{label} computes something else, {row.parity}"
        if row.parity.startswith("against")
        else row.parity
        if " compute different things" in row.parity
        else f"{label}: {row.parity}"
        for label, row in rows.items()
        if row.parity_holds is False
    ]
    notes = [Text(line, style="red") for line in dict.fromkeys(broken)]
    for reference in sorted({row.parity_reference for row in rows.values() if row.parity_holds}):
        same_reference = [
            (label, row)
            for label, row in rows.items()
            if row.parity_holds and row.parity_reference == reference
        ]
        label, worst = max(same_reference, key=lambda item: item[1].parity_max_loss_difference)
        count = len(same_reference)
        others = f"; this is {label}, the largest difference of {count} runs" if count > 1 else ""
        notes.append(Text(f"parity holds {worst.parity}{others}"))
    is_known = any("not comparable" in warning for row in rows.values() for warning in row.warnings)
    if not notes and not is_known and sum(not row.is_rehearsed for row in rows.values()) > 1:
        flag = "" if any(row.script for row in rows.values()) else " (--parity K adds a reference)"
        notes.append(
            Text(f"losses were not compared: no two strategies had the same flags and batches{flag}")
        )
    return notes


# Losses of held-out sets, as a rich table below the comparison.


def has_several(row: Row) -> bool:
    """Return whether a run was evaluated on several datasets."""
    return len(row.final_eval_losses) > 1


def dataset_table(rows: dict[str, Row]) -> RenderableType:
    """Show the last held-out loss of each row's datasets; `rows` has them by label."""
    lines = [(label, *line) for label, row in rows.items() for line in row.final_eval_losses.items()]
    return Group(Text("losses by dataset", style="bold"), table_of(filled(_OF_DATASETS, lines)))


_OF_DATASETS = (
    Heading("run", lambda line: line[0], justify="left"),
    Heading("dataset", lambda line: line[1], justify="left"),
    Heading("held-out\nloss", lambda line: line[2], loss),
    Heading("held-out\nperplexity", lambda line: DASH if line[2] is None else f"{exp(min(line[2], 50)):.4g}"),
)
