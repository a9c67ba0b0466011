"""The comparison of runs: a table with heading and notes, and a table of losses by dataset."""

import math
import re
from collections import Counter

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.report.rows import Row
from slm_toolkit.report.stats import MIN_ROUNDS
from slm_toolkit.report.tables.columns import columns_of, common, marks_of, value_of, varying
from slm_toolkit.report.tables.fitted import (
    DASH,
    Column,
    columns_that_fit,
    left_out_note,
    loss,
    table_of,
)
from slm_toolkit.report.verdict import verdict

_ALWAYS_ABOVE = (
    *("model", "numerics", "seq_len", "per_device_train_batch_size", "gradient_accumulation_steps"),
    "attn_implementation",
)
"settings for which `heading` has its own phrases"


def comparison_table(rows: list[Row], *, width: int, all_rows: list[Row] | None = None) -> RenderableType:
    """Make the table with its heading, verdict and notes. Print it with `crop=False`.

    `all_rows`: the rows that the verdict is about, if the table shows only the first of them.
    """
    columns, dropped = columns_that_fit(columns_of(rows), width=width)
    conclusion = [Text(line, style="bold") for line in verdict(all_rows or rows)]
    table = table_of(columns, row_styles=list(map(_style, rows)))
    return Group(heading(rows), table, *conclusion, *notes(rows, dropped))


def _style(row: Row) -> str | None:
    """Return red for a row that computes something else, bold for the fastest row."""
    return "red" if row.parity_holds is False else "bold" if row.rank == 1 else None


def heading(rows: list[Row]) -> Text:
    """Return a line with the evidence and the settings that all rows share."""
    columns = {name for name, _ in varying(rows)}
    row = rows[0]
    same = []
    if "model" not in columns:
        same.append(row.model)
    if any(row.is_rehearsed for row in rows):
        same += _rehearsed_ranks(rows, columns)
    elif "world_size" not in columns and (size := common(rows, "world_size")) is not None:
        gpu = common(rows, "gpu")  # a failed run may not have recorded it
        ranks = f"{size} x {gpu}" if gpu else f"{size} CPU process{'es' if size > 1 else ''}"
        several = "num_machines" not in columns and (common(rows, "num_machines") or 1) > 1
        same.append(f"{ranks} on {common(rows, 'num_machines')} machines" if several else ranks)
    if "numerics" not in columns:
        same.append(f"numerics {row.numerics}")
    if "seq_len" not in columns and row.seq_len is not None:
        same.append(f"sequence {row.seq_len}")
    batch = row.per_device_train_batch_size
    if any(other.per_device_train_batch_size != batch for other in rows):
        batch = None  # of a user's own script, whose arguments have columns instead
    if "per_device_train_batch_size" not in columns and row.largest_batch is None and batch is not None:
        same.append(f"batch {batch} per process")
    if "attn_implementation" not in columns and (kernel := common(rows, "attn_implementation")):
        same.append(f"attention {kernel}")
    if "gradient_accumulation_steps" not in columns and (row.gradient_accumulation_steps or 1) > 1:
        same.append(f"{row.gradient_accumulation_steps} micro-steps")
    for name, flag in FLAGS.items():
        value = value_of(row, name)
        if (
            flag.heading
            and name not in (*_ALWAYS_ABOVE, *columns)
            and value not in (None, getattr(RunConfig, name))
        ):
            same.append(flag.heading.format(value))
    evidence = " and ".join(dict.fromkeys(row.evidence for row in rows))
    return Text(f"{evidence}: " + ", ".join(same), style="bold")


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


def _rehearsed_ranks(rows: list[Row], columns: set[str]) -> list[str]:
    """Return a phrase with the number of ranks, and the device on which the rehearsals ran."""
    size = common(rows, "world_size")
    is_same_size = "world_size" not in columns and size is not None
    if "evidence" in columns:
        return [f"{size} ranks"] if is_same_size else []
    gpu = common(rows, "gpu")
    ranks = f"of {size}" if is_same_size else "of the ranks below"
    return [f"rank 0 {ranks}, " + (f"alone on one {gpu}" if gpu else "traced without a GPU")]


