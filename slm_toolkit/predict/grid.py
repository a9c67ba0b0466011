"""Estimate all combinations of flags, strategies, GPU types and numbers of GPUs."""

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slm_toolkit.config.flags import every_config
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.predict.choices import choices, with_choices
from slm_toolkit.predict.flag_checks import (
    flag_problems,
    largest_batch_problems,
    model_to_estimate,
    placement_problems,
)
from slm_toolkit.predict.setup.setup import unknown_to_estimates
from slm_toolkit.strategy.checked_run import all_of, run_problems
from slm_toolkit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from slm_toolkit.hardware.gpus import Gpu
    from slm_toolkit.model.model_spec import ModelSpec
    from slm_toolkit.predict.estimate import Estimate
    from slm_toolkit.predict.setup.other_trainers import OtherTrainer
    from slm_toolkit.predict.setup.setup import Deployment

MOST_SEARCHED_ROWS = 8
"rows that don't fit and get the smallest changes that fit; a search takes as long as some fifty estimates"


def estimates(
    given: dict[str, Any],
    strategies: list[Strategy],
    *,
    gpus: list[str | None],
    num_gpus: list[int],
    gpus_per_node: int = 8,
    find_largest_batch: bool = False,
    search_changes: bool = False,
    like: "OtherTrainer | None" = None,
    deployments: "Callable[[Gpu | None], Deployment] | None" = None,
    notes: list[str] | None = None,
) -> list["Estimate"]:
    """Return an Estimate for each different combination.

    `given` maps a field of RunConfig to a value or a list of values. `search_changes`: the first rows that
    do not fit get the smallest changes with which they would. `notes` gets the lines about what was chosen.
    Raises one ValueError with all problems of the flags.
    """
    from slm_toolkit.hardware.gpus import gpu_of_name
    from slm_toolkit.predict.changes_that_fit import changes_that_fit
    from slm_toolkit.predict.estimate import estimate, largest_batch
    from slm_toolkit.predict.setup.setup import Deployment, setup_of

    several = {
        name: value[:1] if FLAGS[name].estimate == "ignores" and isinstance(value, list) else value
        for name, value in given.items()
    }
    if find_largest_batch:
        several["per_device_train_batch_size"] = 1
    deployment_of = deployments or (lambda gpu: Deployment())
    found_gpus = [None if name is None else gpu_of_name(name) for name in dict.fromkeys(gpus)]
    configs = every_config(several)
    problems = flag_problems(configs, num_gpus, gpus_per_node)
    problems += largest_batch_problems(given, strategies, found_gpus) if find_largest_batch else []
    if problems:
        raise all_of(problems, verb="estimate")
    shared = {"has_gpu": True, "gpus_per_node": gpus_per_node, "is_comparison": True, "like": like}
    chosen = [
        choices(configs, strategies, gpu=gpu, num_gpus=count, deployment=deployment_of(gpu), **shared)
        for gpu, count in itertools.product(found_gpus, num_gpus)
    ]
    smallest, why = min(chosen, key=lambda one: one[0].get("per_device_train_batch_size", 0))
    (notes if notes is not None else []).extend(why)
    configs = [with_choices(config, smallest) for config in configs]
    specs = {name: model_to_estimate(name) for name in dict.fromkeys(config.model for config in configs)}
    problems = like.problems(strategies) if like else []
    problems += placement_problems(strategies, num_gpus=num_gpus, gpus_per_node=gpus_per_node)
    problems += _problems_of_rows(configs, strategies, found_gpus, specs)
    if problems:
        raise all_of(problems, verb="estimate")
    setups = [
        setup_of(specs[config.model], strategy, config, count, gpus_per_node, gpu, like, deployment_of(gpu))
        for config, gpu, count, strategy in itertools.product(configs, found_gpus, num_gpus, strategies)
    ]
    rows = {setup: (largest_batch if find_largest_batch else estimate)(setup.launched) for setup in setups}
    too_large = [setup for setup, row in rows.items() if search_changes and row.fits is False]
    for setup in too_large[:MOST_SEARCHED_ROWS]:
        rows[setup] = rows[setup].with_values(changes_that_fit=changes_that_fit(setup, rows[setup]))
    return list(rows.values())


def _problems_of_rows(
    configs: list[RunConfig],
    strategies: list[Strategy],
    gpus: list["Gpu | None"],
    specs: "dict[str, ModelSpec]",
) -> list[str]:
    """Return the contradictions of all combinations, and the flags without a closed form."""
    problems = []
    for config in configs:
        spec = specs[config.model]
        for strategy in strategies:
            problems += run_problems(config, strategy, spec)
        for gpu in gpus:
            problems += unknown_to_estimates(config, gpu=gpu, spec=spec)
    return problems


# Notes on what an estimate ignores.


def notes_on_strategies(strategies: list[Strategy], numerics: list[str]) -> list[str]:
    """Return notes on settings of a user's own file that the estimate ignores."""
    found = []
    for strategy in strategies:
        in_bf16 = [name for name in numerics if name != "fp32"]
        if strategy.mixed_precision == "no" and in_bf16:
            found.append(
                f"{strategy.path}: mixed_precision no: --numerics {in_bf16[0]} is estimated for bf16"
            )
    return found
