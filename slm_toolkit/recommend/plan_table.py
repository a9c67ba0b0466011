"""Print ranked plans: the table, the reasons for the order, advice, and the commands."""

import dataclasses

from rich.console import Group, RenderableType
from rich.text import Text

from slm_toolkit.config.run_config import COLUMN_TITLES, FLAGS, RunConfig
from slm_toolkit.model.from_config import GPT_TYPES
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.recommend.launch_files import check_command, launch_command
from slm_toolkit.recommend.plans import HIGHEST_PUBLISHED_MFU, Plan
from slm_toolkit.recommend.ranking import (
    TIE,
    Reason,
    faster_at_the_same_cost,
    on_the_same_hardware,
    per_hardware,
    reason_of,
    score_of,
)
from slm_toolkit.recommend.scaling_laws import LAW, loss
from slm_toolkit.report.tables.estimate import NETWORK_SOURCES, untimed_notes
from slm_toolkit.report.tables.fitted import (
    DASH,
    Column,
    columns_that_fit,
    command_line,
    gib,
    percent,
    rate,
    setting,
    table_of,
)

_SPEED_EVIDENCE = {"compared": "estimated*", "none": "never measured"}
"cells of plans without a record whose GPU type has no fitted constants"


def plan_report(
    ranked: list[Plan], advice: list[str], *, top: int, objective: str, width: int
) -> RenderableType:
    """Return the report, to be printed with `crop=False`.

    `advice` has a sentence for each change that would make the first plan faster or cheaper.
    """
    rows = per_hardware(ranked)
    listed, winner = rows[:top], ranked[0]
    parts: list[RenderableType] = [_heading(ranked), _table(listed, width=width)]
    if same := _settings_of_all(listed):
        parts.append(Text(f"all rows: {same}"))
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
    if winner.spec.model_type in GPT_TYPES:
        return [Text(f"\na {winner.spec.model_type} can be estimated, not trained here: nothing to launch")]
    return [
        Text("\nto launch the first plan:", style="bold"),
        command_line(launch_command(winner)),
        Text("to measure it first:", style="bold"),
        command_line(check_command(winner)),
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
    row, unit = winner.estimate, "hours" if objective == "time" else "costs"
    line = f"{unit} on {row.num_gpus} x {row.gpu} against {row.strategy}: {', '.join(differences)}"
    return [Text(line)]


def reasons(plans: list[Plan], *, objective: str) -> list[str]:
    """Return a line on the plans that tie with the first one, and a line on each other plan."""
    winner, ties, lines = plans[0], [1], []
    for number, plan in enumerate(plans[1:], 2):
        reason = reason_of(plan, winner, objective=objective)
        row = plan.estimate
        name = f"{number}: {row.num_gpus} x {row.gpu} {row.strategy}"
        caveat = _caveat(plan)
        if reason.ratio is None:
            lines.append(f"{name}: without a price it can't be compared in dollars")
        elif abs(reason.ratio - 1) < TIE and caveat == _caveat(winner):
            ties.append(number)
        else:
            lines.append(f"{name}: {_difference(reason, plan, objective)}" + (caveat and f", but {caveat}"))
    if len(ties) > 1:
        verb = "take" if objective == "time" else "cost"
        lines.insert(
            0,
            f"rows {_listed(ties)} {verb} the same within {TIE:.0%}, and estimates are no more precise: "
            "of these the simplest strategy comes first, then the fewest GPUs",
        )
    return lines


def _difference(reason: Reason, plan: Plan, objective: str) -> str:
    """Return how far a plan is from the first one: `16% more dollars (matmul +16%); ties at $1.37 ...`."""
    unit = "hours" if objective == "time" else "dollars" if plan.usd is not None else "GPU-hours"
    more = "more" if reason.ratio >= 1 else "fewer"
    parts = ", ".join(f"{part.replace('_', ' ')} {share:+.0%}" for part, share in reason.parts[:3])
    text = f"{abs(reason.ratio - 1):.0%} {more} {unit}" + (f" ({parts})" if parts else "")
    if reason.ties_at_usd_per_gpu_hour is not None and reason.ratio >= 1:
        text += f"; it ties with row 1 at ${reason.ties_at_usd_per_gpu_hour:.2f} per GPU-hour"
    return text


def _caveat(plan: Plan) -> str:
    """Return why a plan comes after plans that cost more, or an empty string."""
    if plan.verdict != "fits":
        return f"it fits with a probability of {plan.estimate.fit_probability:.0%}"
    return ""


def _listed(numbers: list[int]) -> str:
    """Return `1, 2 and 5`, or `1 to 4` for consecutive numbers."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


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
        if plan.starts_from is not None:
            model = f"{model}, from the weights of {plan.starts_from}"
        expected = f", expected loss {plan.expected_loss:.2f} ({LAW})" if plan.expected_loss else ""
        words.append(
            f"{model}: {_size(plan.num_tokens)} tokens, {plan.num_steps:,} steps of "
            f"{_size(plan.tokens_per_step)} tokens{expected}"
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
_DEFAULTS = RunConfig().with_defaults(has_gpu=True)


def _table(plans: list[Plan], *, width: int) -> RenderableType:
    columns, _ = columns_that_fit(_columns(plans), width=width)
    styles = ["bold", *("yellow" if _caveat(plan) else None for plan in plans[1:])]
    return table_of(columns, row_styles=styles)


def _settings_of_all(plans: list[Plan]) -> str:
    """Return the settings without a column that all plans share and that differ from the defaults."""
    rows = [plan.estimate for plan in plans]
    values = {name: getattr(rows[0], name) for name in _SETTINGS}
    return ", ".join(
        FLAGS[name].heading.format(value)
        for name, value in values.items()
        if value is not None
        and value != getattr(_DEFAULTS, name)
        and len({getattr(row, name) for row in rows}) == 1
    )


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
        more = len(ranked) - len(listed)
        notes.append(f"{more} {'row' if more == 1 else 'rows'} more: --top N shows N, --json all")
    if any(plan.verdict != "fits" for plan in listed):
        notes.append("yellow: may not fit, so measure it first")
    if full := [str(number) for number, plan in enumerate(listed, 1) if plan.estimate.is_nearly_full]:
        notes.append(
            f"nearly full, and slower if PyTorch's allocator has to free blocks and retry: {', '.join(full)}"
        )
    if any(plan.evidence == "estimated" for plan in listed):
        row = listed[0].estimate
        if row.step_seconds:
            slow, fast = row.step_seconds / row.step_high_seconds, row.step_seconds / row.step_low_seconds
            notes.append(
                f"real speeds are likely {1 - slow:.0%} lower to {fast - 1:.0%} higher than the estimates, "
                "and off by a similar factor in all rows"
            )
    notes += _evidence_notes(listed)
    priced = [plan.estimate for plan in listed if plan.estimate.price_source is not None]
    notes += dict.fromkeys(
        f"{row.gpu}: ${row.usd_per_gpu_hour:.2f} per GPU-hour, {row.price_source}" for row in priced
    )
    if evidence := [plan.estimate.network_evidence for plan in listed if plan.estimate.network_evidence]:
        sources = ", ".join(dict.fromkeys(NETWORK_SOURCES[name] for name in evidence))
        notes.append(f"network speed from {sources}")
    if (sentence := _gain_of_dollars(ranked[0])) is not None:
        notes.append(sentence)
    notes.append("hours and dollars cover training steps only, not starting, saving and failures")
    return notes


def _evidence_notes(listed: list[Plan]) -> list[str]:
    """Return notes on what no run supports: GPU types, and the memory of compiled layers."""

    def gpus_with(evidence: str) -> str:
        names = [plan.estimate.gpu for plan in listed if plan.speed_evidence == evidence]
        return ", ".join(dict.fromkeys(names))

    notes = []
    if names := gpus_with("compared"):
        notes.append(f"* {names}: few published runs support the estimated speed")
    if names := gpus_with("none"):
        notes.append(f"never measured: no published run on {names}; the speed comes from its data sheet")
    notes += dict.fromkeys(
        f"{plan.estimate.gpu}: {plan.estimate.calibration}"
        for plan in listed
        if plan.estimate.calibration and plan.speed_evidence in ("compared", "none")
    )
    if limited := dict.fromkeys(plan.estimate.gpu for plan in listed if plan.slowed_by > 1):
        highest = f"the highest published MFU, {HIGHEST_PUBLISHED_MFU:.0%}"
        notes.append(f"{', '.join(limited)}: plans with a higher estimate count with {highest}")
    if any(plan.estimate.torch_compile and plan.memory_evidence == "estimated" for plan in listed):
        notes.append("compiled: the memory that Inductor's kernels keep is assumed, never traced")
    estimated = [plan.estimate for plan in listed if plan.memory_evidence == "estimated"]
    return [*notes, *untimed_notes(estimated)]


_NOTICED_LOSS = 0.005
"smallest difference of a loss that two digits show"


def _gain_of_dollars(plan: Plan) -> str | None:
    """Return a sentence: how much the smallest power of ten dollars lowers the plan's loss noticeably."""
    if plan.loss_per_usd is None or plan.usd is None:
        return None

    def gain(dollars: float) -> float:
        more_tokens = plan.num_tokens * (1 + dollars / plan.usd)
        return plan.expected_loss - loss(plan.spec.num_params, more_tokens)

    amounts = [dollars for power in range(7) if (dollars := 10**power) <= plan.usd]
    noticed = next((dollars for dollars in amounts if gain(dollars) >= _NOTICED_LOSS), plan.usd)
    return (
        f"${noticed:,.0f} more on row 1 lowers its expected loss by about {gain(noticed):.1g} "
        f"(law {LAW}; the paper's equation 1)"
    )


def _batch(plan: Plan) -> str:
    return f"{plan.estimate.per_device_train_batch_size} x {plan.estimate.gradient_accumulation_steps}"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def _evidence(plan: Plan) -> str:
    speed = _SPEED_EVIDENCE.get(plan.speed_evidence, plan.evidence)
    if plan.evidence == plan.memory_evidence:
        return speed
    return f"{speed}, memory {plan.memory_evidence}"
