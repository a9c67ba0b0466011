"""Plans: configurations for a training job, with their hours, dollars and expected loss."""

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.calibration import is_calibrated
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.model.families import with_kernels_of
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.estimate import Estimate, estimate
from slm_toolkit.predict.flag_checks import placement_problems
from slm_toolkit.predict.setup.setup import Deployment, Setup, config_as_launched, unknown_to_estimates
from slm_toolkit.recommend.scaling_laws import loss
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.strategy import Strategy

_ENOUGH_BATCHES = 2
"batches of one set of flags that fit and are estimated, the largest first: a smaller one is no faster"
_GLOBAL_BATCH_TOLERANCE = 0.10
"allowed relative difference from the requested tokens per step, because micro-steps are whole numbers"


@dataclass(frozen=True)
class GpuOffer:
    """A number of GPUs of one type that can be rented."""

    gpu: Gpu
    num_gpus: int
    deployment: Deployment


@dataclass(frozen=True)
class Workload:
    """The training job, independent of the hardware."""

    asked_model: str
    "the value of the flag --model"

    spec: ModelSpec
    num_tokens: float
    global_batch_tokens: float
    starts_from: str | None = None
    "folder or hub id of the weights that are trained further; None: random weights"


@dataclass(frozen=True)
class Plan:
    """One configuration for the workload."""

    estimate: Estimate
    spec: ModelSpec
    config: RunConfig
    "the flags of the command, before the user's own files change them"
    strategy: Strategy
    num_tokens: float
    num_steps: int
    tokens_per_step: int
    starts_from: str | None
    "folder or hub id of the weights that are trained further; None: random weights"
    speed_evidence: str
    "what supports tokens_per_second: calibrated (kernels timed on this GPU type) or `Gpu.speed_evidence`"
    hours: float
    usd: float | None
    expected_loss: float | None
    "by a scaling law, for its data and tokenizer; None for fine-tuning, which no law covers"

    @property
    def gpu_hours(self) -> float:
        return self.hours * self.estimate.num_gpus


@dataclass(frozen=True)
class PlanSearch:
    """The result of a search."""

    plans: list[Plan]
    "all plans that fit or may fit"
    left_out: list[str]
    "a sentence for each combination that was not considered, with the reason"


def search(
    workloads: list[Workload],
    offers: list[GpuOffer],
    strategies: list[Strategy],
    configs: list[RunConfig],
    *,
    gpus_per_node: int,
) -> PlanSearch:
    """Return the plans of all workloads, GPUs and strategies, with the `configs` of each workload's model.

    `configs` must have their defaults and one micro-step. The number of micro-steps follows from the
    workload's tokens per step. Kernels that the model does not have are replaced.
    """
    result, without_network = PlanSearch([], []), []
    for workload in workloads:
        own = [config for config in configs if config.model == workload.asked_model]
        own = list(dict.fromkeys(with_kernels_of(workload.spec, config) for config in own))
        counts = {offer.num_gpus for offer in offers}
        candidates = {count: candidates_of(workload, own, count) for count in counts}
        for offer in offers:
            count = offer.num_gpus
            if not candidates[count]:
                result.left_out.append(
                    f"{count} x {offer.gpu.name}: no batch gives {workload.global_batch_tokens:,.0f} tokens "
                    f"per step (--global_batch_tokens) within {_GLOBAL_BATCH_TOLERANCE:.0%}"
                )
            for strategy in strategies:
                if strategy.is_single != (count == 1):
                    continue
                setup = Setup(
                    workload.spec,
                    strategy,
                    own[0],  # replaced by each candidate's config
                    num_gpus=count,
                    gpus_per_node=gpus_per_node,
                    gpu=offer.gpu,
                    deployment=offer.deployment,
                )
                if setup.num_nodes > 1 and not setup.cluster.node_bytes_per_second(setup.ranks_per_node):
                    without_network.append(offer.gpu.name)
                    continue
                if problems := placement_problems([strategy], num_gpus=[count], gpus_per_node=gpus_per_node):
                    result.left_out.extend(problems)
                    continue
                _search_strategy(workload, setup, candidates[count], result)
    if without_network:
        names = ", ".join(dict.fromkeys(without_network))
        result.left_out.append(
            f"several nodes of {names}: the network between nodes is unknown (give --network)"
        )
    return PlanSearch(result.plans, list(dict.fromkeys(result.left_out)))


@dataclass(frozen=True)
class Candidate:
    """A config with its micro-steps, and what the search compares to skip hopeless candidates."""

    config: RunConfig
    with_any_batch: int
    "equal for candidates that differ only in their batch, and that either all accumulate or all don't"
    with_any_saving: int
    "equal for candidates that differ only in gradient_checkpointing"


