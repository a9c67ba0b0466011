"""Ranked plans as text: the table, why the first, what would move it, and the commands."""

import dataclasses

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import COLUMN_TITLES, FLAGS
from slm_toolkit.model.from_config import GPT_TYPES
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.recommend.launch_files import check_command, launch_command, yaml_name
from slm_toolkit.recommend.plans import (
    TIE,
    Plan,
    faster_for_the_same,
    on_the_same_hardware,
    per_hardware,
    reason_of,
    score_of,
)
from slm_toolkit.report.tables.fitted import (
    DASH,
    Column,
    columns_that_fit,
    gib,
    percent,
    rate,
    setting,
    table_of,
)

_NETWORK = {
    "measured": "what --network measured",
    "measured in part": "what --network measured, as far as it goes",
    "given": "--inter_node_gbps",
    "data sheet": "data sheets",
}


def plan_report(
    ranked: list[Plan], advice: list[str], *, top: int, objective: str, width: int
) -> RenderableType:
    """Print it with `crop=False`; `advice`: what would move the first plan, as sentences."""
    rows = per_hardware(ranked)
    shown, winner = rows[:top], ranked[0]
    parts: list[RenderableType] = [_heading(ranked), _table(shown, width=width)]
    parts += [Text(line) for line in reasons(shown, objective=objective)]
    if rows is not ranked:
        parts += _same_hardware(ranked, objective)
    if objective == "cost" and (faster := faster_for_the_same(ranked, winner)) is not None:
        row = faster.estimate
        parts.append(
            Text(
                f"for the same money within {TIE:.0%}, faster: {row.num_gpus} x {row.gpu} {row.strategy}, "
                f"{_hours(faster.hours)} h"
            )
        )
    parts += [Text(line, style="green") for line in advice]
    parts += [Text(line, style="dim") for line in _notes(rows, shown)]
    parts += _commands(winner)
    return Group(*parts)


def _commands(winner: Plan) -> list[Text]:
    if winner.spec.model_type in GPT_TYPES:
        return [Text(f"\na {winner.spec.model_type} can be estimated, not trained here: nothing to launch")]
    return [
        Text("\nto launch the first:", style="bold"),
        Text(launch_command(winner, yaml_name(winner))),
        Text("to measure it before:", style="bold"),
        Text(check_command(winner)),
    ]


def _same_hardware(ranked: list[Plan], objective: str) -> list[Text]:
    """The first plan's strategy against the others on its GPUs."""
    winner = ranked[0]
    others = on_the_same_hardware(ranked, winner)
    if not others:
        return []
    told = []
    for plan in others:
        reason = reason_of(plan, winner, objective=objective)
        why = f" ({reason.parts[0][0].replace('_', ' ')})" if reason.parts else ""
        told.append(f"{plan.estimate.strategy} {reason.ratio - 1:+.1%}{why}")
    row = winner.estimate
    line = f"strategies on {row.num_gpus} x {row.gpu} against {row.strategy}: {', '.join(told)}"
    return [Text(line)]


def reasons(shown: list[Plan], *, objective: str) -> list[str]:
    """A line for each plan behind the first."""
    winner = shown[0]
    lines = []
    for number, plan in enumerate(shown[1:], 2):
        reason = reason_of(plan, winner, objective=objective)
        name = f"{number}: {plan.estimate.num_gpus} x {plan.estimate.gpu} {plan.estimate.strategy}"
        if winner.verdict == "fits" and plan.verdict != "fits":
            name += " (tight)"
        if reason.ratio is None:
            lines.append(f"{name}: without a price it can't be compared in dollars")
            continue
        if reason.ratio - 1 < TIE:
            lines.append(f"{name}: a tie within {TIE:.0%}, as far as estimates can tell")
            continue
        unit = "hours" if objective == "time" else "dollars" if plan.usd is not None else "GPU-hours"
        parts = ", ".join(f"{part.replace('_', ' ')} {more:+.0%}" for part, more in reason.parts[:3])
        line = f"{name}: {reason.ratio - 1:+.0%} {unit}" + (f": {parts}" if parts else "")
        if reason.ties_at_usd_per_gpu_hour is not None:
            line += f"; ties at ${reason.ties_at_usd_per_gpu_hour:.2f} per GPU-hour"
        lines.append(line)
    return lines


def nothing_found(
    found: list[Plan], left_out: list[str], *, deadline_hours: float | None, budget_usd: float | None
) -> RenderableType:
    """What comes nearest where no plan is within the limits; why there is none at all."""
    if not found and left_out:
        return Text("no plan: see what was left out; what was tried besides, if anything, does not fit")
    if not found:
        return Text(
            "nothing fits: take more GPUs, larger ones, or a smaller model (`slm estimate` shows by how much)"
        )
    asked = []
    if deadline_hours is not None:
        asked.append(f"{deadline_hours:g} h")
    if budget_usd is not None:
        asked.append(f"${budget_usd:,.2f}")
    fastest, cheapest = (min(found, key=score_of(name)) for name in ("time", "cost"))
    lines = [f"nothing is within {' and '.join(asked)}"]
    for name, plan in (("fastest", fastest), ("cheapest", cheapest)):
        row = plan.estimate
        cost = f", {usd(plan.usd)}" if plan.usd is not None else ", no price known"
        lines.append(f"the {name}: {row.num_gpus} x {row.gpu}, {row.strategy}: {_hours(plan.hours)} h{cost}")
    return Text("\n".join(lines))


