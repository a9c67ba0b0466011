"""From what `slm recommend` is asked to its plans: offers of GPUs, workloads, a grid of flags."""

import itertools
from collections.abc import Callable
from typing import Any

from slm_toolkit.config.flag_pairs import Pair, check_pairs, names_given
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Gpu, gpu_and_count, gpu_of_name, gpus
from slm_toolkit.hardware.prices import Price
from slm_toolkit.model.from_config import position_problem
from slm_toolkit.predict.bottleneck import WORTH_SAYING, alignment_gain, levers
from slm_toolkit.predict.flag_checks import all_of, check_grid, model_to_estimate, node_problems
from slm_toolkit.predict.setup.setup import Deployment, Setup, unlike_the_model
from slm_toolkit.recommend.plans import GpuOffer, Observations, Plan, PlanSearch, Workload, search
from slm_toolkit.recommend.scaling_laws import LAWS, compute_optimal_tokens, num_params_of, tokens_for_loss
from slm_toolkit.strategy.strategy import Strategy

GRID: dict[str, list[Any]] = {
    "per_device_train_batch_size": [1, 2, 4, 8, 16, 32, 64, 128],
    "gradient_checkpointing": ["none", "selective_op", "full"],
    "loss_kernel": ["hf", "fused_linear"],
    "norm_kernel": ["fused"],
}
"values to try for flags that are not given; the kernels change results only by rounding"
_DEFAULT_MODEL = "slm-100m"
_DEFAULT_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def offers_of(
    texts: list[str],
    *,
    num_gpus: list[int] | None,
    gpus_per_node: int,
    deployment_of: Callable[[Gpu | None], Deployment],
) -> list[GpuOffer]:
    """Return an offer for each of `texts`, as in `h100-80gb:8,16@2.49`; `num_gpus` where that has no number.

    `all`, or `all:1,8`, is every GPU type.
    Raises one ValueError with all that can't be read or had.
    """
    found, problems = [], []
    for text in itertools.chain.from_iterable(map(_of_every_type, texts)):
        asked = gpu_and_count(text)
        if asked is None:
            problems.append(f"--gpu {text}: not NAME, NAME:COUNTS or NAME:COUNTS@USD")
            continue
        name, counts, usd = asked
        gpu = gpu_of_name(name)
        usual = num_gpus or [n for n in _DEFAULT_COUNTS if n <= gpus_per_node or n % gpus_per_node == 0]
        counts = list(counts) or usual
        deployment = deployment_of(gpu)
        if usd is not None:
            if usd <= 0:
                problems.append(f"--gpu {text}: the price must be above 0")
                continue
            deployment = Deployment(deployment.cluster, Price(usd, "given by --gpu"))
        for number in counts:
            if number < 1:
                problems.append(f"--gpu {text}: {number} GPUs: at least 1")
            else:
                problems += [f"--gpu {text}: {problem}" for problem in node_problems(number, gpus_per_node)]
        found.append(GpuOffer(gpu, tuple(sorted(set(counts))), deployment))
    if problems:
        raise ValueError(
            "\n".join(problems) + "\nhint: write h100-80gb:8,16@2.49; --gpus_per_node sets the size of a node"
        )
    return found


def _of_every_type(text: str) -> list[str]:
    """Return `text`, or one offer for each GPU type if it is `all` or `all:COUNTS`."""
    name, colon, counts = text.partition(":")
    return [gpu.name + colon + counts for gpu in gpus()] if name == "all" else [text]


