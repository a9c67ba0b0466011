"""From what `slm recommend` is asked to its plans: offers of GPUs, workloads, a grid of flags."""

import itertools
from collections.abc import Callable
from typing import Any

from slm_toolkit.config.flag_pairs import Pair, check_pairs, names_given
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Gpu, gpu_and_count, gpu_of_name, gpus
from slm_toolkit.hardware.prices import Price
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.from_config import position_problem
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.bottleneck import WORTH_SAYING, alignment_gain, levers
from slm_toolkit.predict.estimate import largest_batch
from slm_toolkit.predict.flag_checks import all_of, check_grid, model_to_estimate
from slm_toolkit.predict.setup.other_trainers import OtherTrainer
from slm_toolkit.predict.setup.setup import Deployment, Setup, unknown_to_estimates, unlike_the_model
from slm_toolkit.recommend.plans import GpuOffer, Observations, Plan, PlanSearch, Workload, search
from slm_toolkit.recommend.scaling_laws import LAWS, compute_optimal_tokens, num_params_of, tokens_for_loss
from slm_toolkit.strategy.strategy import Strategy

GRID: dict[str, list[Any]] = {
    "per_device_train_batch_size": [1, 2, 4, 8, 16, 32, 64, 128],
    "torch_compile": [False, True],
    "gradient_checkpointing": ["none", "selective_op", "full"],
    "loss_kernel": ["fused_logits", "fused_linear"],
    "norm_kernel": ["fused"],
    "mlp_kernel": ["hf", "fused"],
}
"""values to try for flags that are not given; they change results only by rounding. transformers' own loss
and norm take more memory and time than the fused kernels, so they are left out"""
_DEFAULT_MODEL = "slm-100m"
_DEFAULT_COUNTS = (1, 2, 4, 8, 16, 32, 64)


def offers_of(
    texts: list[str] | None,
    *,
    num_gpus: list[int] | None,
    gpus_per_node: int,
    deployment_of: Callable[[Gpu | None], Deployment],
) -> list[GpuOffer]:
    """Return an offer for each of `texts`, as in `h100-80gb:8,16@2.49`; `num_gpus` where that has no number.

    `all`, or `all:1,8`, is every GPU type. None is every GPU type with a known price.
    Raises one ValueError with all that can't be read or had.
    """
    found, problems = [], []
    if texts is None:
        texts = [gpu.name for gpu in gpus() if deployment_of(gpu).price is not None]
        if not texts:
            raise ValueError("no GPU type has such a price\nhint: --gpu NAME@USD, or --usd_per_gpu_hour")
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
            if number < 1 or (number > gpus_per_node and number % gpus_per_node):
                problems.append(
                    f"--gpu {text}: {number} GPUs: at least 1, and only full nodes of {gpus_per_node}"
                )
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
        if spec.experts is not None:
            raise ValueError(
                f"{name}: no scaling law here covers experts\nhint: slm estimate --model {name} needs none"
            )
        if problems := _given_problems(spec, given):
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


_KERNELS = ("attn_implementation", "loss_kernel", "norm_kernel", "mlp_kernel")


def _given_problems(spec: ModelSpec, given: dict[str, Any]) -> list[str]:
    """Return a sentence for each kernel that the user gave and the model does not have."""
    asked = ({name: value} for name in _KERNELS for value in given.get(name, []))
    return [
        problem
        for flag in asked
        for problem in kernel_problems(spec, RunConfig(**{"attn_implementation": "eager", **flag}))
    ]


def configs_of(given: dict[str, Any], *, gpus_per_node: int) -> list[RunConfig]:
    """Return the grid of the given flags, and of GRID for the rest.

    Of GRID's own combinations those without a closed form are left out, and compiled layers with a fused MLP,
    which Inductor fuses anyway.
    """
    several = {
        name: list(dict.fromkeys(value)) if isinstance(value, list) else [value]
        for name, value in {**GRID, **given}.items()
    }
    first_of_grid = {name: values[0] for name, values in GRID.items()}
    check_grid({**first_of_grid, **given}, num_gpus=[1], gpus_per_node=gpus_per_node)
    several.setdefault("model", [_DEFAULT_MODEL])
    found = [
        RunConfig(**dict(zip(several, values, strict=True))).with_defaults(has_gpu=True)
        for values in itertools.product(*several.values())
    ]
    if "torch_compile" not in given:
        found = [config for config in found if not config.torch_compile or not unknown_to_estimates(config)]
    if "mlp_kernel" not in given:
        found = [config for config in found if not (config.torch_compile and config.mlp_kernel == "fused")]
    return found


_MOST_ADVISED_GPUS = 3
"GPU types, best first, with a line on aligned widths"


def advice_on(
    ranked: list[Plan],
    *,
    offers: list[GpuOffer],
    gpus_per_node: int,
    software: str,
    like: OtherTrainer | None = None,
) -> list[str]:
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
            like=like,
            deployment=plan.deployment,
        )

    lines = []
    if like is not None:
        lines.append(f"estimated as {like.title} trains; the command starts slm_toolkit's own trainer")
    for name in list(dict.fromkeys(plan.estimate.gpu for plan in ranked))[:_MOST_ADVISED_GPUS]:
        gain = alignment_gain(setup_of(next(plan for plan in ranked if plan.estimate.gpu == name)))
        if gain is not None and gain.speedup >= WORTH_SAYING:
            lines.append(
                f"aligned widths: on {name}, {gain.sibling} instead of {ranked[0].spec.name} is about "
                f"{gain.speedup:.2f}x faster"
            )
    first = ranked[0]
    most = largest_batch(setup_of(first).launched).batch_with_margin
    lines.append(
        f"batch of row 1: {first.estimate.per_device_train_batch_size}, a power of two if you give none; "
        f"at most {most} fits with its flags, as `slm estimate --largest_batch` says"
    )
    if (hub_id := ranked[0].spec.hub_id) is not None:
        name = ranked[0].spec.name
        lines.append(
            f"the command starts from the weights of {hub_id}; from random ones: --model {name} "
            f"--tokenizer_name {hub_id}"
        )
    for lever in [lever for lever in levers(setup_of(ranked[0])) if lever.change.startswith("--")][:2]:
        if not lever.change.startswith("--per_device"):  # another batch would make other steps
            lines.append(f"add {lever.change} to row 1: about {lever.speedup:.2g}x faster")
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
    like: OtherTrainer | None = None,
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
            like=like,
        )
        found += of_job.plans
        left_out += of_job.left_out
    return PlanSearch(found, list(dict.fromkeys(left_out)))