def usd(value: float | None) -> str:
    if value is None:
        return DASH
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}"


def _heading(ranked: list[Plan]) -> Text:
    """Of each model the best plan's tokens and steps."""
    words = []
    for model in dict.fromkeys(plan.estimate.model for plan in ranked):
        plan = next(plan for plan in ranked if plan.estimate.model == model)
        loss = "" if plan.expected_loss is None else f", expected loss {plan.expected_loss:.2f} ({plan.law})"
        words.append(
            f"{model}: {_size(plan.num_tokens)} tokens, {plan.num_steps:,} steps of "
            f"{_size(plan.tokens_per_step)}{loss}"
        )
    return Text("\n".join(words), style="bold")


def _size(number: float) -> str:
    """20.0B, 524k, ..."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:,.1f}{name}"
    return f"{number / 1e3:,.0f}k" if number >= 1e4 else f"{number:,.0f}"


_IN_COLUMNS = (
    "model",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "loss_kernel",
)
_SETTINGS = tuple(
    f.name
    for f in dataclasses.fields(Estimate)
    if f.name in FLAGS and FLAGS[f.name].heading and f.name not in _IN_COLUMNS
)
"columns of their own where plans differ in them"


def _table(shown: list[Plan], *, width: int) -> RenderableType:
    columns, _ = columns_that_fit(_columns(shown), width=width)
    styles = ["bold", *(None if plan.verdict == "fits" else "yellow" for plan in shown[1:])]
    return table_of(columns, row_styles=styles)


def _columns(shown: list[Plan]) -> list[Column]:
    rows = [plan.estimate for plan in shown]

    def texts(title: str, cells: list[str], drop_order: int = 0) -> Column:
        return Column(title, cells, drop_order, justify="left")

    differing = [name for name in _SETTINGS if len({getattr(row, name) for row in rows}) > 1]
    columns = [
        Column("", [str(number) for number in range(1, len(shown) + 1)]),
        texts("model", [row.model for row in rows]),
        texts("GPUs", [f"{row.num_gpus} x {row.gpu}" for row in rows]),
        texts("strategy", [row.strategy for row in rows]),
        *(texts(COLUMN_TITLES[name], [setting(getattr(row, name)) for row in rows]) for name in differing),
        texts("batch x\nmicro-steps", list(map(_batch, shown)), 8),
        texts("checkpointing", [row.gradient_checkpointing for row in rows], 6),
        texts("loss kernel", [row.loss_kernel for row in rows], 3),
        Column("tokens/s", [rate(plan.tokens_per_second) for plan in shown], 7),
        Column("MFU", [percent(p.estimate.mfu) if p.evidence == "estimated" else DASH for p in shown], 2),
        texts("bound by", [row.bottleneck.replace("_", " ") for row in rows], 5),
        Column("hours", [_hours(plan.hours) for plan in shown]),
        Column("$", [usd(plan.usd) for plan in shown]),
        Column("headroom\nGiB", [gib(plan.headroom_bytes) for plan in shown], 4),
        texts("evidence", list(map(_evidence, shown)), 1),
    ]
    if len({row.model for row in rows}) == 1:
        columns = [column for column in columns if column.title != "model"]
    return columns


def _notes(ranked: list[Plan], shown: list[Plan]) -> list[str]:
    notes = []
    if len(ranked) > len(shown):
        notes.append(f"{len(ranked) - len(shown)} more: --top, or --json for all")
    if any(plan.verdict != "fits" for plan in shown):
        notes.append("yellow: fits tightly, a tenth more activations would not; measure it first")
    if any(plan.evidence == "estimated" for plan in shown):
        row = shown[0].estimate
        if row.step_seconds:
            slow, fast = row.step_seconds / row.step_high_seconds, row.step_seconds / row.step_low_seconds
            notes.append(f"estimated rates are likely {slow - 1:+.0%} to {fast - 1:+.0%}, alike for all")
    priced = [plan.estimate for plan in shown if plan.estimate.price_source is not None]
    notes += dict.fromkeys(
        f"{row.gpu}: ${row.usd_per_gpu_hour:.2f} per GPU-hour, {row.price_source}" for row in priced
    )
    if words := [plan.estimate.network_evidence for plan in shown if plan.estimate.network_evidence]:
        notes.append(f"communication by {', '.join(dict.fromkeys(_NETWORK[word] for word in words))}")
    first = ranked[0]
    if first.loss_per_usd is not None:
        notes.append(
            f"after that the next dollar would take {first.loss_per_usd:.1e} off the loss of the first, by "
            f"{first.law} (the paper's equation 1)"
        )
    notes.append("hours and dollars are of steps alone: starting, saving and failures come on top")
    return notes


def _batch(plan: Plan) -> str:
    return f"{plan.estimate.per_device_train_batch_size} x {plan.estimate.gradient_accumulation_steps}"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _evidence(plan: Plan) -> str:
    if plan.evidence == plan.memory_evidence:
        return plan.evidence
    return f"{plan.evidence}, memory {plan.memory_evidence}"
