"""Show estimates as a table; for a single estimate, also the parts of its peak and of its step."""

from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import COLUMN_TITLES, FIRST_COLUMNS, FLAGS, RunConfig
from slm_toolkit.predict.changes_that_fit import MOST_CHANGES
from slm_toolkit.predict.estimate import Change, Estimate
from slm_toolkit.predict.memory.machine import COVERAGE, STATE, SURE
from slm_toolkit.report.tables.fitted import (
    DASH,
    Column,
    Heading,
    columns_that_fit,
    dollars,
    filled,
    gib,
    left_out_note,
    milliseconds,
    number,
    percent,
    rate,
    setting,
    table_of,
)

_VERDICT_STYLE = {"fits": "green", "may fit": "yellow", "unlikely to fit": "yellow", "does not fit": "red"}
FLAGS_SHOWN = tuple(name for name in Estimate.FIELDS if name in FLAGS and FLAGS[name].heading)
_TITLES = {"model": "model", "gpu": "GPU", "num_gpus": "GPUs"}
_TITLES |= {name: COLUMN_TITLES[name] for name in dict.fromkeys((*FIRST_COLUMNS, *FLAGS_SHOWN))}
"title of a column if rows differ in this setting; otherwise the heading shows it once"
_HEADINGS = {
    **{name: FLAGS[name].heading for name in FLAGS_SHOWN},
    **{"gpu": "{}", "num_gpus": "GPUs: {}", "per_device_train_batch_size": "batch {} per GPU"},
}
_ABOVE_IF_DEFAULT = (
    "numerics",
    "seq_len",
    "per_device_train_batch_size",
    "attn_implementation",
    "optim",
    "lora_r",
)


def estimate_table(rows: list[Estimate], *, width: int, largest_batch: bool = False) -> RenderableType:
    """Make the table with its heading and notes. Print it with `crop=False`."""
    columns, dropped = columns_that_fit(_columns(rows, largest_batch=largest_batch), width=width)
    parts = parts_tables(rows[0]) if len(rows) == 1 else []
    return Group(
        _heading(rows, largest_batch),
        table_of(columns),
        *_changes(rows),
        *parts,
        *_notes(rows, columns, dropped),
    )


def _changes(rows: list[Estimate]) -> list[Text]:
    """Return a line for the rows that don't fit and share their smallest changes: those, with their cost."""
    differing = [name for name in _TITLES if differs(rows, name)]
    names_by_ways: dict[str, list[str]] = {}
    for row in rows:
        if row.changes_that_fit is not None:
            ways = "; or ".join(map(_change, row.changes_that_fit))
            settings = [f"{_TITLES[name]} {setting(getattr(row, name))}" for name in differing]
            names_by_ways.setdefault(ways, []).append(" ".join([row.strategy, *settings]))
    lines = []
    for ways, names in names_by_ways.items():
        would = f"; this would: {ways}" if ways else f", and no {MOST_CHANGES} changes are enough"
        lines.append(f"{', '.join(names)} do{'es' * (len(names) == 1)} not fit{would}")
    num_left = sum(row.fits is False and row.changes_that_fit is None for row in rows)
    lines += [f"{num_left} more rows don't fit"] * bool(num_left)
    return [Text(line) for line in lines]


def _change(change: Change) -> str:
    """Return `batch 4 instead of 8 (3% slower per GPU)`; of offload also the RAM that it needs."""
    cost = "speed unknown" if change.speedup is None else f"{change.speedup - 1:+.0%} tokens/s per GPU"
    if change.host_bytes_per_node is not None:
        cost += f"; {gib(change.host_bytes_per_node)} GiB of RAM per node"
    return f"{change.change} ({cost})"


def parts_tables(row: Estimate) -> list[RenderableType]:
    """Show the parts of one estimate's memory and of its step."""
    return [
        table_of(
            [
                Column(title, [name.replace("_", " ") for name, value in parts.items() if value > 0]),
                Column(unit, [text(value) for value in parts.values() if value > 0]),
            ]
        )
        for title, unit, parts, text in (
            ("part", "GiB", row.parts, number("{:.3f}", 2**-30)),
            ("part of a step", "ms", row.parts_seconds, milliseconds),
        )
        if parts
    ]


def _columns(rows: list[Estimate], *, largest_batch: bool) -> list[Column]:
    settings = [
        Heading(title, name)
        for name, title in _TITLES.items()
        if differs(rows, name) or (largest_batch and title == "batch")
    ]
    return filled([*settings, *_COLUMNS], rows)


