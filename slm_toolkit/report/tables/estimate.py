"""Show estimates as a table; for a single estimate, also bars with the parts of its peak and of its step."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import COLUMN_TITLES, FIRST_COLUMNS, FLAGS, RunConfig
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.predict.changes_that_fit import MOST_CHANGES
from slm_toolkit.predict.deepspeed_estimator import ESTIMATOR_VERSION
from slm_toolkit.predict.estimate import LARGEST_BATCH_TRIED, Change, Estimate
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
    percent,
    rate,
    setting,
    table_of,
)

_BAR_WIDTH = 40
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
_DECIDES_BATCH = (
    *("seq_len", "gradient_checkpointing", "gradient_accumulation_steps", "kernels"),
    "pad_widths",
)
_MOST_RANGES = 3
"rows with offload whose range a note has"


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
            values = {name: getattr(row, name) for name in differing}
            if values.get("per_device_train_batch_size") == 0:  # with --largest_batch: not even 1 fits
                values["per_device_train_batch_size"] = 1
            settings = [f"{_TITLES[name]} {setting(value)}" for name, value in values.items()]
            names_by_ways.setdefault(ways, []).append(" ".join([row.strategy, *settings]))
    lines = []
    for ways, names in names_by_ways.items():
        do = "does" if len(names) == 1 else "do"
        would = f"; this would: {ways}" if ways else f", and no {MOST_CHANGES} changes are enough"
        lines.append(f"{', '.join(names)} {do} not fit{would}")
    num_left = sum(row.fits is False and row.changes_that_fit is None for row in rows)
    if num_left:
        lines.append(f"{num_left} more rows don't fit: estimate one alone to see the changes that do")
    return [Text(line) for line in lines]


def _change(change: Change) -> str:
    """Return `batch 4 instead of 8 (3% slower)`; of offload also the RAM that it needs."""
    if change.host_bytes_per_node is not None:
        cost = "slower, by an unknown amount" if change.speedup is None else _cost(change.speedup)
        return f"{change.change} ({cost}; {gib(change.host_bytes_per_node)} GiB of RAM per node)"
    return f"{change.change} ({'speed unknown' if change.speedup is None else _cost(change.speedup)})"


def _cost(speedup: float) -> str:
    if abs(speedup - 1) < 0.005:
        return "as fast"
    return f"{abs(speedup - 1):.0%} {'faster' if speedup > 1 else 'slower'} per GPU"


def parts_tables(row: Estimate) -> list[RenderableType]:
    """Show the parts of one estimate's memory and of its step; what is not allocated is dim."""
    sizes = {name: size / 2**30 for name, size in row.parts.items() if size}
    outside = ("allocator_slack", "cuda_context")
    styles = ["dim" if name in outside else None for name in sizes]
    tables = [
        _bars("part", "GiB", sizes, form="{:.3f}", styles=styles),
        Text("allocator slack and CUDA context are not part of allocated", style="dim"),
    ]
    if row.parts_seconds is not None:
        times = {name: 1e3 * seconds for name, seconds in row.parts_seconds.items() if seconds > 0}
        tables.append(_bars("part of a step", "ms", times, form="{:.1f}"))
    return tables


