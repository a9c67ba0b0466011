"""From what `slm recommend` is asked to its plans: offers of GPUs, workloads, a grid of flags."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slm_toolkit.config.flag_pairs import Pair, check_pairs, names_given
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.hardware.gpus import Gpu, gpu_of_name, gpus, gpus_and_count
from slm_toolkit.hardware.prices import Price
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.from_config import position_problem
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import check_tokenizer, find_model, has_weights
from slm_toolkit.predict.bottleneck import WORTH_SAYING, alignment_gain, levers
from slm_toolkit.predict.estimate import largest_batch
from slm_toolkit.predict.flag_checks import all_of, check_grid, model_to_estimate, node_problems
from slm_toolkit.predict.setup.other_trainers import OtherTrainer
from slm_toolkit.predict.setup.setup import Deployment, Setup, unknown_to_estimates, unlike_the_model
from slm_toolkit.recommend.plans import GpuOffer, Observations, Plan, PlanSearch, Workload, search
from slm_toolkit.recommend.scaling_laws import compute_optimal_tokens, tokens_for_loss
from slm_toolkit.strategy.strategy import Strategy

GRID: dict[str, list[Any]] = {
    "per_device_train_batch_size": [1, 2, 4, 8, 16, 32, 64, 128],
    "torch_compile": [False, True],
    "gradient_checkpointing": ["none", "selective_op", "full"],
    "loss_kernel": ["fused_linear"],
    "norm_kernel": ["fused"],
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

    `A100:8` is every A100. `all`, or `all:1,8`, is every GPU type. None is every GPU type with a known price.
    Raises one ValueError with all that can't be read or had.
    """
    found, problems = [], []
    if texts is None:
        texts = [gpu.name for gpu in gpus() if deployment_of(gpu).price is not None]
        if not texts:
            raise ValueError("no GPU type has a price\nhint: --gpu NAME@USD, or --prices")
    for text in itertools.chain.from_iterable(map(_of_every_type, texts)):
        asked = gpus_and_count(text)
        if asked is None:
            problems.append(f"--gpu {text}: not NAME, NAME:COUNTS or NAME:COUNTS@USD")
            continue
        names, counts, usd = asked
        if usd == 0:
            problems.append(f"--gpu {text}: the price must be above 0")
            continue
        usual = num_gpus or [n for n in _DEFAULT_COUNTS if n <= gpus_per_node or n % gpus_per_node == 0]
        counts = list(counts) or usual
        for number in counts:
            if number < 1:
                problems.append(f"--gpu {text}: {number} GPUs: at least 1")
            else:
                problems += [f"--gpu {text}: {problem}" for problem in node_problems(number, gpus_per_node)]
        for gpu in map(gpu_of_name, names):
            deployment = deployment_of(gpu)
            if usd is not None:
                deployment = Deployment(deployment.cluster, Price(usd, "given by --gpu"))
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


@dataclass(frozen=True)
class Length:
    """How long to train, as the user said it. At most one of the first three is given."""

    num_tokens: float | None
    target_loss: float | None
    num_epochs: float | None
    global_batch_tokens: float | None


_PRETRAINING_BATCH_TOKENS = 524_288
"0.5M, as GPT-3's 125M to 760M models took (Brown et al., arXiv 2005.14165, table 2.1)"
_FINE_TUNING_BATCH_SEQUENCES = 128  # tatsu-lab/stanford_alpaca, README: batch size 128


