"""The report of runs, as `slm report` prints it: heading, table, verdict and notes."""

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.report.labels import common, labelled, value_of, varying
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.fitted import (
    DASH,
    Column,
    Heading,
    columns_that_fit,
    dollars,
    filled,
    gib,
    left_out_note,
    loss,
    number,
    rate,
    setting,
    table_of,
)
from slm_toolkit.report.tables.profiled import anatomy_table, peak_table
from slm_toolkit.report.verdict import verdict

_ALWAYS_ABOVE = ("numerics", "seq_len", "per_device_train_batch_size", "attn_implementation")
"settings that the heading shows even if they have the default"


def sections(rows: list[Row], *, width: int, unchecked: Sequence[str] = ()) -> Iterator[RenderableType]:
    """Yield what stands one below the other. Print each with `crop=False`.

    `width`: columns of the console. `unchecked`: red lines on checks that could not be made.
    """
    named = labelled(rows)
    yield comparison_table(rows, width=width)
    yield from (Text(line, style="red") for line in unchecked)
    yield from parity_notes(named)
    if len(rows) == 1 and rows[0].memory_at_peak is not None:
        title = f"memory of {rows[0].strategy}, {rows[0].evidence} on rank 0 of {rows[0].world_size}"
        yield peak_table(title, rows[0].memory_at_peak)
    if anatomies := {label: Anatomy(**row.anatomy) for label, row in named.items() if row.anatomy}:
        yield anatomy_table(anatomies, width=width)


def failed_references(records: list[tuple[Path, RunRecord]]) -> list[str]:
    """Return a line for each single-process reference of `--parity` that did not end ok."""
    return [
        f"no parity check: the single-process {record.config.numerics} reference ended "
        f"{record.status}: {record.reason}"
        for _, record in records
        if record.is_parity_reference and record.status != "ok"
    ]


def comparison_table(rows: list[Row], *, width: int) -> RenderableType:
    """Make the table with its heading, verdict and notes. Print it with `crop=False`."""
    columns, dropped = columns_that_fit(columns_of(rows), width=width)
    conclusion = [Text(line, style="bold") for line in verdict(rows)]
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
    if "world_size" in columns or size is None:
        return []
    unit = f"x {gpu}" if gpu else f"CPU process{'es' * (size != 1)}"
    if "gpu" in columns or any(row.is_rehearsed for row in rows):
        unit = f"rank{'s' * (size != 1)}"
    num_machines = 1 if "num_machines" in columns else common(rows, "num_machines") or 1
    return [f"{size} {unit}" + f" on {num_machines} machines" * (num_machines > 1)]


_VERSIONS = ("NVIDIA driver", "slm_toolkit", "torch", "accelerate", "deepspeed", "transformers")


def provenance(rows: list[Row]) -> str:
    """Return where and when the rows come from: machines, days, and the versions of driver and packages."""
    days = sorted({row.started_at[:10] for row in rows})
    parts = [", ".join(dict.fromkeys(row.gpu or row.cpu for row in rows))]
    parts.append(" to ".join(dict.fromkeys((days[0], days[-1]))))
    for name in _VERSIONS:
        if versions := dict.fromkeys(row.versions[name] for row in rows if name in row.versions):
            parts.append(f"{name} {' and '.join(versions)}")
    return "; ".join(parts)


def notes(rows: list[Row], columns: list[Column], dropped: Sequence[str] = ()) -> list[Text]:
    """Return the notes below the table with these columns; `dropped` has the titles of dropped columns."""
    reasons = dict.fromkeys(f"{row.strategy}: {row.status}: {row.reason}" for row in rows if row.reason)
    notes = [Text(reason, style="red") for reason in reasons]
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


def _warnings(rows: list[Row]) -> list[Text]:
    """Return the rows' warnings; warnings that differ only in numbers share a line."""
    groups: dict[str, dict[str, str]] = {}
    for row in rows:
        for warning in row.warnings:
            groups.setdefault(re.sub(r"[\d.]+", "", warning), {}).setdefault(row.strategy, warning)
    return [Text(f"{'; '.join(group)}: {max(group.values())}", style="yellow") for group in groups.values()]


