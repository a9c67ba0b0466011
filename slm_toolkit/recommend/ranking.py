"""Choose the best plans, and explain why the others rank lower."""

from collections.abc import Callable
from dataclasses import dataclass

from slm_toolkit.predict.cost import Offer, price_sensitivity
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
    within = [
        plan
        for plan in plans
        if (deadline_hours is None or plan.hours <= deadline_hours)
        and (budget_usd is None or (plan.usd is not None and plan.usd <= budget_usd))
    ]
    score = score_of(objective)
    best: dict[tuple, Plan] = {}

    def order(plan: Plan) -> tuple[bool, list[float], float]:
        """Of plans slowed to one MFU, the one with the fastest estimate comes first."""
        return plan.verdict != "fits", [round(value, 6) for value in score(plan)], -plan.slowed_by

    for plan in sorted(within, key=order):
        row = plan.estimate
        # these settings change the result of the training, not only its speed
        dtypes = (row.numerics, row.reduce_dtype)
        training = (row.model, *dtypes, row.seq_len, row.peft, row.lora_r)
        best.setdefault((*training, row.gpu, row.usd_per_gpu_hour, row.num_gpus, row.strategy), plan)
    groups: dict[tuple[bool, bool], list[Plan]] = {}
    for plan in best.values():
        comes_late = (plan.verdict != "fits", objective == "cost" and plan.usd is None)
        groups.setdefault(comes_late, []).append(plan)
    return [plan for _, group in sorted(groups.items()) for plan in _simplest_of_ties(group, objective)]


def _simplest_of_ties(plans: list[Plan], objective: str) -> list[Plan]:
    """Return the plans by hours or dollars; of plans within TIE of the first one, the simplest comes first.

    Plans within TIE of the best one on the same hardware count as much as that one, so that plans of one
    hardware don't fall on both sides of a limit.
    """
    lowest: dict[tuple, float] = {}
    for plan in plans:
        hardware, amount = _hardware(plan), _amount(plan, objective)
        lowest[hardware] = min(amount, lowest.get(hardware, amount))

    def counted(plan: Plan) -> float:
        amount, least = _amount(plan, objective), lowest[_hardware(plan)]
        return least if amount <= least * (1 + TIE) else amount

    rest, ranked = sorted(plans, key=counted), []
    while rest:
        tied = [plan for plan in rest if counted(plan) <= counted(rest[0]) * (1 + TIE)]
        ranked += sorted(tied, key=lambda plan: (*_simplicity(plan), _amount(plan, objective)))
        rest = rest[len(tied) :]
    return ranked


def _simplicity(plan: Plan) -> tuple[int, int]:
    """Return a sort key, the simplest plan first: the strategy, then the number of GPUs."""
    return plan.strategy.simplicity, plan.estimate.num_gpus


def per_hardware(ranked: list[Plan]) -> list[Plan]:
    """Return the first plan of each model, GPU type and count; all plans if they share one hardware."""
    first: dict[tuple, Plan] = {}
    for plan in ranked:
        first.setdefault(_hardware(plan), plan)
    return list(first.values()) if len(first) > 1 else ranked


def on_the_same_hardware(ranked: list[Plan], plan: Plan) -> list[Plan]:
    """Return the other plans on the same hardware as `plan`, ranked."""
    return [other for other in ranked if _hardware(other) == _hardware(plan) and other is not plan]


def faster_at_the_same_cost(ranked: list[Plan], plan: Plan) -> Plan | None:
    """Return the fastest plan of the model with the same verdict that costs no more than `plan` (within TIE).

    Return None if it is not faster than `plan`.
    """
    tied = [
        other
        for other in ranked
        if (other.usd is None) == (plan.usd is None)
        and (other.estimate.model, other.verdict) == (plan.estimate.model, plan.verdict)
        and _amount(other, "cost") <= _amount(plan, "cost") * (1 + TIE)
    ]
    limit = min(other.hours for other in tied) * (1 + TIE)
    fastest = min((other for other in tied if other.hours <= limit), key=_simplicity)
    return fastest if fastest.hours < plan.hours * (1 - TIE) else None


def _hardware(plan: Plan) -> tuple:
    row = plan.estimate
    return row.model, row.numerics, row.seq_len, row.gpu, row.usd_per_gpu_hour, row.num_gpus


def score_of(objective: str) -> Callable[[Plan], tuple[float, ...]]:
    """Return a sort key: hours or dollars (GPU-hours without a price); the other one breaks ties."""
    if objective == "time":
        return lambda plan: (plan.hours, *_cost(plan))
    return lambda plan: (*_cost(plan), plan.hours)


def _cost(plan: Plan) -> tuple[float, float]:
    return (True, plan.gpu_hours) if plan.usd is None else (False, plan.usd)


def _amount(plan: Plan, objective: str) -> float:
    """Return the hours or dollars (GPU-hours without a price) that `objective` compares."""
    return plan.hours if objective == "time" else _cost(plan)[1]


@dataclass(frozen=True)
class Reason:
    """The reason why a plan ranks below the winner."""

    ratio: float | None
    "the plan's dollars, GPU-hours or hours divided by the winner's; None if only one of them has a price"
    parts: tuple[tuple[str, float], ...]
    """parts of the step that cost more than in the winner (less, if the plan costs less), as fractions of the
    winner's total; largest first"""
    ties_at_usd_per_gpu_hour: float | None
    "GPU price at which the plan would tie; None for the winner's GPU, without a price, or if ranked by time"


def reason_of(plan: Plan, winner: Plan, *, objective: str) -> Reason:
    if objective == "cost" and (plan.usd is None) != (winner.usd is None):
        return Reason(None, (), None)
    ratio = _amount(plan, objective) / _amount(winner, objective)
    of_plan, of_winner = (_parts_per_token(candidate, objective) for candidate in (plan, winner))
    total = sum(of_winner.values())
    more = {name: (seconds - of_winner[name]) / total for name, seconds in of_plan.items()}
    sign = 1 if ratio >= 1 else -1
    explain = [(name, share) for name, share in more.items() if sign * share >= 0.005]
    parts = tuple(sorted(explain, key=lambda pair: -abs(pair[1])))
    ties_at = None
    other_gpu = plan.estimate.gpu != winner.estimate.gpu
    if objective == "cost" and other_gpu and plan.usd is not None:
        ties_at = price_sensitivity(winner=_offer(winner), runner_up=_offer(plan)).usd_per_gpu_hour
    return Reason(ratio, parts, ties_at)


def _parts_per_token(plan: Plan, objective: str) -> dict[str, float]:
    """Return the seconds, or dollars (GPU-seconds without a price), per token of each part of a step.

    The dollars lack a constant factor, which cancels in ratios.
    """
    row = plan.estimate
    if objective == "time":
        factor = 1.0
    else:
        factor = row.num_gpus * (row.usd_per_gpu_hour if plan.usd is not None else 1.0)
    return {name: factor * seconds / plan.tokens_per_step for name, seconds in row.parts_seconds.items()}


def _offer(plan: Plan) -> Offer:
    return Offer(plan.tokens_per_second, plan.estimate.usd_per_gpu_hour, plan.estimate.num_gpus)
