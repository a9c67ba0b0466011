"""Print ranked plans: the table, what ties, and the commands."""

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import COLUMN_TITLES
from slm_toolkit.recommend.launch_files import launch_command
from slm_toolkit.recommend.plans import Plan
from slm_toolkit.recommend.ranking import TIE, amount, per_hardware
from slm_toolkit.recommend.scaling_laws import LAW
from slm_toolkit.report.tables.estimate import FLAGS_SHOWN, differs, same_settings
from slm_toolkit.report.tables.fitted import (
    DASH,
    Column,
    columns_that_fit,
    command_line,
    gib,
    rate,
    setting,
    table_of,
)

_SPEED_EVIDENCE = {"compared": "rarely measured", "none": "never measured"}
"cells of plans whose GPU type has no fitted constants; others are estimated"


def plan_report(ranked: list[Plan], *, top: int, objective: str, width: int) -> RenderableType:
    """Return the report, to be printed with `crop=False`."""
    rows = per_hardware(ranked)
    listed = rows[:top]
    columns, _ = columns_that_fit(_columns(listed), width=width)
    same = same_settings([plan.estimate for plan in listed], _SETTINGS)
    lines = [f"all rows: {same}", *reasons(listed, objective=objective)]
    if more := len(rows) - len(listed):
        lines.append(f"--top {len(rows)} shows {more} more, --json all")
    priced = [plan.estimate for plan in listed if plan.usd is not None]
    lines += dict.fromkeys(
        f"{row.gpu}: ${row.usd_per_gpu_hour:.2f} per GPU-hour, {row.price_source}" for row in priced
    )
    lines.append("hours and dollars cover training steps only, not starting, saving and failures")
    lines.append("\nto launch the first plan:")
    return Group(
        Text(_heading(ranked), style="bold"),
        table_of(columns),
        *map(Text, lines),
        command_line(launch_command(ranked[0])),
    )


def reasons(plans: list[Plan], *, objective: str) -> list[str]:
    """Return a line on the plans that tie with the first one, if there are any."""
    winner = plans[0]
    ties = [
        str(number)
        for number, plan in enumerate(plans[1:], 2)
        if (plan.usd is None) == (winner.usd is None) and plan.estimate.verdict == winner.estimate.verdict
        if abs(amount(plan, objective) / amount(winner, objective) - 1) < TIE
    ]
    return [
        f"rows within {TIE:.0%} of row 1, too close to rank: {', '.join(ties)}. Of these the simplest "
        "strategy comes first, then the fewest GPUs"
    ] * bool(ties)


def nothing_found(
    plans: list[Plan], *, deadline_hours: float | None, budget_usd: float | None
) -> RenderableType:
    """Return the text for no plan within the limits: the closest plans, or why there is no plan."""
    if not plans:
        return Text("no plan: use more or larger GPUs or a smaller model (`slm estimate` shows by how much)")
    limits = [deadline_hours and f"{deadline_hours:g} h", budget_usd and f"${budget_usd:,.2f}"]
    lines = [f"nothing is within {' and '.join(filter(None, limits))}"]
    fastest = min(plans, key=lambda plan: plan.hours)
    cheapest = min(plans, key=lambda plan: (plan.usd is None, amount(plan, "cost")))
    for name, plan in (("fastest", fastest), ("cheapest", cheapest)):
        row = plan.estimate
        cost = "no price known" if plan.usd is None else _usd(plan.usd)
        lines.append(
            f"the {name}: {row.num_gpus} x {row.gpu}, {row.strategy}: {_hours(plan.hours)} h, {cost}"
        )
    return Text("\n".join(lines))


def _heading(ranked: list[Plan]) -> str:
    """Return the tokens, steps and expected loss of each model's best plan."""
    lines = {}
    for plan in ranked:
        weights = f", from the weights of {plan.starts_from}" if plan.starts_from is not None else ""
        expected = f", expected loss {plan.expected_loss:.2f} ({LAW})" if plan.expected_loss else ""
        lines.setdefault(
            plan.estimate.model,
            f"{plan.estimate.model}{weights}: {_size(plan.num_tokens)} tokens, {plan.num_steps:,} steps of "
            f"{plan.tokens_per_step:,} tokens{expected}",
        )
    return "\n".join(lines.values())


def _size(number: float) -> str:
    """20.0B, 50.0M, 3,072"""
    for unit, name in ((1e9, "B"), (1e6, "M")):
        if number >= unit:
            return f"{number / unit:,.1f}{name}"
    return f"{number:,.0f}"


_IN_COLUMNS = ("per_device_train_batch_size", "gradient_accumulation_steps")
_SETTINGS = [name for name in FLAGS_SHOWN if name not in _IN_COLUMNS]
"settings that have a column if the plans differ in them"


def _columns(plans: list[Plan]) -> list[Column]:
    rows = [plan.estimate for plan in plans]

    def texts(title: str, cells: list[str], drop_order: int = 0) -> Column:
        return Column(title, cells, drop_order, justify="left")

    return [
        Column("", [str(number) for number in range(1, len(plans) + 1)]),
        texts("GPUs", [f"{row.num_gpus} x {row.gpu}" for row in rows]),
        texts("strategy", [row.strategy for row in rows]),
        *(
            texts(COLUMN_TITLES[name], [setting(getattr(row, name)) for row in rows])
            for name in _SETTINGS
            if differs(rows, name)
        ),
        texts(
            "batch x\nmicro-steps",
            [f"{row.per_device_train_batch_size} x {row.gradient_accumulation_steps}" for row in rows],
            4,
        ),
        Column("tokens/s", [rate(row.tokens_per_second) for row in rows], 3),
        Column("hours", [_hours(plan.hours) for plan in plans]),
        Column("$", [_usd(plan.usd) for plan in plans]),
        Column("headroom\nGiB", [gib(row.headroom_bytes) for row in rows], 2),
        texts("evidence", list(map(_evidence, plans)), 1),
    ]


def _usd(value: float | None) -> str:
    if value is None:
        return DASH
    return f"${value:,.0f}" if value >= 100 else f"${value:,.2f}"


def _hours(value: float) -> str:
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _evidence(plan: Plan) -> str:
    """Return what the speed stands on, and what is unsure about the plan."""
    words = [_SPEED_EVIDENCE.get(plan.speed_evidence, "estimated")]
    if plan.estimate.verdict != "fits":
        words.append(f"may fit {plan.estimate.fit_probability:.0%}")
    return ", ".join(words)
