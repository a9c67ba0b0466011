"""Print ranked plans: the table, the reasons for the order, advice, and the commands."""

import dataclasses

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import COLUMN_TITLES, FLAGS
from slm_toolkit.model.from_config import ESTIMATED_ONLY
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.recommend.launch_files import check_command, launch_command, yaml_name
from slm_toolkit.recommend.plans import (
    TIE,
    Plan,
    faster_at_the_same_cost,
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
    "measured": "the --network measurement",
    "measured in part": "the --network measurement, in part",
    "given": "--inter_node_gbps",
    "data sheet": "data sheets",
}


def plan_report(
    ranked: list[Plan], advice: list[str], *, top: int, objective: str, width: int
) -> RenderableType:
    """Return the report, to be printed with `crop=False`.

    `advice` has a sentence for each change that would make the first plan faster or cheaper.
    """
    rows = per_hardware(ranked)
    listed, winner = rows[:top], ranked[0]
    parts: list[RenderableType] = [_heading(ranked), _table(listed, width=width)]
    parts += [Text(line) for line in reasons(listed, objective=objective)]
    if rows is not ranked:
        parts += _same_hardware(ranked, objective)
    if objective == "cost" and (faster := faster_at_the_same_cost(ranked, winner)) is not None:
        row = faster.estimate
        parts.append(
            Text(
                f"faster at the same cost (within {TIE:.0%}): {row.num_gpus} x {row.gpu} {row.strategy}, "
                f"{_hours(faster.hours)} h"
            )
        )
    parts += [Text(line, style="green") for line in advice]
    parts += [Text(line, style="dim") for line in _notes(rows, listed)]
    parts += _commands(winner)
    return Group(*parts)


def _commands(winner: Plan) -> list[Text]:
    if winner.spec.model_type in ESTIMATED_ONLY:
        return [Text(f"\na {winner.spec.model_type} can be estimated, not trained here: nothing to launch")]
    return [
        Text("\nto launch the first plan:", style="bold"),
        Text(launch_command(winner, yaml_name(winner))),
        Text("to measure it first:", style="bold"),
        Text(check_command(winner)),
    ]


def _same_hardware(ranked: list[Plan], objective: str) -> list[Text]:
    """Return a line that compares the first plan's strategy with the others on the same GPUs."""
    winner = ranked[0]
    others = on_the_same_hardware(ranked, winner)
    if not others:
        return []
    differences = []
    for plan in others:
        reason = reason_of(plan, winner, objective=objective)
        why = f" ({reason.parts[0][0].replace('_', ' ')})" if reason.parts else ""
        differences.append(f"{plan.estimate.strategy} {reason.ratio - 1:+.1%}{why}")
    row = winner.estimate
    line = f"strategies on {row.num_gpus} x {row.gpu} against {row.strategy}: {', '.join(differences)}"
    return [Text(line)]


def reasons(plans: list[Plan], *, objective: str) -> list[str]:
    """Return a line for each plan except the first: how far it is behind, and why."""
    winner = plans[0]
    lines = []
    for number, plan in enumerate(plans[1:], 2):
        reason = reason_of(plan, winner, objective=objective)
        name = f"{number}: {plan.estimate.num_gpus} x {plan.estimate.gpu} {plan.estimate.strategy}"
        if winner.verdict == "fits" and plan.verdict != "fits":
            name += " (tight)"
        if reason.ratio is None:
            lines.append(f"{name}: without a price it can't be compared in dollars")
            continue
        if reason.ratio - 1 < TIE:
            lines.append(f"{name}: a tie within {TIE:.0%}: estimates are not more precise")
            continue
        unit = "hours" if objective == "time" else "dollars" if plan.usd is not None else "GPU-hours"
        parts = ", ".join(f"{part.replace('_', ' ')} {more:+.0%}" for part, more in reason.parts[:3])
        line = f"{name}: {reason.ratio - 1:+.0%} {unit}" + (f": {parts}" if parts else "")
        if reason.ties_at_usd_per_gpu_hour is not None:
            line += f"; ties at ${reason.ties_at_usd_per_gpu_hour:.2f} per GPU-hour"
        lines.append(line)
    return lines


