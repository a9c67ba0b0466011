"""Plans: configurations for a training job, with their hours, dollars and expected loss."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.hardware.gpus import Gpu, find_gpu
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.cost import Offer, budget, price_sensitivity
from slm_toolkit.predict.estimate import Estimate, estimate
from slm_toolkit.predict.setup.other_trainers import OtherTrainer
from slm_toolkit.predict.setup.setup import Deployment, Setup, config_as_launched
from slm_toolkit.recommend.scaling_laws import Law, loss, loss_per_usd, num_params_of
from slm_toolkit.record.files import find_records
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.recorded_estimate import config_that_ran, strategy_that_ran
from slm_toolkit.report.rows import row_of
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.strategy import Strategy, contradictions

_GLOBAL_BATCH_TOLERANCE = 0.10
"allowed relative difference from the requested tokens per step, because micro-steps are whole numbers"


@dataclass(frozen=True)
class GpuOffer:
    """A GPU type that can be rented, and the numbers of GPUs to try."""

    gpu: Gpu
    counts: tuple[int, ...]
    deployment: Deployment


@dataclass(frozen=True)
class Workload:
    """The training job, independent of the hardware."""

    asked_model: str
    "the value of the flag --model"

    spec: ModelSpec
    num_tokens: float
    global_batch_tokens: int
    law: Law


@dataclass(frozen=True)
class Plan:
    """One configuration for the workload."""

    estimate: Estimate
    spec: ModelSpec
    config: RunConfig
    "the flags of the command, before the user's own files change them"
    strategy: Strategy
    deployment: Deployment
    num_tokens: float
    num_steps: int
    tokens_per_step: int
    tokens_per_second: float
    "measured if there is a record of the configuration, else estimated"
    evidence: str
    "source of tokens_per_second: measured or estimated"
    memory_evidence: str
    "source of verdict and headroom: measured, rehearsed or estimated"
    verdict: str
    headroom_bytes: int
    hours: float
    usd: float | None
    law: str
    "a key of scaling_laws.LAWS"
    expected_loss: float | None
    "by `law`, for its data and tokenizer; None with adapters, which no law covers"
    loss_per_usd: float | None
    "the paper's equation 1: how much one dollar more would lower the loss"

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.estimate.num_gpus


@dataclass(frozen=True)
class Observed:
    """The measurements of one configuration in the records; None if no record has them."""

    tokens_per_second: float | None
    peak_allocated_bytes: int | None
    memory_evidence: str | None
    is_out_of_memory: bool


Observations = Mapping[tuple, Observed]


def observation_key(
    spec: ModelSpec, gpu_name: str | None, num_gpus: int, strategy: Strategy, config: RunConfig
) -> tuple:
    """Return the key of a configuration; a record applies to a configuration with the same key.

    The key holds the model's shape, the hardware, the sharding and the flags that an estimate counts.
    """
    shape = dataclasses.replace(spec, name="", source="", path=None)
    names = (name for name, flag in FLAGS.items() if flag.estimate == "counts" and name != "model")
    sharding = (strategy.name, strategy.engine, strategy.zero_stage, strategy.sharding.reshard_after_forward)
    return shape, gpu_name, num_gpus, *sharding, *(getattr(config, name) for name in names)


@dataclass(frozen=True)
class PlanSearch:
    """The result of a search."""

    plans: list[Plan]
    "all plans that fit, including tight ones"
    left_out: list[str]
    "a sentence for each combination that was not considered, with the reason"


def search(
    workload: Workload,
    offers: list[GpuOffer],
    strategies: list[Strategy],
    configs: list[RunConfig],
    *,
    gpus_per_node: int,
    observations: Observations,
    software: str = "2026",
    like: OtherTrainer | None = None,
) -> PlanSearch:
    """Return the plans of all GPUs, strategies and `configs`.

    `configs` must have their defaults and one micro-step, and be sorted by batch. The number of micro-steps
    follows from the workload's tokens per step. A batch without a record is skipped if a
    smaller batch did not fit. Batches with one micro-step and with several are judged separately, because a
    single micro-step may take less memory than several.
    """
    result = PlanSearch([], [])
    for offer in offers:
        for count in offer.counts:
            micro_steps = {config: _micro_steps(workload, config, count) for config in configs}
            if not any(micro_steps.values()):
                goal = f"{workload.global_batch_tokens:,.0f} tokens per step (--global_batch_tokens)"
                result.left_out.append(
                    f"{count} x {offer.gpu.name}: no batch gives {goal} within {_GLOBAL_BATCH_TOLERANCE:.0%}"
                )
            for strategy in strategies:
                if strategy.is_single != (count == 1):
                    continue
                considered = [
                    dataclasses.replace(config, gradient_accumulation_steps=steps)
                    for config, steps in micro_steps.items()
                    if steps is not None
                ]
                setup = Setup(
                    workload.spec,
                    strategy,
                    configs[0],  # replaced by each config of `considered`
                    num_gpus=count,
                    gpus_per_node=gpus_per_node,
                    gpu=offer.gpu,
                    software=software,
                    like=like,
                    deployment=offer.deployment,
                )
                _search_strategy(workload, offer, setup, considered, observations, result)
    result.left_out[:] = dict.fromkeys(result.left_out)
    return result


def _search_strategy(
    workload: Workload,
    offer: GpuOffer,
    setup: Setup,
    configs: list[RunConfig],
    observations: Observations,
    result: PlanSearch,
) -> None:
    """Add the plans of one strategy on one number of GPUs to `result`.

    `configs` replace the config of `setup` one after another.
    """
    count, strategy = setup.num_gpus, setup.strategy
    where = f"{count} x {offer.gpu.name} {strategy.name}"
    try:
        strategy = fit_groups(strategy, num_ranks=count, ranks_per_node=setup.ranks_per_node)
    except ValueError as error:
        result.left_out.append(str(error).splitlines()[0])
        return
    setup = dataclasses.replace(setup, strategy=strategy)
    if problems := setup.placement.problems(num_gpus=count, gpus_per_node=setup.ranks_per_node):
        result.left_out.extend(f"{where}: {problem}" for problem in problems)
        return
    smallest_that_failed: dict[tuple[RunConfig, bool], int] = {}
    for config in configs:
        if problems := contradictions(strategy, config):
            result.left_out.extend(problems)
            continue
        launched = dataclasses.replace(setup, config=config_as_launched(config, setup.strategy))
        observed = _observed(launched, observations)
        batch, accumulates = config.per_device_train_batch_size, config.gradient_accumulation_steps > 1
        any_batch = dataclasses.replace(config, per_device_train_batch_size=1, gradient_accumulation_steps=1)
        if observed is None and batch >= smallest_that_failed.get((any_batch, accumulates), math.inf):
            continue
        row = estimate(launched)
        if row.tokens_per_second is None and (observed is None or observed.tokens_per_second is None):
            reason = "the network between nodes is unknown (give --inter_node_gbps)"
            result.left_out.append(f"{count} x {offer.gpu.name}: {reason}")
            continue
        if not row.fits and observed is None:
            smallest_that_failed[any_batch, accumulates] = batch
        plan = _plan(workload, row, config, strategy, offer, observed)
        if plan is not None:
            result.plans.append(plan)


def _observed(setup: Setup, observations: Observations) -> Observed | None:
    """Return the observation on this GPU type, else that of a rehearsal without a GPU, else None."""
    if not observations:
        return None
    keys = (
        observation_key(setup.spec, name, setup.num_gpus, setup.strategy, setup.config)
        for name in (setup.gpu.name, None)
    )
    return next((observations[key] for key in keys if key in observations), None)


def _micro_steps(workload: Workload, config: RunConfig, num_gpus: int) -> int | None:
    """Return the number of micro-steps nearest to the workload's tokens per step, or None if too far off."""
    tokens_per_micro_step = num_gpus * config.per_device_train_batch_size * config.seq_len
    micro_steps = max(1, round(workload.global_batch_tokens / tokens_per_micro_step))
    difference = abs(micro_steps * tokens_per_micro_step / workload.global_batch_tokens - 1)
    return micro_steps if difference <= _GLOBAL_BATCH_TOLERANCE else None