def workloads_of(given: dict[str, Any], length: Length) -> tuple[list[Workload], list[str]]:
    """Return a workload for each model, and notes on models that never reach the target loss.

    A model without weights trains on as many tokens as the law calls compute-optimal if the length is not
    given. Raises ValueError if no model reaches the target, and for fine-tuning of unknown length.
    """
    asked = {
        "tokens": length.num_tokens,
        "target_loss": length.target_loss,
        "num_train_epochs": length.num_epochs,
    }
    why = ": both set the length of the training"
    check_pairs(names_given(asked), [Pair(*pair, why) for pair in itertools.combinations(asked, 2)])
    found, unreached, notes = [], [], []
    lengths = given.get("seq_len") or [RunConfig().with_defaults(has_gpu=True).seq_len]
    of_data = {flag: given[flag] for flag in ("dataset", "dataset_format", "tokenizer_name") if flag in given}
    for name in dict.fromkeys(given.get("model", [_DEFAULT_MODEL])):
        spec = model_to_estimate(name)
        if spec.hub_id is None:  # a published preset's plan names its tokenizer
            check_tokenizer(RunConfig(**of_data), spec)
        if problems := [problem for n in lengths if (problem := position_problem(spec, n)) is not None]:
            raise all_of(problems, verb="recommend")
        if problems := _given_problems(spec, given):
            raise all_of(problems, verb="recommend")
        notes += [note for n in lengths for note in unlike_the_model(spec, n)]
        starts_from = _weights_to_start_from(spec, length)
        try:
            tokens = _num_tokens(name, spec, starts_from, given, length)
        except _Unreachable as error:
            unreached.append(f"{name}: {error}")
            continue
        default = _FINE_TUNING_BATCH_SEQUENCES * lengths[0] if starts_from else _PRETRAINING_BATCH_TOKENS
        batch_tokens = length.global_batch_tokens or default
        found.append(Workload(name, spec, tokens, batch_tokens, starts_from))
    if not found:
        raise ValueError("\n".join(unreached))
    return found, [*notes, *(f"left out: {problem.splitlines()[0]}" for problem in unreached)]


_KERNELS = ("attn_implementation", "loss_kernel", "norm_kernel", "sp_size")


def _given_problems(spec: ModelSpec, given: dict[str, Any]) -> list[str]:
    """Return a sentence for each flag that the user gave and the model can't follow."""
    asked = ({name: value} for name in _KERNELS for value in given.get(name, []))
    return [
        problem
        for flag in asked
        for problem in kernel_problems(spec, RunConfig(**{"attn_implementation": "eager", **flag}))
    ]


class _Unreachable(ValueError):
    """The model never reaches the target loss."""


def _weights_to_start_from(spec: ModelSpec, length: Length) -> str | None:
    """Return the folder or hub id of the weights that are trained further; None for random ones.

    A published preset starts from its weights on the hub, unless a target loss asks for pretraining.
    """
    if has_weights(spec):
        return spec.path
    return spec.hub_id if length.target_loss is None else None


def _num_tokens(
    name: str, spec: ModelSpec, starts_from: str | None, given: dict[str, Any], length: Length
) -> float:
    """Return the tokens to train on. Raises ValueError if only the user can know them."""
    adapters = [peft for peft in given.get("peft", []) if peft != "none"]
    is_pretraining = starts_from is None and not adapters
    if length.num_tokens is not None:
        return length.num_tokens
    if length.num_epochs is not None:
        return length.num_epochs * _tokens_of_dataset(name, starts_from, given)
    if not is_pretraining:
        raise ValueError(_unknown_length(name, spec, starts_from, adapters, length))
    if length.target_loss is None:
        return compute_optimal_tokens(spec.num_params)
    try:
        return tokens_for_loss(spec.num_params, length.target_loss)
    except ValueError as error:
        raise _Unreachable(str(error)) from None


def _unknown_length(
    name: str, spec: ModelSpec, starts_from: str | None, adapters: list[str], length: Length
) -> str:
    reason = f"--model {name} has weights"
    if adapters:
        reason = f"--peft {adapters[0]}"
    elif spec.hub_id is not None:
        reason = f"--model {name} has weights ({starts_from})"
    hint = "--tokens 50M, or --dataset DATA --num_train_epochs 3"
    if spec.hub_id is not None and not adapters:
        optimal = compute_optimal_tokens(spec.num_params)
        hint += f"; --target_loss L trains random weights (compute-optimal: {optimal / 1e9:.1f}B tokens)"
    return f"{reason}: this is fine-tuning, and scaling laws don't say how long that takes\nhint: {hint}"