def workloads_of(
    given: dict[str, Any],
    *,
    num_tokens: float | None,
    target_loss: float | None,
    global_batch_tokens: float,
    law_name: str,
) -> tuple[list[Workload], list[str]]:
    """Return a workload for each model, and notes on models that never reach the target.

    Without `num_tokens` and `target_loss` a model trains on as many tokens as the law calls compute-optimal.
    Raises ValueError if no model reaches the target.
    """
    check_pairs(
        names_given({"tokens": num_tokens, "target_loss": target_loss}),
        [Pair("tokens", "target_loss", ": both set the length of the training")],
    )
    adapters = [name for name in given.get("peft", []) if name != "none"]
    if adapters and num_tokens is None:
        raise ValueError(
            f"--peft {adapters[0]} without --tokens: scaling laws are about training from scratch\n"
            "hint: --tokens 50M, the tokens to train the adapter on"
        )
    law = LAWS[law_name]
    found, unreached, notes = [], [], []
    lengths = given.get("seq_len") or [RunConfig().with_defaults(has_gpu=True).seq_len]
    for name in dict.fromkeys(given.get("model", [_DEFAULT_MODEL])):
        spec = model_to_estimate(name)
        if problems := [problem for n in lengths if (problem := position_problem(spec, n)) is not None]:
            raise all_of(problems, verb="recommend")
        notes += [note for n in lengths for note in unlike_the_model(spec, n)]
        num_params = num_params_of(law, spec)
        tokens = num_tokens
        if target_loss is not None:
            try:
                tokens = tokens_for_loss(law, num_params, target_loss)
            except ValueError as error:
                unreached.append(f"{name}: {error}")
                continue
        if tokens is None:
            tokens = compute_optimal_tokens(law, num_params)
        found.append(Workload(name, spec, tokens, global_batch_tokens, law))
    if not found:
        raise ValueError("\n".join(unreached))
    return found, [*notes, *(f"left out: {problem.splitlines()[0]}" for problem in unreached)]


def configs_of(given: dict[str, Any], *, gpus_per_node: int) -> list[RunConfig]:
    """Return the grid of the given flags, and of GRID for the rest; batches ascending."""
    several = {
        name: list(dict.fromkeys(value)) if isinstance(value, list) else [value]
        for name, value in {**GRID, **given}.items()
    }
    check_grid(several, num_gpus=[1], gpus_per_node=gpus_per_node)
    several["per_device_train_batch_size"].sort()
    several.setdefault("model", [_DEFAULT_MODEL])
    found = [
        RunConfig(**dict(zip(several, values, strict=True))).with_defaults(has_gpu=True)
        for values in itertools.product(*several.values())
    ]
    return sorted(found, key=lambda config: config.per_device_train_batch_size)


_MOST_ADVISED_GPUS = 3
"GPU types, best first, with a line on aligned widths"


def advice_on(ranked: list[Plan], *, offers: list[GpuOffer], gpus_per_node: int, software: str) -> list[str]:
    """Return lines on the gain of aligned widths, and on changes that speed up the first plan."""

    def setup_of(plan: Plan) -> Setup:
        return Setup(
            plan.spec,
            plan.strategy,
            plan.config,
            num_gpus=plan.estimate.num_gpus,
            gpus_per_node=gpus_per_node,
            gpu=next(offer.gpu for offer in offers if offer.gpu.name == plan.estimate.gpu),
            software=software,
            deployment=plan.deployment,
        )

    lines = []
    for name in list(dict.fromkeys(plan.estimate.gpu for plan in ranked))[:_MOST_ADVISED_GPUS]:
        gain = alignment_gain(setup_of(next(plan for plan in ranked if plan.estimate.gpu == name)))
        if gain is not None and gain.speedup >= WORTH_SAYING:
            lines.append(f"on {name} {gain.sibling} should train {gain.speedup:.2f} times as fast")
    if (hub_id := ranked[0].spec.hub_id) is not None:
        name = ranked[0].spec.name
        lines.append(
            f"the command starts from the weights of {hub_id}; from random ones: --model {name} "
            f"--tokenizer_name {hub_id}"
        )
    bound = ranked[0].estimate.bottleneck.replace("_", " ")
    for lever in [lever for lever in levers(setup_of(ranked[0])) if lever.change.startswith("--")][:2]:
        if not lever.change.startswith("--per_device"):  # another batch would make other steps
            lines.append(
                f"the first is bound by {bound}: {lever.change} should give {lever.speedup - 1:+.0%}"
            )
    return lines


def search_all(
    workloads: list[Workload],
    offers: list[GpuOffer],
    strategies: list[Strategy],
    configs: list[RunConfig],
    *,
    gpus_per_node: int,
    observations: Observations,
    software: str,
) -> PlanSearch:
    """Return all plans that fit, and reasons for those left out."""
    found, left_out = [], []
    for workload in workloads:
        of_job = search(
            workload,
            offers,
            strategies,
            [config for config in configs if config.model == workload.asked_model],
            gpus_per_node=gpus_per_node,
            observations=observations,
            software=software,
        )
        found += of_job.plans
        left_out += of_job.left_out
    return PlanSearch(found, list(dict.fromkeys(left_out)))
