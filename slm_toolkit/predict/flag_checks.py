"""What makes no sense in the flags of `slm estimate`, `recommend` and `doctor`, said before all else."""

import argparse
import itertools
from typing import Any

from slm_toolkit.config.flag_metadata import LARGEST_NUMBER
from slm_toolkit.config.flag_pairs import Pair, pair_problems
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.setup.setup import unknown_to_estimates
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.strategy import Strategy

NOT_OF_AN_ESTIMATE = tuple(name for name, flag in FLAGS.items() if flag.estimate == "refuses")
"flags that `slm estimate` does not have"
SEARCH_HAS_NO_BATCH = Pair("per_device_train_batch_size", "largest_batch", ", which looks for it: give one")
_LARGEST_MODEL = 10**15


def add_software_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--software",
        choices=("2024", "2026"),
        default="2026",
        help="2026: memory as traced with torch 2.13 and transformers 5. 2024: torch 2.3 and "
        "transformers 4.4x, which the paper ran and which took more memory and time (default: "
        "2026)",
    )


def check_grid(given: dict[str, Any], *, num_gpus: list[int], gpus_per_node: int) -> None:
    """Raises one ValueError with what makes no sense in fields of a RunConfig that several verbs take."""
    several = {
        name: value if isinstance(value, list) else [value]
        for name, value in given.items()
        if value is not None
    }
    if problems := flag_problems(several, num_gpus, gpus_per_node):
        raise all_of(problems)


def all_of(problems: list[str], *, verb: str = "estimate") -> ValueError:
    return ValueError(
        "\n".join(dict.fromkeys(problems)) + f"\nhint: `slm {verb} --help all` explains each flag"
    )


def flag_problems(several: dict[str, list[Any]], num_gpus: list[int], gpus_per_node: int) -> list[str]:
    """Each value beside the others' first; of flags that estimates know, RunConfig has rules on one pair."""
    first = {name: values[0] for name, values in several.items()}
    pair = [
        {name: value for name, value in zip(("numerics", "reduce_dtype"), values, strict=True) if value}
        for values in itertools.product(several.get("numerics", [None]), several.get("reduce_dtype", [None]))
    ]
    single = [{name: value} for name, values in several.items() for value in values]
    alone = ("numerics", "reduce_dtype")
    changes = [*pair, *(change for change in single if not any(name in change for name in alone))]
    configs = [RunConfig(**{**first, **change}) for change in changes]
    found = [problem for config in configs for problem in config.problems()]
    found += [problem for config in configs for problem in unknown_to_estimates(config)]
    if gpus_per_node < 1:
        return [*found, f"--gpus_per_node is {gpus_per_node}: at least 1"]
    for count in num_gpus:
        if count < 1:
            found.append(f"--num_gpus is {count}: at least 1")
        elif count > LARGEST_NUMBER:
            found.append(f"--num_gpus is {count}: at most {LARGEST_NUMBER:,}")
        elif count > gpus_per_node and count % gpus_per_node:
            found.append(
                f"--num_gpus is {count}: full nodes of {gpus_per_node} (--gpus_per_node), or one node"
            )
    return found


def gpus_asked(words: list[str], num_gpus: list[int] | None) -> tuple[list[str], list[int] | None]:
    """The names of --gpu, and --num_gpus as given or as in `a100-40gb:8`. Raises ValueError for others."""
    from slm_toolkit.hardware.gpus import gpu_and_count

    names, counts = [], set()
    for word in words:
        found = gpu_and_count(word)
        if found is None:
            raise ValueError(f"--gpu {word}: not NAME or NAME:COUNT\nhint: --gpu a100-40gb --num_gpus 8")
        if found[2] is not None:
            raise ValueError(f"--gpu {word}: a price\nhint: --gpu {found[0]} --usd_per_gpu_hour {found[2]:g}")
        names.append(found[0])
        counts.add(found[1])
    if counts == {()}:
        return names, num_gpus
    if num_gpus is not None or len(counts) > 1:
        raise ValueError(
            f"--gpu {' '.join(words)}: several numbers of GPUs\nhint: --gpu {' '.join(names)} --num_gpus 8"
        )
    return names, list(counts.pop())


def largest_batch_problems(given: dict[str, Any], strategies: list[Strategy], gpus: list[Any]) -> list[str]:
    found = ["--largest_batch needs --gpu: fits on which?" for gpu in gpus if gpu is None]
    found += pair_problems({*given, "largest_batch"}, [SEARCH_HAS_NO_BATCH])
    return [*found, *fixed_batch_problems(strategies)]


def fixed_batch_problems(strategies: list[Strategy]) -> list[str]:
    """DeepSpeed JSONs that have the batch which --largest_batch looks for."""
    return [
        f"{strategy.path}: the DeepSpeed JSON says train_micro_batch_size_per_gpu "
        f"{strategy.deepspeed.micro_batch_size}, --largest_batch looks for it"
        for strategy in strategies
        if strategy.deepspeed is not None and strategy.deepspeed.micro_batch_size is not None
    ]


def placement_problems(strategies: list[Strategy], *, num_gpus: list[int], gpus_per_node: int) -> list[str]:
    """Shards and copies that don't divide the GPUs."""
    from slm_toolkit.predict.setup.setup import placement_of

    found = []
    for strategy, count in itertools.product(strategies, num_gpus):
        per_node = min(count, gpus_per_node)
        try:
            fitted = fit_groups(strategy, num_ranks=count, ranks_per_node=per_node)
        except ValueError as error:
            found.append(str(error).splitlines()[0])
            continue
        problems = placement_of(fitted).problems(num_gpus=count, gpus_per_node=per_node)
        found += [f"{strategy.path}: {problem}" for problem in problems]
    return found


def model_to_estimate(name: str) -> ModelSpec:
    spec = find_model(name)
    if spec.num_params > _LARGEST_MODEL:
        raise ValueError(
            f"model {name!r} has more than {_LARGEST_MODEL:,} parameters\nhint: look at its config.json"
        )
    return spec