def same_settings(rows: list[Estimate], names: Iterable[str]) -> str:
    """Return the settings that all rows share, without defaults that need no words."""
    return ", ".join(
        _HEADINGS[name].format(value)
        for name in names
        if not differs(rows, name)
        and (value := getattr(rows[0], name)) is not None
        and (name in _ABOVE_IF_DEFAULT or value != getattr(RunConfig, name, None))
    )


def _heading(rows: list[Estimate], largest_batch: bool) -> Text:
    names = [name for name, title in _TITLES.items() if not (largest_batch and title == "batch")]
    same = same_settings(rows, names)
    as_trained_by = f", as {rows[0].like} trains" if rows[0].like else ""
    return Text(f"estimated: {same}{as_trained_by}", style="bold")


def _notes(rows: list[Estimate], columns: list[Column], dropped: list[str]) -> list[Text]:
    """Return what limits the figures, and what would change the decision."""
    caveat = "closed forms, nothing ran"
    with_time = [row for row in rows if row.gpu and row.step_seconds]
    if timed := [row for row in with_time if not row.parts_seconds["offload"]]:
        slower = 1 - min(row.step_seconds / row.step_high_seconds for row in timed)
        faster = max(row.step_seconds / row.step_low_seconds for row in timed) - 1
        caveat += f"; real tokens/s are likely {slower:.0%} lower to {faster:.0%} higher"
    notes = [caveat, *(column.note for column in columns if column.note)]
    if len(timed) < len(with_time):
        notes.append(
            "nobody measured your PCIe, RAM and disks, which offload waits for: --json has its range, "
            "step_low_seconds to step_high_seconds"
        )
    prices = ((row.gpu, row.usd_per_gpu_hour, row.price_source) for row in rows if row.gpu)
    for gpu, usd, source in dict.fromkeys(prices):
        known = usd is not None and f"${usd:.2f} per GPU-hour, {source}"
        notes.append(f"{gpu}: {known or 'no known price: set one with --prices'}")
    if any(row.gpu and row.tokens_per_second is None for row in rows):
        notes.append("no tokens/s across nodes with an unknown network: set --network")
    notes += [left_out_note(dropped)] * bool(dropped)
    return [Text(note, style="dim") for note in notes]


def differs(rows: list[Estimate], name: str) -> bool:
    return len({getattr(row, name) for row in rows}) > 1


def _fits(row: Estimate) -> str:
    """Return the verdict in few letters with its probability, such as `may fit 71%`."""
    if row.verdict is None:
        return DASH
    if row.fit_probability < 0.01:
        return "does not fit"
    words = row.verdict if row.fits else "unlikely"
    percentage = f"{row.fit_probability:.0%}" if row.fit_probability <= 0.99 else ">99%"
    return f"{words} {percentage}" + "\nnearly full" * row.is_nearly_full


def _parts(*names: str) -> Callable[[Estimate], int]:
    return lambda row: sum(row.parts[name] for name in names)


_COLUMNS = (
    Heading(
        "batch with\nmargin",
        "batch_with_margin",
        note=f"batch: the largest that fits or may fit; with margin: with a probability of {SURE:.0%}",
    ),
    Heading("strategy", "strategy"),
    Heading("peak GiB\nallocated", "peak_allocated_bytes", gib),
    Heading(
        "reserved\nGiB",
        lambda row: f"{gib(row.peak_reserved_low_bytes)} to {gib(row.peak_reserved_high_bytes)}",
        drop_order=9,
        note=f"reserved: a range that holds {COVERAGE:.0%} of other people's runs",
    ),
    Heading("peak at", "peak_instant", drop_order=8),
    Heading("training\nstate", _parts(*STATE), gib, 6),
    Heading("activations", _parts("activations"), gib, 5),
    Heading("logits\nand loss", _parts("logits_and_loss"), gib, 4),
    Heading("gathered", _parts("gathered_parameters"), gib, 2),
    Heading(
        "fits",
        _fits,
        style=lambda row: _VERDICT_STYLE.get(row.verdict, ""),
        note="fits: the probability; nearly full: PyTorch's allocator retries, which is slow",
    ),
    Heading("host GiB\nper node", "host_bytes_per_node", gib, 7),
    Heading(
        "DeepSpeed's\nestimate GiB",
        lambda row: None if row.deepspeed_stands_in else row.deepspeed_bytes,
        gib,
        10,
        note="DeepSpeed's estimate: model states only, no activations",
    ),
    Heading("tokens/s\nper GPU", "tokens_per_second_per_gpu", rate, 14),
    Heading("MFU", "mfu", percent, 11),
    Heading("bound by", lambda row: row.bottleneck and row.bottleneck.replace("_", " "), drop_order=12),
    Heading("$ per 1M\ntokens", "usd_per_million_tokens", dollars, 13),
)
"the columns after those of settings that differ: to add one, add an entry"
