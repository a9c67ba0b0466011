"""Choose and rank the best plans."""

import math
from operator import attrgetter

from slm_toolkit.recommend.plans import Plan

TIE = 0.03
"relative difference below which estimates can't rank plans"


def best_plans(
    plans: list[Plan],
    *,
    objective: str,
    deadline_hours: float | None = None,
    budget_usd: float | None = None,
) -> list[Plan]:
    """Return the best plan within the limits for each training, GPU type, count and strategy, ranked.

    `objective` is cost or time. A plan that only may fit is taken if no other plan fits, and comes after
    all plans that fit. If ranked by cost, GPUs without a price come last. Ties go to the simplest plan.
    """
    best: dict[tuple, Plan] = {}

    def fastest_first(plan: Plan) -> tuple[bool, float]:
        return plan.estimate.verdict != "fits", plan.hours

    for plan in sorted(plans, key=fastest_first):
        is_late = deadline_hours is not None and plan.hours > deadline_hours
        if is_late or (budget_usd is not None and (plan.usd is None or plan.usd > budget_usd)):
            continue
        best.setdefault((_hardware(plan), _TRAINING(plan.estimate)), plan)
    return _simplest_of_ties(list(best.values()), objective)


def _simplest_of_ties(plans: list[Plan], objective: str) -> list[Plan]:
    """Return the plans by hours or dollars.

    Of plans within TIE of the best one, or of the best one on their hardware, the simplest comes first.
    """

    def late(plan: Plan) -> tuple[bool, bool]:
        return plan.estimate.verdict != "fits", objective == "cost" and plan.usd is None

    least: dict[tuple, float] = {}
    for plan in plans:
        for key in (late(plan), (late(plan), _hardware(plan))):
            least[key] = min(amount(plan, objective), least.get(key, math.inf))

    def order(plan: Plan) -> tuple:
        value, of_hardware = amount(plan, objective), least[late(plan), _hardware(plan)]
        counted = of_hardware if value <= of_hardware * (1 + TIE) else value
        counted = max(counted, least[late(plan)] * (1 + TIE))
        return late(plan), counted, plan.strategy.simplicity, plan.estimate.num_gpus, value

    return sorted(plans, key=order)


def per_hardware(ranked: list[Plan]) -> list[Plan]:
    """Return the first plan of each model, GPU type and count; all plans if they share one hardware."""
    first: dict[tuple, Plan] = {}
    for plan in ranked:
        first.setdefault(_hardware(plan), plan)
    return list(first.values()) if len(first) > 1 else ranked


def _hardware(plan: Plan) -> tuple:
    return _HARDWARE(plan.estimate)


_HARDWARE = attrgetter("model", "numerics", "seq_len", "gpu", "usd_per_gpu_hour", "num_gpus")
_TRAINING = attrgetter("peft", "lora_r", "strategy")
"settings that change the result of the training, not only its speed; a strategy has its own rows, too"


def amount(plan: Plan, objective: str) -> float:
    """Return the hours or dollars (GPU-hours without a price) that `objective` compares."""
    if objective == "time":
        return plan.hours
    return plan.gpu_hours if plan.usd is None else plan.usd