def _tokens_of_dataset(name: str, starts_from: str | None, given: dict[str, Any]) -> int:
    """Return the tokens of one pass over --dataset, packed and tokenized as the training would do it."""
    if given.get("dataset", SYNTHETIC) == SYNTHETIC:
        raise ValueError("--num_train_epochs without --dataset\nhint: --dataset FILE, or --tokens 50M")
    flags = {flag: value[0] if isinstance(value, list) else value for flag, value in given.items()}
    config = RunConfig(**{**flags, "model": starts_from or name}).with_defaults(has_gpu=True)
    try:
        spec = find_model(config.model)
    except ValueError as error:  # the hub does not answer
        hint = "--tokens 50M needs no tokenizer"
        raise ValueError(f"{str(error).splitlines()[0]}\nhint: {hint}") from None
    from slm_toolkit.run.data.data import load_data

    train = load_data(config, spec, num_sequences=0).train
    if not hasattr(train, "__len__"):
        raise ValueError(f"{config.dataset} is read as a stream, which has no epochs\nhint: --tokens 50M")
    return len(train) * config.seq_len


def configs_of(given: dict[str, Any], *, gpus_per_node: int) -> list[RunConfig]:
    """Return the grid of the given flags, and of GRID for the rest.

    Of GRID's own combinations those without a closed form are left out.
    """
    several = {
        name: list(dict.fromkeys(value)) if isinstance(value, list) else [value]
        for name, value in {**GRID, **given}.items()
    }
    first_of_grid = {name: values[0] for name, values in GRID.items()}
    check_grid({**first_of_grid, **given}, num_gpus=[1], gpus_per_node=gpus_per_node)
    several.setdefault("model", [_DEFAULT_MODEL])
    combinations = [
        dict(zip(several, values, strict=True)) for values in itertools.product(*several.values())
    ]
    found = list(dict.fromkeys(RunConfig(**flags).with_defaults(has_gpu=True) for flags in combinations))
    if "torch_compile" not in given:
        found = [config for config in found if not config.torch_compile or not unknown_to_estimates(config)]
    return found


_MOST_ADVISED_GPUS = 3
"GPU types, best first, with a line on aligned widths"


def advice_on(
    ranked: list[Plan],
    *,
    offers: list[GpuOffer],
    gpus_per_node: int,
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
            like=like,
            deployment=plan.deployment,
        )

    lines = []
    if like is not None:
        lines.append(f"estimated as {like.title} trains; the command starts slm_toolkit's own trainer")
    new = [plan for plan in ranked if plan.starts_from is None]  # trained weights keep their shape
    for name in list(dict.fromkeys(plan.estimate.gpu for plan in new))[:_MOST_ADVISED_GPUS]:
        plan = next(plan for plan in new if plan.estimate.gpu == name)
        gain = alignment_gain(setup_of(plan))
        if gain is not None and gain.speedup >= WORTH_SAYING:
            row = plan.estimate
            price = f": ${plan.usd / gain.speedup:,.2f} instead of ${plan.usd:,.2f}" if plan.usd else ""
            lines.append(
                f"aligned widths: on {row.num_gpus} x {name}, {gain.change} for {row.model} is about "
                f"{gain.speedup:.2f}x faster{price}"
            )
    first = ranked[0]
    most = largest_batch(setup_of(first).launched).batch_with_margin
    lines.append(
        f"batch of row 1: {first.estimate.per_device_train_batch_size}, a power of two if you give none; "
        f"at most {most} fits with its flags (`slm estimate --largest_batch`)"
    )
    if first.starts_from is not None and (hub_id := first.spec.hub_id) is not None:
        lines.append(
            f"the command starts from the weights of {hub_id}; from random ones: --model {first.spec.name} "
            f"--tokenizer_name {hub_id}"
        )
    for lever in [lever for lever in levers(setup_of(ranked[0])) if lever.change.startswith("--")][:2]:
        if not lever.change.startswith("--per_device"):  # another batch would make other steps
            lines.append(f"add {lever.change} to row 1: about {lever.speedup:.2f}x faster")
    return lines


def search_all(
    workloads: list[Workload],
    offers: list[GpuOffer],
    strategies: list[Strategy],
    configs: list[RunConfig],
    *,
    gpus_per_node: int,
    observations: Observations,
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
            like=like,
        )
        found += of_job.plans
        left_out += of_job.left_out
    return PlanSearch(found, list(dict.fromkeys(left_out)))