def parity_notes(rows: dict[str, Row]) -> list[Text]:
    """Return a line for each reference with which parity holds, and a red line for each other row."""
    broken = [
        row.parity
        if " compute different things" in row.parity
        else f"{label} computes something else, {row.parity}"
        for label, row in rows.items()
        if row.parity_holds is False
    ]
    notes = [Text(line, style="red") for line in dict.fromkeys(broken)]
    held = {label: row for label, row in rows.items() if row.parity_holds}
    if held:
        label, worst = max(held.items(), key=lambda item: item[1].parity_max_loss_difference)
        others = f"; this is {label}, the largest difference of {len(held)} runs" * (len(held) > 1)
        notes.append(Text(f"parity holds {worst.parity}{others}"))
    if not notes and sum(not row.is_rehearsed for row in rows.values()) > 1:
        notes.append(Text("losses were not compared: no two strategies had the same flags and batches"))
    return notes


# The columns: titles, cells as text, and the order in which a narrow console drops them.

_STATUS_STYLE = {"ok": "green", "oom": "yellow", "failed": "red", "timeout": "red"}


def columns_of(rows: list[Row]) -> list[Column]:
    """Return all columns with values in these rows; settings that differ come first."""
    marks = marks_of(rows)
    settings = [
        Heading(title, lambda row, name=name: value_of(row, name)) for name, title in varying(rows).items()
    ]
    marked = Heading("strategy", lambda row: row.strategy + marks.get(tuple(row.numerics_differences), ""))
    return filled([*settings, marked, *_HEADINGS], rows)


def marks_of(rows: list[Row]) -> dict[tuple[str, ...], str]:
    """Return a footnote mark for each combination of differences from a reference's numerics."""
    combinations = dict.fromkeys(tuple(row.numerics_differences) for row in rows if row.numerics_differences)
    return {combination: f" [{number}]" for number, combination in enumerate(combinations, start=1)}


def _interval(row: Row) -> str:
    """Return both ends of the interval, relative to the median."""
    if row.interval is None:
        return DASH
    below, above = (end / row.tokens_per_second - 1 for end in row.interval)
    return f"±{above:.1%}" if abs(above + below) < 0.001 else f"{below:+.1%} {above:+.1%}"


_HEADINGS = (
    Heading("status", "state", style=lambda row: _STATUS_STYLE[row.status]),
    Heading(
        "largest\nbatch",
        lambda row: setting(row.largest_batch) + " or more" * row.is_open_ended,
        note="largest batch: sequences per process that ran; one more ran out of memory",
    ),
    Heading(
        "rank",
        lambda row: setting(row.rank) + "=" * bool(row.shares_rank),
        drop_order=12,
        note="rank: by tokens/s per process, on one kind of machine; =: not clearly different",
    ),
    Heading("tokens/s", "tokens_per_second", rate),
    Heading("interval", _interval, drop_order=8),
    Heading("estimated\ntokens/s", "estimated_tokens_per_second", rate, 7),
    Heading("tokens/s\nper GPU", lambda row: row.tokens_per_second_per_gpu if row.gpu else None, rate, 2),
    Heading("tokens/s\nper process", lambda row: None if row.gpu else row.tokens_per_second_per_gpu, rate, 2),
    Heading("MFU", "mfu", number("{:.1%}"), 5),
    # measured and rehearsed peaks have separate columns, because they must not be compared
    Heading("peak GiB", lambda row: None if row.is_rehearsed else row.peak_allocated_bytes, gib),
    Heading("peak GiB\n(process)", lambda row: row.peak_rss_bytes if row.is_on_cpu else None, gib),
    Heading(
        "peak GiB\nallocated on\nrank 0",
        lambda row: row.peak_allocated_bytes if row.is_rehearsed else None,
        gib,
        note="rehearsed: memory of tensors only, without the overhead of CUDA, NCCL and the allocator",
    ),
    Heading("estimated\nGiB", "estimated_peak_bytes", gib, 1),
    Heading(
        "peak at",
        lambda row: row.memory_at_peak and "{phase} {module}".format(**row.memory_at_peak).strip(),
        drop_order=4,
    ),
    Heading("state\nGiB/rank", "state_bytes", gib, 3),
    Heading(
        "DeepSpeed's\nestimate GiB",
        "deepspeed_bytes",
        gib,
        2,
        note="DeepSpeed's estimate: by its own function; model states only, no activations",
    ),
    Heading("$ per 1M\ntokens", "usd_per_million_tokens", dollars, 9),
    Heading("final\nloss", "final_loss", loss, 6),
)
"the columns: to add one, add an entry"