def _plan(
    workload: Workload,
    row: Estimate,
    config: RunConfig,
    strategy: Strategy,
    offer: GpuOffer,
    observed: Observed | None,
) -> Plan | None:
    """Return the plan of an estimate, or None if it does not fit or its time is unknown."""
    verdict, headroom, memory_evidence = row.verdict, row.headroom_bytes, "estimated"
    tokens_per_second, evidence = row.tokens_per_second, "estimated"
    if observed is not None:
        if observed.is_out_of_memory:
            return None
        if observed.tokens_per_second is not None:
            tokens_per_second, evidence = observed.tokens_per_second, "measured"
        if observed.peak_allocated_bytes is not None:
            context = row.parts["cuda_context"]
            headroom = offer.gpu.memory_bytes - context - observed.peak_allocated_bytes
            memory_evidence = observed.memory_evidence
            is_measured = memory_evidence == "measured"
            verdict = "fits" if is_measured or headroom >= 0 else "does not fit"
    if verdict not in ("fits", "tight") or tokens_per_second is None:
        return None
    tokens_per_step = (
        row.num_gpus * config.gradient_accumulation_steps * config.per_device_train_batch_size
    ) * config.seq_len
    price = offer.deployment.price
    paid = {"tokens_per_second": tokens_per_second, "num_gpus": row.num_gpus}
    per_gpu_hour = price.usd_per_gpu_hour if price else 0.0
    needed = budget(num_tokens=workload.num_tokens, usd_per_gpu_hour=per_gpu_hour, **paid)
    num_params = num_params_of(workload.law, workload.spec)
    trains_all = config.peft == "none"
    return Plan(
        estimate=row,
        spec=workload.spec,
        config=config,
        strategy=strategy,
        deployment=offer.deployment,
        num_tokens=workload.num_tokens,
        num_steps=math.ceil(workload.num_tokens / tokens_per_step),
        tokens_per_step=tokens_per_step,
        tokens_per_second=tokens_per_second,
        evidence=evidence,
        memory_evidence=memory_evidence,
        verdict=verdict,
        headroom_bytes=headroom,
        hours=needed.hours,
        usd=needed.usd if price else None,
        law=workload.law.name,
        expected_loss=loss(workload.law, num_params, workload.num_tokens) if trains_all else None,
        loss_per_usd=loss_per_usd(
            workload.law, num_params, workload.num_tokens, usd_per_gpu_hour=per_gpu_hour, **paid
        )
        if price and trains_all
        else None,
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as a dict for JSON: the estimate's keys, then the plan's keys."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    for name in ("estimate", "spec", "config", "strategy", "deployment"):
        del fields[name]
    return {**vars(plan.estimate), **fields, "gpu_hours": plan.gpu_hours}


# Measurements in records, for the configurations that `slm recommend` considers.


def observations_of(folders: list[Path]) -> dict[tuple, Observed]:
    """Return the observations of all records, keyed by `observation_key`.

    A rehearsal without a GPU has the GPU None, and applies to all GPUs. Raise ValueError if there are no
    records.
    """
    if not folders:
        return {}
    records, problems = find_records(folders)
    if not records:
        nothing = f"no records under {folders[0]}\nhint: `slm compare` writes them"
        raise ValueError(problems[0] if problems else nothing)
    groups: dict[tuple, list[tuple[Path, RunRecord]]] = {}
    for path, record in records:
        if record.engine is None or record.world_size is None or record.is_parity_reference:
            continue
        gpu = find_gpu(record.gpu)
        if gpu is None and not (record.is_rehearsal and record.gpu is None):
            continue  # CPU processes, and unknown GPUs
        name = gpu.name if gpu else None
        strategy, config = strategy_that_ran(record), config_that_ran(record)
        key = observation_key(record.spec, name, record.world_size, strategy, config)
        groups.setdefault(key, []).append((path, record))
    return {key: _observed_in(launches) for key, launches in groups.items()}


def _observed_in(launches: list[tuple[Path, RunRecord]]) -> Observed:
    """Return the median rate and the largest peak of several launches.

    The peak is that of measured launches; of rehearsals if none was measured.
    """
    rows = [row_of([launch]) for launch in launches]
    ok = [row for row in rows if row.status == "ok"]
    measured = [row for row in ok if not row.is_rehearsed]
    rates = [row.tokens_per_second for row in measured if row.tokens_per_second is not None]
    peaked = [row for row in measured or ok if row.peak_allocated_bytes is not None]
    return Observed(
        tokens_per_second=median(rates) if rates else None,
        peak_allocated_bytes=max((row.peak_allocated_bytes for row in peaked), default=None),
        memory_evidence=peaked[0].evidence if peaked else None,
        is_out_of_memory=not ok and any(row.status == "oom" for row in rows),
    )


# Choose the best plans, and explain why the others rank lower.

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

    `objective` is cost or time. A plan whose verdict is tight is taken only if no other plan fits, and comes
    after all plans that fit. If ranked by cost, GPUs without a price come last.
    """
    within = [
        plan
        for plan in plans
        if (deadline_hours is None or plan.hours <= deadline_hours)
        and (budget_usd is None or (plan.usd is not None and plan.usd <= budget_usd))
    ]
    score = score_of(objective)
    best: dict[tuple, Plan] = {}
    for plan in sorted(within, key=lambda plan: (plan.verdict != "fits", score(plan))):
        row = plan.estimate
        # these settings change the result of the training, not only its speed
        dtypes = (row.numerics, row.reduce_dtype, row.grad_dtype, row.adam_dtype)
        training = (row.model, *dtypes, row.seq_len, row.peft, row.lora_r)
        best.setdefault((*training, row.gpu, row.usd_per_gpu_hour, row.num_gpus, row.strategy), plan)
    return sorted(best.values(), key=lambda plan: (plan.verdict != "fits", score(plan)))


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
    fastest = min(tied, key=lambda other: other.hours)
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
    "parts of the step that cost more than in the winner, as fractions of the winner's total; largest first"
    ties_at_usd_per_gpu_hour: float | None
    "GPU price at which the plan would tie; None for the winner's GPU, without a price, or if ranked by time"


def reason_of(plan: Plan, winner: Plan, *, objective: str) -> Reason:
    if objective == "cost" and (plan.usd is None) != (winner.usd is None):
        return Reason(None, (), None)
    ratio = _amount(plan, objective) / _amount(winner, objective)
    of_plan, of_winner = (_parts_per_token(candidate, objective) for candidate in (plan, winner))
    total = sum(of_winner.values())
    more = {name: (seconds - of_winner[name]) / total for name, seconds in of_plan.items()}
    parts = tuple(sorted(((n, v) for n, v in more.items() if v >= 0.005), key=lambda pair: -pair[1]))
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
