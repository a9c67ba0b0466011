"""Which plans to take, and why not the others."""

from collections.abc import Callable
from dataclasses import dataclass

from slm_toolkit.predict.cost import Offer, price_sensitivity
from slm_toolkit.recommend.plans import Plan

TIE = 0.03
"relative: plans closer than that can't be told apart by any estimate"


def best_plans(
    found: list[Plan],
    *,
    objective: str,
    deadline_hours: float | None = None,
    budget_usd: float | None = None,
) -> list[Plan]:
    """Ranked by dollars or hours: of each training, GPU, count and strategy the best within the limits.

    What only fits tightly stands in for what fits nowhere else. By dollars, GPUs without a price come last.
    """
    within = [
        plan
        for plan in found
        if (deadline_hours is None or plan.hours <= deadline_hours)
        and (budget_usd is None or (plan.usd is not None and plan.usd <= budget_usd))
    ]
    score = score_of(objective)
    best: dict[tuple, Plan] = {}
    for plan in sorted(within, key=lambda plan: (plan.verdict != "fits", score(plan))):
        row = plan.estimate
        # other results, not only a rate
        training = (row.model, row.numerics, row.seq_len, row.reduce_dtype, row.peft, row.lora_r)
        best.setdefault((*training, row.gpu, row.usd_per_gpu_hour, row.num_gpus, row.strategy), plan)
    return sorted(best.values(), key=lambda plan: (plan.verdict != "fits", score(plan)))


def per_hardware(ranked: list[Plan]) -> list[Plan]:
    """The first plan of each model, GPU type and count; of one such only, all its plans."""
    first: dict[tuple, Plan] = {}
    for plan in ranked:
        first.setdefault(_hardware(plan), plan)
    return list(first.values()) if len(first) > 1 else ranked


def on_the_same_hardware(ranked: list[Plan], plan: Plan) -> list[Plan]:
    """The other strategies' plans there, ranked."""
    return [other for other in ranked if _hardware(other) == _hardware(plan) and other is not plan]


def faster_for_the_same(ranked: list[Plan], plan: Plan) -> Plan | None:
    """The fastest that costs as much as `plan` and fits as well, within TIE; None: it is that itself."""
    tied = [
        other
        for other in ranked
        if (other.usd is None) == (plan.usd is None)
        and (other.estimate.model, other.verdict) == (plan.estimate.model, plan.verdict)
        and _amount(other, "cost") <= _amount(plan, "cost") * (1 + TIE)
    ]
    fastest = min(tied, key=lambda other: other.hours)
    return fastest if fastest.hours < plan.hours * (1 - TIE) else None


def _hardware(plan: Plan) -> tuple:
    row = plan.estimate
    return row.model, row.numerics, row.seq_len, row.gpu, row.usd_per_gpu_hour, row.num_gpus


def score_of(objective: str) -> Callable[[Plan], tuple[float, ...]]:
    """Less is better: dollars, then GPU-hours of what has no price; or hours; the other breaks ties."""
    if objective == "time":
        return lambda plan: (plan.hours, *_cost(plan))
    return lambda plan: (*_cost(plan), plan.hours)


def _cost(plan: Plan) -> tuple[float, float]:
    return (True, plan.gpu_hours) if plan.usd is None else (False, plan.usd)


def _amount(plan: Plan, objective: str) -> float:
    """In the unit that `objective` ranks this plan by."""
    return plan.hours if objective == "time" else _cost(plan)[1]


@dataclass(frozen=True)
class Reason:
    """Why a plan is behind the winner."""

    ratio: float | None
    "its dollars, GPU-hours or hours over the winner's; None where only one of them has a price"
    parts: tuple[tuple[str, float], ...]
    "parts of the step that cost more than the winner's, as shares of the winner's total, largest first"
    ties_at_usd_per_gpu_hour: float | None
    "the price of its GPU at which it would tie; None on the winner's GPU, without a price, by time"


def reason_of(plan: Plan, winner: Plan, *, objective: str) -> Reason:
    if objective == "cost" and (plan.usd is None) != (winner.usd is None):
        return Reason(None, (), None)
    ratio = _amount(plan, objective) / _amount(winner, objective)
    of_plan, of_winner = (_parts_per_token(each, objective) for each in (plan, winner))
    total = sum(of_winner.values())
    more = {name: (seconds - of_winner[name]) / total for name, seconds in of_plan.items()}
    parts = tuple(sorted(((n, v) for n, v in more.items() if v >= 0.005), key=lambda pair: -pair[1]))
    ties_at = None
    other_gpu = plan.estimate.gpu != winner.estimate.gpu
    if objective == "cost" and other_gpu and plan.usd is not None:
        ties_at = price_sensitivity(winner=_offer(winner), runner_up=_offer(plan)).usd_per_gpu_hour
    return Reason(ratio, parts, ties_at)


def _parts_per_token(plan: Plan, objective: str) -> dict[str, float]:
    """Dollars (GPU-seconds without prices) or seconds that each part of a step takes of a token."""
    row = plan.estimate
    if objective == "time":
        each = 1.0
    else:
        each = row.num_gpus * (row.usd_per_gpu_hour if plan.usd is not None else 1.0)
    return {name: each * seconds / plan.tokens_per_step for name, seconds in row.parts_seconds.items()}


def _offer(plan: Plan) -> Offer:
    return Offer(plan.tokens_per_second, plan.estimate.usd_per_gpu_hour, plan.estimate.num_gpus)
