"""Rows as a rich table; no figure is ever cut, narrow terminals get fewer columns."""

import re
from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.record import FP32_REFERENCE
from slm_toolkit.report.cells import (
    DASH,
    PARITY_COLUMNS,
    dollars,
    energy_column,
    estimate_column,
    estimated_rate_column,
    gib,
    interval,
    largest_batch_column,
    peak_columns,
    peak_place,
    rank,
    rate,
    setting,
)
from slm_toolkit.report.rows import Row
from slm_toolkit.report.widths import fix_width

_STATUS_STYLE = {"ok": "green", "oom": "yellow", "skipped": "yellow", "failed": "red", "timeout": "red"}
_SETTINGS = (  # shown as a column where rows differ in them, else once above the table
    ("model", "model"),
    ("evidence", "evidence"),
    ("gpu", "GPU"),
    ("world_size", "ranks"),
    ("numerics", "numerics"),
    ("seq_len", "seq"),
    ("per_device_train_batch_size", "batch"),
    ("gradient_accumulation_steps", "accum."),
    ("loss_kernel", "loss kernel"),
    ("norm_kernel", "norm kernel"),
    ("gradient_checkpointing", "checkpointing"),
    ("attn_implementation", "attention"),
    ("torch_compile", "compile"),
    ("optim", "optimizer"),
    ("seed", "seed"),
    ("learning_rate", "learning rate"),
    ("dataset", "dataset"),
    ("max_steps", "steps asked"),
)
_NO_SETTINGS = {  # change nothing of what a row shows, or are told elsewhere
    *("profile", "timing_warmup_steps", "save_steps", "eval_steps", "eval_batches", "epoch_multiple"),
    *("rehearse", "trace_memory"),
}
_SAID_ABOVE = {  # of flags that are the same in all rows; {}: their value
    "loss_kernel": ("hf", "loss {}"),
    "norm_kernel": ("hf", "norm {}"),
    "gradient_checkpointing": ("none", "checkpointing {}"),
    "torch_compile": (False, "compiled"),
}


def comparison_table(rows: list[Row], *, width: int) -> RenderableType:
    """The table with its heading and notes; columns beyond `width` are dropped, the least telling first.

    Print it with `crop=False`: on a terminal too narrow even for the rest, lines then wrap and lose nothing.
    """
    settings = [(name, title) for name, title in _settings(rows) if _differs(rows, name)]
    if all(row.largest_batch == row.per_device_train_batch_size for row in rows):  # a column of its own
        settings = [(name, title) for name, title in settings if name != "per_device_train_batch_size"]
    on_gpu = any(row.gpu for row in rows)
    marks = _marks(rows)
    gate = any(row.parity_reference == FP32_REFERENCE for row in rows)
    columns: list[
        tuple[str, Callable[[Row], str], int]
    ] = [  # title, cell, order in which columns are dropped
        *((title, lambda row, name=name: setting(_value(row, name)), 0) for name, title in settings),
        ("strategy", lambda row: row.strategy + marks.get(tuple(row.numerics_differences), ""), 0),
        ("status", lambda row: "unequal" if row.parity_holds is False else row.status, 0),
        *largest_batch_column(rows),
        ("rank", rank, 12),
        ("tokens/s", lambda row: rate(row.tokens_per_second), 0),
        ("interval", interval, 8),
        *estimated_rate_column(rows),
        (
            f"tokens/s\nper {'GPU' if on_gpu else 'process'}",
            lambda row: rate(row.tokens_per_second_per_gpu),
            2,
        ),
        ("MFU", lambda row: DASH if row.mfu is None else f"{row.mfu:.1%}", 5),
        *peak_columns(rows, on_gpu=on_gpu),
        *estimate_column(rows),
        *([("peak at", peak_place, 4)] if any(row.is_rehearsed for row in rows) else []),
        ("state\nGiB/rank", lambda row: gib(sum((row.state_bytes_per_rank or {}).values()) or None), 3),
        ("DeepSpeed's\nestimate GiB", lambda row: gib(row.deepspeed_bytes), 2),
        ("$ per 1M\ntokens", lambda row: dollars(row.usd_per_million_tokens), 9),
        *energy_column(rows),
        *(PARITY_COLUMNS if gate else ()),
        ("final\nloss", lambda row: DASH if row.final_loss is None else f"{row.final_loss:.4f}", 6),
    ]
    dropped: list[str] = []

    def says_something(column: tuple[str, Callable[[Row], str], int]) -> bool:
        return any(column[1](row) != DASH for row in rows)

    if all(row.is_rehearsed for row in rows):  # which are of one thing mostly, memory
        columns = [column for column in columns if says_something(column)]

    while (table := _build(rows, columns)).width > width and any(priority for *_, priority in columns):
        victim = min(
            (column for column in columns if column[2]),
            key=lambda column: (says_something(column), column[2]),
        )
        columns.remove(victim)
        dropped.append(victim[0].replace("\n", " "))
    return Group(_heading(rows, settings), table, *_notes(rows, dropped, marks))


