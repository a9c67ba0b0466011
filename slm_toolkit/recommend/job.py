"""From what `slm recommend` is asked to its plans: offers of GPUs, workloads, a grid of flags."""

import itertools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from slm_toolkit.config.flags import every_config
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Gpu, gpu_of_name, gpus, gpus_and_count
from slm_toolkit.hardware.prices import Price
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import has_weights
from slm_toolkit.predict.flag_checks import flag_problems, model_to_estimate, node_problems
from slm_toolkit.predict.setup.setup import Deployment, unlike_the_model
from slm_toolkit.recommend.plans import GpuOffer, Workload
from slm_toolkit.recommend.scaling_laws import compute_optimal_tokens, tokens_for_loss
from slm_toolkit.strategy.checked_run import all_of

GRID: dict[str, list[Any]] = {
    "per_device_train_batch_size": [1, 2, 4, 8, 16, 32, 64, 128],
    "kernels": ["fused", "compiled"],
    "gradient_checkpointing": ["none", "selective_op", "full"],
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
    """Return the offers of `texts`, as in `h100-80gb:8,16@2.49`; `num_gpus` where that has no number.

    `A100:8` is every A100. `all`, or `all:1,8`, is every GPU type. None is every GPU type with a known price.
    Raises one ValueError with all that can't be read or had.
    """
    found, problems = [], []
    if texts is None:
        texts = [gpu.name for gpu in gpus() if deployment_of(gpu).price is not None]
    usual = num_gpus or [n for n in _DEFAULT_COUNTS if n <= gpus_per_node or n % gpus_per_node == 0]
    for text in itertools.chain.from_iterable(map(_of_every_type, texts)):
        asked = gpus_and_count(text)
        if asked is None:
            problems.append(f"--gpu {text}: not NAME, NAME:COUNTS or NAME:COUNTS@USD")
            continue
        names, counts, usd = asked
        if usd == 0:
            problems.append(f"--gpu {text}: the price must be above 0")
        counts = sorted(set(counts or usual))
        for number in counts:
            of_number = node_problems(number, gpus_per_node) if number else ["0 GPUs: at least 1"]
            problems += [f"--gpu {text}: {problem}" for problem in of_number]
        for gpu in map(gpu_of_name, names):
            deployment = deployment_of(gpu)
            if usd is not None:
                deployment = Deployment(deployment.cluster, Price(usd, "given by --gpu"))
            found += [GpuOffer(gpu, number, deployment) for number in counts]
    if problems:
        raise ValueError(
            "\n".join(problems) + "\nhint: write h100-80gb:8,16@2.49; --gpus_per_node sets the size of a node"
        )
    return found


def _of_every_type(text: str) -> list[str]:
    """Return `text`, or one offer for each GPU type if it is `all` or `all:COUNTS`."""
    name, colon, counts = text.partition(":")
    return [gpu.name + colon + counts for gpu in gpus()] if name == "all" else [text]


_PRETRAINING_BATCH_TOKENS = 524_288
"0.5M, as GPT-3's 125M to 760M models took (Brown et al., arXiv 2005.14165, table 2.1)"
_FINE_TUNING_BATCH_SEQUENCES = 128  # tatsu-lab/stanford_alpaca, README: batch size 128


def workloads_of(given: dict[str, Any], asked: Namespace) -> tuple[list[Workload], list[str]]:
    """Return a workload for each model, and notes on what the closed forms ignore.

    `asked` has tokens, target_loss and global_batch_tokens; at most one of the first two is given.

    A model without weights trains on as many tokens as the law calls compute-optimal if the length is not
    given. Raises ValueError if a model does not reach the target, and for fine-tuning of unknown length.
    """
    found, notes = [], []
    lengths = given.get("seq_len") or [RunConfig().with_defaults(has_gpu=True).seq_len]
    kernels = [{name: value} for name in _KERNELS for value in given.get(name, [])]
    for name in dict.fromkeys(given.get("model", [_DEFAULT_MODEL])):
        spec = model_to_estimate(name)
        problems = []
        for flag in kernels:
            problems += kernel_problems(spec, RunConfig(**{"attn_implementation": "eager", **flag}))
        if problems:
            raise all_of(problems, verb="recommend")
        notes += [note for n in lengths for note in unlike_the_model(spec, n)]
        # a published preset starts from its weights on the hub, unless a target loss asks for pretraining
        on_hub = spec.hub_id if asked.target_loss is None else None
        starts_from = spec.path if has_weights(spec) else on_hub
        tokens = _num_tokens(name, spec, starts_from, given, asked)
        default = _FINE_TUNING_BATCH_SEQUENCES * lengths[0] if starts_from else _PRETRAINING_BATCH_TOKENS
        batch_tokens = asked.global_batch_tokens or default
        found.append(Workload(name, spec, tokens, batch_tokens, starts_from))
    return found, notes


_KERNELS = ("attn_implementation", "kernels")


def _num_tokens(
    name: str, spec: ModelSpec, starts_from: str | None, given: dict[str, Any], asked: Namespace
) -> float:
    """Return the tokens to train on. Raises ValueError if only the user can know them."""
    if asked.tokens is not None:
        return asked.tokens
    adapters = [peft for peft in given.get("peft", []) if peft != "none"]
    if starts_from is not None or adapters:
        reason = f"--peft {adapters[0]}" if adapters else f"--model {name} has weights"
        raise ValueError(
            f"{reason}: this is fine-tuning, and scaling laws don't say how long that takes\n"
            "hint: --tokens 50M: those of the dataset, times its epochs; --target_loss trains a preset from "
            "random weights"
        )
    if asked.target_loss is not None:
        return tokens_for_loss(spec.num_params, asked.target_loss)
    return compute_optimal_tokens(spec.num_params)


def configs_of(given: dict[str, Any], *, gpus_per_node: int) -> list[RunConfig]:
    """Return the grid of the given flags, and of GRID for the rest."""
    left_to_us = {"kernels": ["auto"], "per_device_train_batch_size": [None]}
    given = {name: value for name, value in given.items() if value != left_to_us.get(name)}
    first_of_grid = {name: values[0] for name, values in GRID.items()}
    if problems := flag_problems(every_config({**first_of_grid, **given}), [1], gpus_per_node):
        raise all_of(problems, verb="recommend")
    grid = every_config({"model": [_DEFAULT_MODEL], **GRID, **given})
    return list(dict.fromkeys(config.with_defaults(has_gpu=True) for config in grid))