def notes(rows: list[Row], dropped: list[str]) -> list[Text]:
    """Return the notes below the table; `dropped` has the titles of dropped columns."""
    notes = _reasons(rows)
    for marked, mark in marks_of(rows).items():
        first = next(row for row in rows if tuple(row.numerics_differences) == marked)
        note = f"{mark.strip()} not computed as {first.numerics_reference}: {', '.join(marked)}"
        if first.numerics_alignments:
            note += f". To align: {'; '.join(first.numerics_alignments)}"
        notes.append(Text(note, style="yellow"))
    notes += _warnings(rows)
    if any(row.rank for row in rows) and "rank" not in dropped:
        paired = any(len(row.tokens_per_second_by_round) >= MIN_ROUNDS for row in rows)
        how = "not clearly different in paired rounds" if paired else "the intervals overlap"
        scope = f"among rows of one model, sequence length and machine; =: shared, {how}"
        notes.append(Text(f"rank: by tokens/s per process, {scope}", style="dim"))
    if (most := max(row.num_launches for row in rows)) > 1 and "interval" not in dropped:
        notes.append(Text(f"intervals: from up to {most} launches", style="dim"))
    if any(row.is_rehearsed for row in rows):
        notes.append(
            Text(
                "rehearsed: one process played rank 0 and sent nothing; memory of tensors only, without the "
                "overhead of CUDA, NCCL and the allocator",
                style="dim",
            )
        )
    prices = sorted({row.price for row in rows if row.price})
    notes += [Text(f"price: {price}", style="dim") for price in prices]
    if (
        not prices
        and "$ per 1M tokens" not in dropped
        and any(row.status == "ok" and not row.is_rehearsed for row in rows)
    ):
        notes.append(Text("no known price for this hardware: set one with --prices", style="dim"))
    if any(row.deepspeed_bytes for row in rows) and not any("DeepSpeed" in title for title in dropped):
        notes.append(
            Text("DeepSpeed's estimate: by its own function; model states only, no activations", style="dim")
        )
    if any(row.largest_batch is not None for row in rows):
        at_limit = "; or more: no larger batch was tried"
        ended = any(row.largest_batch is not None and row.smallest_oom_batch is None for row in rows)
        definition = "largest batch: sequences per process that ran; one more ran out of memory"
        notes.append(Text(definition + at_limit * ended, style="dim"))
    if any(row.estimated_peak_bytes for row in rows) and "estimated GiB" not in dropped:
        notes.append(Text("estimated: by closed forms", style="dim"))
    if dropped:
        notes.append(Text(left_out_note(dropped), style="dim"))
    return notes


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


# Losses by dataset, as a rich table below the comparison.


def has_several(row: Row) -> bool:
    """Return whether a run mixed several datasets, or was evaluated on several."""
    return len(row.final_loss_by_dataset) > 1 or len(row.final_eval_losses) > 1


def dataset_table(rows: dict[str, Row]) -> RenderableType:
    """Show the last training loss and the held-out loss of each row's datasets; `rows` has them by label."""
    lines = [
        (label, name, row.final_loss_by_dataset.get(name), row.final_eval_losses.get(name))
        for label, row in rows.items()
        for name in dict.fromkeys([*row.final_loss_by_dataset, *row.final_eval_losses])
    ]
    columns = [
        Column("run", [label for label, *_ in lines], justify="left"),
        Column("dataset", [name for _, name, _, _ in lines], justify="left"),
        Column("last training\nloss", [loss(trained) for _, _, trained, _ in lines]),
        Column("held-out\nloss", [loss(held_out) for *_, held_out in lines]),
        Column("held-out\nperplexity", [_perplexity(held_out) for *_, held_out in lines]),
    ]
    return Group(Text("losses by dataset", style="bold"), table_of(columns))


def _perplexity(held_out_loss: float | None) -> str:
    return DASH if held_out_loss is None else f"{math.exp(min(held_out_loss, 50)):.4g}"