def nothing_found(
    plans: list[Plan], left_out: list[str], *, deadline_hours: float | None, budget_usd: float | None
) -> RenderableType:
    """Return the text for no plan within the limits: the closest plans, or why there is no plan."""
    if not plans and left_out:
        return Text("no plan: see what was left out; no other configuration fits, if any was tried")
    if not plans:
        return Text(
            "nothing fits: use more GPUs, larger GPUs or a smaller model (`slm estimate` shows by how much)"
        )
    limits = []
    if deadline_hours is not None:
        limits.append(f"{deadline_hours:g} h")
    if budget_usd is not None:
        limits.append(f"${budget_usd:,.2f}")
    fastest, cheapest = (min(plans, key=score_of(name)) for name in ("time", "cost"))
    lines = [f"nothing is within {' and '.join(limits)}"]
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
    """Return the tokens, steps and expected loss of each model's best plan."""
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
"settings that have a column if the plans differ in them"


def _table(plans: list[Plan], *, width: int) -> RenderableType:
    columns, _ = columns_that_fit(_columns(plans), width=width)
    styles = ["bold", *(None if plan.verdict == "fits" else "yellow" for plan in plans[1:])]
    return table_of(columns, row_styles=styles)


def _columns(plans: list[Plan]) -> list[Column]:
    rows = [plan.estimate for plan in plans]

    def texts(title: str, cells: list[str], drop_order: int = 0) -> Column:
        return Column(title, cells, drop_order, justify="left")

    differing = [name for name in _SETTINGS if len({getattr(row, name) for row in rows}) > 1]
    columns = [
        Column("", [str(number) for number in range(1, len(plans) + 1)]),
        texts("model", [row.model for row in rows]),
        texts("GPUs", [f"{row.num_gpus} x {row.gpu}" for row in rows]),
        texts("strategy", [row.strategy for row in rows]),
        *(texts(COLUMN_TITLES[name], [setting(getattr(row, name)) for row in rows]) for name in differing),
        texts("batch x\nmicro-steps", list(map(_batch, plans)), 8),
        texts("checkpointing", [row.gradient_checkpointing for row in rows], 6),
        texts("loss kernel", [row.loss_kernel for row in rows], 3),
        Column("tokens/s", [rate(plan.tokens_per_second) for plan in plans], 7),
        Column("MFU", [percent(p.estimate.mfu) if p.evidence == "estimated" else DASH for p in plans], 2),
        texts("bound by", [row.bottleneck.replace("_", " ") for row in rows], 5),
        Column("hours", [_hours(plan.hours) for plan in plans]),
        Column("$", [usd(plan.usd) for plan in plans]),
        Column("headroom\nGiB", [gib(plan.headroom_bytes) for plan in plans], 4),
        texts("evidence", list(map(_evidence, plans)), 1),
    ]
    if len({row.model for row in rows}) == 1:
        columns = [column for column in columns if column.title != "model"]
    return columns


def _notes(ranked: list[Plan], listed: list[Plan]) -> list[str]:
    notes = []
    if len(ranked) > len(listed):
        notes.append(f"{len(ranked) - len(listed)} more plans: use --top, or --json for all")
    if any(plan.verdict != "fits" for plan in listed):
        notes.append("yellow: a tight fit; 10% more activations would not fit, so measure it first")
    if any(plan.evidence == "estimated" for plan in listed):
        row = listed[0].estimate
        if row.step_seconds:
            slow, fast = row.step_seconds / row.step_high_seconds, row.step_seconds / row.step_low_seconds
            notes.append(
                f"real rates are likely {slow - 1:+.0%} to {fast - 1:+.0%} off the estimates, similarly for "
                "all plans"
            )
    priced = [plan.estimate for plan in listed if plan.estimate.price_source is not None]
    notes += dict.fromkeys(
        f"{row.gpu}: ${row.usd_per_gpu_hour:.2f} per GPU-hour, {row.price_source}" for row in priced
    )
    if evidence := [plan.estimate.network_evidence for plan in listed if plan.estimate.network_evidence]:
        sources = ", ".join(dict.fromkeys(_NETWORK[name] for name in evidence))
        notes.append(f"network speed from {sources}")
    first = ranked[0]
    if first.loss_per_usd is not None:
        notes.append(
            f"one dollar more would lower the first plan's loss by {first.loss_per_usd:.1e}, by the law "
            f"{first.law} (the paper's equation 1)"
        )
    notes.append("hours and dollars cover training steps only, not starting, saving and failures")
    return notes


def _batch(plan: Plan) -> str:
    return f"{plan.estimate.per_device_train_batch_size} x {plan.estimate.gradient_accumulation_steps}"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}"


def _evidence(plan: Plan) -> str:
    if plan.evidence == plan.memory_evidence:
        return plan.evidence
    return f"{plan.evidence}, memory {plan.memory_evidence}"