def _build(rows: list[Row], columns: list[tuple[str, Callable[[Row], str], int]]) -> Table:
    table = Table(header_style="bold")
    for title, cell, _ in columns:
        numeric = all(cell(row)[:1] in f"0123456789${DASH}~±+" for row in rows)
        table.add_column(title, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        cells = [Text(cell(row)) for _, cell, _ in columns]
        status = [title for title, _, _ in columns].index("status")
        cells[status].stylize(_STATUS_STYLE[row.status])
        table.add_row(*cells, style="red" if row.parity_holds is False else None)
    return fix_width(table)


def _heading(rows: list[Row], settings: list[tuple[str, str]]) -> Text:
    varying = {name for name, _ in settings}
    row = rows[0]
    same = []
    if "model" not in varying:
        same.append(row.model)
    if any(row.is_rehearsed for row in rows):
        same += _rehearsed_ranks(rows, varying)
    elif "world_size" not in varying and (size := _common(rows, "world_size")) is not None:
        same.append(f"{size} x {row.gpu}" if row.gpu else f"{size} CPU process{'es' if size > 1 else ''}")
    if "numerics" not in varying:
        same.append(f"numerics {row.numerics}")
    if "seq_len" not in varying:
        same.append(f"sequence {row.seq_len}")
    if "per_device_train_batch_size" not in varying and row.largest_batch is None:
        same.append(f"batch {row.per_device_train_batch_size} per process")
    if "attn_implementation" not in varying and (kernel := _common(rows, "attn_implementation")):
        same.append(f"attention {kernel}")
    if "gradient_accumulation_steps" not in varying and row.gradient_accumulation_steps > 1:
        same.append(f"{row.gradient_accumulation_steps} micro-steps")
    for name, (default, words) in _SAID_ABOVE.items():
        if name not in varying and _value(row, name) not in (None, default):
            same.append(words.format(_value(row, name)))
    evidence = " and ".join(dict.fromkeys(row.evidence for row in rows))
    return Text(f"{evidence}: " + ", ".join(same), style="bold")


def _rehearsed_ranks(rows: list[Row], varying: set[str]) -> list[str]:
    """How many ranks, and what the rehearsals had instead."""
    size = _common(rows, "world_size")
    known = "world_size" not in varying and size is not None
    if "evidence" in varying:
        return [f"{size} ranks"] if known else []
    gpu = _common(rows, "gpu")
    ranks = f"of {size}" if known else "of the ranks below"
    return [f"rank 0 {ranks}, " + (f"alone on one {gpu}" if gpu else "traced without a GPU")]


def _notes(rows: list[Row], dropped: list[str], marks: dict[tuple[str, ...], str]) -> list[Text]:
    notes = [Text(f"{row.strategy}: {row.status}: {row.reason}", style="red") for row in rows if row.reason]
    for found, mark in marks.items():
        reference = next(row.numerics_reference for row in rows if tuple(row.numerics_differences) == found)
        notes.append(Text(f"{mark.strip()} not computed as {reference}: {', '.join(found)}", style="yellow"))
    if any(row.numerics_differences and row.rank is None and row.tokens_per_second for row in rows):
        notes.append(
            Text("rows with such a mark have no rank: --strict, or nobody to be ranked with", style="dim")
        )
    notes += _warnings(rows)
    if any(row.rank for row in rows) and "rank" not in dropped:
        scope = "within a model, sequence length and machine; = shares a rank, the intervals overlap"
        notes.append(Text(f"rank: by tokens/s per process, {scope}", style="dim"))
    if (most := max(row.num_launches for row in rows)) > 1:
        notes.append(Text(f"intervals: of up to {most} launches", style="dim"))
    if any(row.is_rehearsed for row in rows):
        notes.append(
            Text(
                "rehearsed: one process played rank 0, nothing was sent; what tensors take, without what "
                "CUDA, NCCL and the allocator add",
                style="dim",
            )
        )
    prices = sorted({row.price for row in rows if row.price})
    notes += [Text(f"price: {price}", style="dim") for price in prices]
    if not prices and any(row.status == "ok" and not row.is_rehearsed for row in rows):
        notes.append(Text("no price known for this hardware: --usd_per_gpu_hour gives one", style="dim"))
    if any(row.deepspeed_bytes for row in rows) and not any("DeepSpeed" in title for title in dropped):
        notes.append(
            Text("DeepSpeed's estimate: its own function; model states only, no activations", style="dim")
        )
    if any(row.largest_batch is not None for row in rows):
        more = "; or more: --max_batch ended the search"
        ended = any(row.largest_batch is not None and row.smallest_oom_batch is None for row in rows)
        said = "largest batch: sequences per process that ran; one more ran out of memory"
        notes.append(Text(said + more * ended, style="dim"))
    if any(row.estimated_peak_bytes for row in rows) and "estimated GiB" not in dropped:
        notes.append(
            Text("estimated: by closed forms; `slm report --errors` has their errors by part", style="dim")
        )
    if dropped:
        notes.append(Text(f"left out for want of width: {', '.join(dropped)} (--json has all)", style="dim"))
    return notes


def _warnings(rows: list[Row]) -> list[Text]:
    """Those that differ in numbers only are one line."""
    alike: dict[str, list[tuple[Row, str]]] = {}
    for row in rows:
        for warning in row.warnings:
            alike.setdefault(re.sub(r"[\d.]+", "", warning), []).append((row, warning))
    lines = []
    for found in alike.values():
        names = dict.fromkeys(row.strategy for row, _ in found)
        others = f" (and the like, {len(found)} times in {len(rows)} rows)" if len(found) > 1 else ""
        lines.append(Text(f"{', '.join(names)}: {max(text for _, text in found)}{others}", style="yellow"))
    return lines


def _common(rows: list[Row], name: str) -> object:
    """The value that all rows which have one share."""
    return next((getattr(row, name) for row in rows if getattr(row, name) is not None), None)


def _differs(rows: list[Row], name: str) -> bool:
    return len({str(_value(row, name)) for row in rows if _value(row, name) is not None}) > 1


def _settings(rows: list[Row]) -> list[tuple[str, str]]:
    """_SETTINGS, then every other flag that was asked."""
    known = {*(name for name, _ in _SETTINGS), *_NO_SETTINGS}
    asked = dict.fromkeys(name for row in rows for name in row.asked)
    return [*_SETTINGS, *((name, name.replace("_", " ")) for name in asked if name not in known)]


def _value(row: Row, name: str) -> object:
    return getattr(row, name) if hasattr(row, name) else row.asked.get(name)


def _marks(rows: list[Row]) -> dict[tuple[str, ...], str]:
    """A footnote mark for each way in which rows were computed otherwise than their reference."""
    ways = dict.fromkeys(tuple(row.numerics_differences) for row in rows if row.numerics_differences)
    return {way: f" [{number}]" for number, way in enumerate(ways, start=1)}