def _bars(
    title: str, unit: str, values: dict[str, float], *, form: str, styles: Sequence[str | None] = ()
) -> RenderableType:
    """Show values, and bars of a length relative to the largest."""
    longest = max(values.values())
    columns = [
        Column(title, [name.replace("_", " ") for name in values]),
        Column(unit, list(map(form.format, values.values()))),
        Column("", ["█" * max(1, round(_BAR_WIDTH * value / longest)) for value in values.values()]),
    ]
    return table_of(columns, row_styles=styles)


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
    def is_any(has: Callable[[Estimate], object]) -> bool:
        return any(map(has, rows))

    gpus = [gpu_of_name(name) for name in _distinct(row.gpu for row in rows)]
    notes = [
        (
            True,
            "closed forms, nothing ran; peaks are of one step on the GPU with the most, parts at that "
            "instant",
        ),
        *((column.note, column.note) for column in columns),
        (is_any(lambda row: row.batch_with_margin is not None), _assumed(rows)),
        *((gpu, f"{gpu.name} has {gib(gpu.memory_bytes)} GiB; source: {gpu.memory_source}") for gpu in gpus),
        (
            is_any(lambda row: row.is_nearly_full),
            "nearly full: PyTorch's allocator frees unused blocks and retries, so steps are slower, at least "
            "the first ones",
        ),
        *_speed_notes(rows),
        *_adapter_notes(rows),
        (dropped, left_out_note(dropped)),
    ]
    return [Text(note, style="dim") for is_due, note in notes if is_due]


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Return the different known values, in their order."""
    return list(dict.fromkeys(value for value in values if value))


def _assumed(rows: list[Estimate]) -> str:
    """Name the flags, equal in all rows, that decide how many sequences fit."""
    values = {name: getattr(rows[0], name) for name in _DECIDES_BATCH if not differs(rows, name)}
    flags = " ".join(f"--{name} {str(value).lower()}" for name, value in values.items())
    return f"the batches are for {flags}: other values change them"


def _adapter_notes(rows: list[Estimate]) -> Iterator[tuple[object, str]]:
    adapted = [row for row in rows if row.adapted_modules]
    for peft in _distinct(row.peft for row in adapted):
        counts = {row.num_trainable_params for row in adapted if row.peft == peft}
        trained = " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))
        modules = ", ".join(next(row for row in adapted if row.peft == peft).adapted_modules)
        yield True, f"{peft}: {trained} trained parameters in adapters of {modules}"


def _speed_notes(rows: list[Estimate]) -> Iterator[tuple[object, str]]:
    rows = [row for row in rows if row.gpu]
    with_time = [row for row in rows if row.step_seconds]
    offloading = [row for row in with_time if row.parts_seconds["offload"]]
    if timed := [row for row in with_time if row not in offloading]:
        slower = 1 - min(row.step_seconds / row.step_high_seconds for row in timed)
        faster = max(row.step_seconds / row.step_low_seconds for row in timed) - 1
        calibrated = " except on calibrated GPUs" * any(row.calibration for row in rows)
        yield (
            True,
            f"real tokens/s are likely {slower:.0%} lower to {faster:.0%} higher: fitted to published runs, "
            f"no kernel was timed{calibrated}",
        )
    ranges = ", ".join(
        f"{row.strategy} {row.step_low_seconds:.2g} to {row.step_high_seconds:.2g} s a step"
        for row in offloading[:_MOST_RANGES]
    )
    yield (
        offloading,
        f"offload, likely: {ranges}; its time is bytes over PCIe, host memory and disks, whose rates "
        "differ between hosts: none was measured",
    )
    for name in _distinct(row.gpu for row in with_time if row.depends_on_pcie):
        yield (
            True,
            f"{name}: PCIe links the GPUs of a node; the range includes that it is several times slower than "
            "its data sheet, as between CPU sockets. slm_toolkit.run.network_probe measures yours",
        )
    for gpu, calibration in _distinct((row.gpu, row.calibration) for row in rows if row.calibration):
        yield True, f"{gpu}: calibrated, {calibration}"
    for name, usd, source in _distinct((row.gpu, row.usd_per_gpu_hour, row.price_source) for row in rows):
        price = (
            "no known price: set one with --prices" if usd is None else f"${usd:.2f} per GPU-hour, {source}"
        )
        yield True, f"{name}: {price}"
    between = [row for row in rows if row.inter_node_gbps_needed and row.inter_node_gbps]
    worst = max(between, key=lambda row: row.inter_node_gbps_needed, default=None)
    if worst and worst.inter_node_gbps_needed > worst.inter_node_gbps:
        yield (
            True,
            f"between nodes, {worst.strategy} needs {worst.inter_node_gbps_needed:,.0f} Gbit/s to hide its "
            f"communication; a node of {worst.gpu} has {worst.inter_node_gbps:,.0f}",
        )
    yield (
        any(row.tokens_per_second is None for row in rows),
        "no tokens/s across nodes with an unknown network: set --network",
    )


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
        note=f"batch: the largest per GPU that fits or may fit, up to {LARGEST_BATCH_TRIED:,}; 0: not even 1 "
        f"fits; with margin: the largest that fits with a probability of {SURE:.0%}, the safe choice",
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
    Heading("other", _parts("communication", "temporary", "workspace"), gib, 1),
    Heading(
        "fits",
        _fits,
        style=lambda row: _VERDICT_STYLE.get(row.verdict, ""),
        note="fits: the probability, with the same errors, that allocated and most of the allocator's slack "
        "leave room for CUDA and NCCL; headroom is what remains",
    ),
    Heading("headroom\nGiB", "headroom_bytes", gib, 3),
    Heading("host GiB\nper node", "host_bytes_per_node", gib, 7),
    Heading(
        "DeepSpeed's\nestimate GiB",
        lambda row: gib(row.deepspeed_bytes) + "*" * row.deepspeed_stands_in,
        drop_order=10,
        note=f"DeepSpeed's estimate: by version {ESTIMATOR_VERSION}; model states only, no activations; *: "
        "the estimate of ZeRO-3, which people also use for FSDP full shard",
    ),
    Heading("tokens/s\nper GPU", "tokens_per_second_per_gpu", rate, 14),
    Heading("MFU", "mfu", percent, 11),
    Heading("bound by", lambda row: row.bottleneck and row.bottleneck.replace("_", " "), drop_order=12),
    Heading("$ per 1M\ntokens", "usd_per_million_tokens", dollars, 13),
)
"the columns after those of settings that differ: to add one, add an entry"
