"""Show estimates as a table; for a single estimate, also bars with the parts of its peak and of its step."""

from collections.abc import Callable, Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import COLUMN_TITLES, FIRST_COLUMNS, FLAGS, RunConfig
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.predict.changes_that_fit import MOST_CHANGES
from slm_toolkit.predict.estimate import LARGEST_BATCH_TRIED, Change, Estimate
from slm_toolkit.predict.memory.machine import COVERAGE, STATE, SURE
from slm_toolkit.report.tables.fitted import (
    DASH,
    Column,
    columns_that_fit,
    dollars,
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
_NETWORK_SOURCES = {
    "measured": "the --network measurement",
    "measured in part": "the --network measurement and data sheets",
    "given": "--network and, inside a node, data sheets",
    "data sheet": "data sheets, not measured",
}
_DECIDES_BATCH = (
    *("seq_len", "gradient_checkpointing", "gradient_accumulation_steps", "kernels"),
    "pad_widths",
)
_OTHERS = ("communication", "temporary", "workspace")
_MOST_RANGES = 3
"rows with offload whose range a note has"


def estimate_table(rows: list[Estimate], *, width: int, largest_batch: bool = False) -> RenderableType:
    """Make the table with its heading and notes. Print it with `crop=False`."""
    columns, dropped = columns_that_fit(_columns(rows, largest_batch=largest_batch), width=width)
    parts = [parts_table(rows[0]), *step_tables(rows[0])] if len(rows) == 1 else []
    return Group(
        _heading(rows, largest_batch),
        table_of(columns),
        *_changes(rows),
        *parts,
        *_notes(rows, dropped, largest_batch),
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


def parts_table(row: Estimate) -> RenderableType:
    """Show the parts of one estimate's memory; bars are relative to the largest, dim if not allocated."""
    sizes = {name: size for name, size in row.parts.items() if size}
    outside = ("allocator_slack", "cuda_context")
    table = table_of(
        [
            Column("part", [name.replace("_", " ") for name in sizes]),
            Column("GiB", [f"{size / 2**30:.3f}" for size in sizes.values()]),
            Column("", _bars(sizes)),
        ],
        row_styles=["dim" if name in outside else None for name in sizes],
    )
    return Group(table, Text("allocator slack and CUDA context are not part of allocated", style="dim"))


def step_tables(row: Estimate) -> list[RenderableType]:
    """Show the parts of one estimate's step; empty if its time is unknown."""
    if row.parts_seconds is None:
        return []
    times = {name: seconds for name, seconds in row.parts_seconds.items() if seconds > 0}
    table = table_of(
        [
            Column("part of a step", [name.replace("_", " ") for name in times]),
            Column("ms", [f"{1e3 * seconds:.1f}" for seconds in times.values()]),
            Column("", _bars(times)),
        ]
    )
    if row.misaligned_seconds <= 0.0005:
        return [table]
    cost = f"widths that are not multiples of 8 cost {1e3 * row.misaligned_seconds:.1f} ms of matmul"
    return [table, Text(f"{cost}; `slm doctor` names them", style="dim")]


def _bars(values: dict[str, float]) -> list[str]:
    longest = max(values.values())
    return ["█" * max(1, round(_BAR_WIDTH * value / longest)) for value in values.values()]


def _columns(rows: list[Estimate], *, largest_batch: bool) -> list[Column]:
    def column(title: str, cell: Callable[[Estimate], str], drop_order: int = 0) -> Column:
        return Column(title, [cell(row) for row in rows], drop_order)

    columns = [
        column(title, lambda row, name=name: setting(getattr(row, name)))
        for name, title in _TITLES.items()
        if differs(rows, name) or (largest_batch and title == "batch")
    ]
    if largest_batch:
        columns.append(column("batch with\nmargin", lambda row: str(row.batch_with_margin)))
    columns += [
        column("strategy", lambda row: row.strategy),
        column("peak GiB\nallocated", lambda row: gib(row.peak_allocated_bytes)),
        column("reserved\nGiB", _reserved, 9),
        column("peak at", lambda row: row.peak_instant, 8),
        column("training\nstate", lambda row: _parts(row, STATE), 6),
        column("activations", lambda row: _parts(row, ("activations",)), 5),
        column("logits\nand loss", lambda row: _parts(row, ("logits_and_loss",)), 4),
        column("gathered", lambda row: _parts(row, ("gathered_parameters",)), 2),
        column("other", lambda row: _parts(row, _OTHERS), 1),
    ]
    if any(row.verdict for row in rows):
        styles = [_VERDICT_STYLE.get(row.verdict, "") for row in rows]
        columns += [
            Column("fits", [_fits(row) for row in rows], styles=styles),
            column("headroom\nGiB", lambda row: gib(row.headroom_bytes), 3),
        ]
    columns.append(column("host GiB\nper node", lambda row: gib(row.host_bytes_per_node), 7))
    if any(row.deepspeed_bytes for row in rows):
        columns.append(column("DeepSpeed's\nestimate GiB", _deepspeed, 10))
    if any(row.gpu for row in rows):
        columns += [
            column("tokens/s\nper GPU", lambda row: rate(row.tokens_per_second_per_gpu), 14),
            column("MFU", lambda row: percent(row.mfu), 11),
            column("bound by", lambda row: (row.bottleneck or DASH).replace("_", " "), 12),
            column("$ per 1M\ntokens", lambda row: dollars(row.usd_per_million_tokens), 13),
        ]
    return columns


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


def _notes(rows: list[Estimate], dropped: list[str], largest_batch: bool) -> list[Text]:
    notes = [
        "closed forms, nothing ran; peaks are of one step on the GPU with the most, parts at that instant"
    ]
    if largest_batch:
        notes.append(
            f"batch: the largest per GPU that fits or may fit, up to {LARGEST_BATCH_TRIED:,}; 0: not even 1 "
            f"fits; with margin: the largest that fits with a probability of {SURE:.0%}, the safe choice"
        )
        notes.append(f"the batches are for {_assumed(rows)}: other values change them")
    for gpu in (gpu_of_name(name) for name in dict.fromkeys(row.gpu for row in rows) if name):
        notes.append(f"{gpu.name} has {gib(gpu.memory_bytes)} GiB; source: {gpu.memory_source}")
    if any(row.verdict for row in rows):
        context = " to ".join(
            dict.fromkeys(f"{size / 2**30:.2f}" for size in sorted(row.parts["cuda_context"] for row in rows))
        )
        notes.append(
            f"fits: the probability that allocated and most of the allocator's slack leave {context} GiB for "
            "CUDA and NCCL; headroom is what remains"
        )
        notes.append(
            f"reserved: a range that holds {COVERAGE:.0%} of other people's runs; fits uses the same errors"
        )
    if any(row.is_nearly_full for row in rows):
        notes.append(
            "nearly full: PyTorch's allocator frees unused blocks and retries, so steps are slower, at least "
            "the first ones"
        )
    notes += _speed_notes(rows)
    if any(FLAGS["kernels"].parts_of(row.kernels).count("compile") for row in rows):
        notes.append(
            "compiled: layers keep what torch's partitioner saves; what their kernels use in backward was "
            "never traced"
        )
    if any(row.fp8 != "none" for row in rows):
        notes.append(
            "fp8: its speed is counted from torchao's code; four runs on an H100 and an H200 were within 4 %"
        )
    notes += _adapter_notes(rows)
    if versions := {row.deepspeed_version for row in rows if row.deepspeed_version}:
        notes.append(f"DeepSpeed's estimate: by version {versions.pop()}; model states only, no activations")
    if any(row.deepspeed_stands_in for row in rows):
        notes.append("* the estimate of ZeRO-3, which people also use for FSDP full shard")
    if dropped:
        notes.append(left_out_note(dropped))
    return [Text(note, style="dim") for note in notes]


def _assumed(rows: list[Estimate]) -> str:
    """Return the flags, equal in all rows, that decide how many sequences fit."""
    values = {name: getattr(rows[0], name) for name in _DECIDES_BATCH if not differs(rows, name)}
    return " ".join(f"--{name} {str(value).lower()}" for name, value in values.items())


def _adapter_notes(rows: list[Estimate]) -> list[str]:
    notes = []
    for peft in dict.fromkeys(row.peft for row in rows if row.adapted_modules):
        row = next(row for row in rows if row.peft == peft)
        counts = sorted({row.num_trainable_params for row in rows if row.peft == peft})
        trained = " to ".join(dict.fromkeys(f"{count:,}" for count in (counts[0], counts[-1])))
        notes.append(f"{peft}: {trained} trained parameters in adapters of {', '.join(row.adapted_modules)}")
    if any(row.adapted_modules for row in rows):
        notes.append(
            "adapters: memory agrees with traces; their time is derived, not measured; "
            "MFU uses 4 N + 6 N_adapters; DeepSpeed's estimator ignores that parameters are frozen"
        )
    if any(row.peft == "qlora" for row in rows):
        notes.append(
            "qlora: checked on a CPU, except the memory and time of unpacking 4-bit weights, which need a GPU"
        )
    return notes


def _speed_notes(rows: list[Estimate]) -> list[str]:
    if not any(row.gpu for row in rows):
        return []
    notes = []
    with_time = [row for row in rows if row.step_seconds]
    offloading = [row for row in with_time if row.parts_seconds["offload"]]
    if timed := [row for row in with_time if row not in offloading]:
        slower = 1 - min(row.step_seconds / row.step_high_seconds for row in timed)
        faster = max(row.step_seconds / row.step_low_seconds for row in timed) - 1
        notes.append(
            f"real tokens/s are likely {slower:.0%} lower to {faster:.0%} higher: fitted to published runs, "
            "no kernel was timed" + " except on calibrated GPUs" * any(row.calibration for row in rows)
        )
    if offloading:
        ranges = ", ".join(
            f"{row.strategy} {row.step_low_seconds:.2g} to {row.step_high_seconds:.2g} s a step"
            for row in offloading[:_MOST_RANGES]
        )
        notes.append(
            f"offload, likely: {ranges}; its time is bytes over PCIe, host memory and disks, whose rates "
            "differ between hosts: none was measured"
        )
    for name in dict.fromkeys(row.gpu for row in with_time if row.depends_on_pcie):
        notes.append(
            f"{name}: PCIe links the GPUs of a node; the range includes that it is several times slower than "
            "its data sheet, as between CPU sockets. slm compare --probe_network measures yours"
        )
    for gpu, calibration in dict.fromkeys((row.gpu, row.calibration) for row in rows if row.calibration):
        notes.append(f"{gpu}: calibrated, {calibration}")
    for name in dict.fromkeys(row.gpu for row in rows if row.gpu):
        row = next(row for row in rows if row.gpu == name)
        if row.usd_per_gpu_hour is None:
            notes.append(f"{name}: no known price: set one with --prices")
        else:
            notes.append(f"{name}: ${row.usd_per_gpu_hour:.2f} per GPU-hour, {row.price_source}")
    too_slow = [row for row in rows if row.inter_node_gbps_needed and row.inter_node_gbps]
    too_slow = [row for row in too_slow if row.inter_node_gbps_needed > row.inter_node_gbps]
    if too_slow:
        worst = max(too_slow, key=lambda row: row.inter_node_gbps_needed)
        needed, available = (f"{gbps:,.0f}" for gbps in (worst.inter_node_gbps_needed, worst.inter_node_gbps))
        notes.append(
            f"between nodes, {worst.strategy} needs {needed} Gbit/s to hide its communication; "
            f"a node of {worst.gpu} has {available}"
        )
    if evidence := dict.fromkeys(row.network_evidence for row in rows if row.network_evidence):
        notes.append(f"network speed from {', '.join(_NETWORK_SOURCES[name] for name in evidence)}")
    if any(row.gpu and row.tokens_per_second is None for row in rows):
        notes.append("no tokens/s across nodes with an unknown network: set --network")
    return notes


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


def _reserved(row: Estimate) -> str:
    return f"{row.peak_reserved_low_bytes / 2**30:.2f} to {row.peak_reserved_high_bytes / 2**30:.2f}"


def _deepspeed(row: Estimate) -> str:
    return gib(row.deepspeed_bytes) + ("*" if row.deepspeed_stands_in else "")


def _parts(row: Estimate, names: tuple[str, ...]) -> str:
    return gib(sum(row.parts[name] for name in names))