def candidates_of(workload: Workload, configs: list[RunConfig], num_gpus: int) -> list[Candidate]:
    """Return the configs that reach the tokens per step: larger batches first, savings last."""
    numbers: dict[RunConfig, int] = {}

    def number_of(config: RunConfig, **changes: object) -> int:
        return numbers.setdefault(dataclasses.replace(config, **changes), len(numbers))

    found = []
    for config in configs:
        of_micro_step = _tokens_per_micro_step(config, num_gpus)
        steps = max(1, round(workload.global_batch_tokens / of_micro_step))
        if abs(steps * of_micro_step / workload.global_batch_tokens - 1) <= _GLOBAL_BATCH_TOLERANCE:
            several = {"gradient_accumulation_steps": min(steps, 2), "per_device_train_batch_size": 1}
            found.append(
                Candidate(
                    dataclasses.replace(config, gradient_accumulation_steps=steps),
                    number_of(config, **several),
                    number_of(config, gradient_checkpointing="none"),
                )
            )

    def order(candidate: Candidate) -> tuple[int, bool]:
        config = candidate.config
        return -config.per_device_train_batch_size, config.gradient_checkpointing != "none"

    return sorted(found, key=order)


def _tokens_per_micro_step(config: RunConfig, num_gpus: int) -> int:
    return num_gpus * config.per_device_train_batch_size * config.seq_len


def _search_strategy(
    workload: Workload,
    setup: Setup,
    candidates: list[Candidate],
    result: PlanSearch,
) -> None:
    """Add the plans of one strategy on one number of GPUs to `result`.

    The config of each candidate replaces that of `setup`. Two kinds of candidates are skipped: those with
    _ENOUGH_BATCHES larger batches that fit, and those that save memory although the same batch fits without.
    Batches with one micro-step and with several are judged separately, because a single micro-step may take
    less memory than several, and overlaps less communication.
    """
    gpu, strategy = setup.gpu, setup.launched.strategy
    setup = dataclasses.replace(setup, strategy=strategy)
    num_fitting: Counter[int] = Counter()
    fit_unsaved: set[int] = set()
    for candidate in candidates:
        config = candidate.config
        launched = dataclasses.replace(setup, config=config_as_launched(config, strategy))
        enough_fit = num_fitting[candidate.with_any_batch] >= _ENOUGH_BATCHES
        fits = enough_fit or candidate.with_any_saving in fit_unsaved
        if not fits:
            if problems := [
                *contradictions(strategy, config),
                *config.problems(),
                *unknown_to_estimates(config, gpu=gpu, spec=workload.spec),
            ]:
                result.left_out.extend(problems)
                continue
            row = estimate(launched.launched)
            if row.verdict in ("fits", "may fit") and row.tokens_per_second is not None:
                result.plans.append(_plan(workload, row, config, strategy, gpu))
            fits = row.verdict == "fits"
        if fits:
            num_fitting[candidate.with_any_batch] += 1
            if config.gradient_checkpointing == "none":
                fit_unsaved.add(candidate.with_any_saving)


def _plan(workload: Workload, row: Estimate, config: RunConfig, strategy: Strategy, gpu: Gpu) -> Plan:
    """Return the plan of an estimate that fits and whose time is known."""
    is_timed = row.calibration and is_calibrated(gpu.name)
    speed_evidence = "calibrated" if is_timed else gpu.speed_evidence
    tokens_per_step = config.gradient_accumulation_steps * _tokens_per_micro_step(config, row.num_gpus)
    hours = workload.num_tokens / row.tokens_per_second / 3600
    price = row.usd_per_gpu_hour
    usd = None if price is None else hours * row.num_gpus * price
    is_pretraining = config.peft == "none" and workload.starts_from is None
    return Plan(
        estimate=row,
        spec=workload.spec,
        config=config,
        strategy=strategy,
        num_tokens=workload.num_tokens,
        num_steps=math.ceil(workload.num_tokens / tokens_per_step),
        tokens_per_step=tokens_per_step,
        starts_from=workload.starts_from,
        speed_evidence=speed_evidence,
        hours=hours,
        usd=usd,
        expected_loss=loss(workload.spec.num_params, workload.num_tokens) if is_pretraining else None,
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as a dict for JSON: the estimate's keys, then the plan's keys."""
    inputs = ("estimate", "spec", "config", "strategy")
    fields = {name: value for name, value in vars(plan).items() if name not in inputs}
    return {**plan.estimate.as_json(), **fields, "gpu_hours": plan.gpu_hours}
