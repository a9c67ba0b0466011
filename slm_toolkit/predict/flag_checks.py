"""Check the flags of `slm estimate`, `slm recommend` and `slm doctor` before anything is computed."""

import argparse
import itertools
from typing import Any

from slm_toolkit.config.flag_metadata import LARGEST_NUMBER
from slm_toolkit.config.flag_pairs import Pair, pair_problems
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.setup.other_trainers import NAMES
from slm_toolkit.predict.setup.setup import placement_of, unknown_to_estimates
from slm_toolkit.strategy.checked_run import parallel_problems
from slm_toolkit.strategy.groups import fit_groups, ranks_of_each_node
from slm_toolkit.strategy.strategy import Strategy

NOT_OF_AN_ESTIMATE = tuple(name for name, flag in FLAGS.items() if flag.estimate == "refuses")
"flags that `slm estimate` does not have"
SEARCH_HAS_NO_BATCH = Pair(
    "per_device_train_batch_size", "largest_batch", ", which searches for it: give only one"
)
_LARGEST_MODEL = 10**15


def add_like_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--like",
        choices=NAMES,
        help="estimate another trainer with its defaults: trainer (Hugging Face's), torchtune, nanotron, "
        "torchtitan or litgpt. Your own flags win. Notes name what it sets",
    )


def flag_problems(configs: list[RunConfig], num_gpus: list[int], gpus_per_node: int) -> list[str]:
    """Return the problems of the flags of a grid, before the models are known, and of the numbers of GPUs."""
    problems = [problem for config in configs for problem in config.problems()]
    problems += [problem for config in configs for problem in unknown_to_estimates(config)]
    if gpus_per_node < 1:
        return [*problems, f"--gpus_per_node is {gpus_per_node}: at least 1"]
    for count in num_gpus:
        if count < 1:
            problems.append(f"--num_gpus is {count}: at least 1")
        elif count > LARGEST_NUMBER:
            problems.append(f"--num_gpus is {count}: at most {LARGEST_NUMBER:,}")
        else:
            problems += node_problems(count, gpus_per_node)
    return problems


def node_problems(num_gpus: int, gpus_per_node: int) -> list[str]:
    """Return a problem if the GPUs are not the same number on each node."""
    try:
        ranks_of_each_node(num_gpus, gpus_per_node)
    except ValueError as error:
        return [f"{error} (--gpus_per_node)"]
    return []


def gpus_asked(words: list[str], num_gpus: list[int] | None) -> tuple[list[str], list[int] | None]:
    """Return the names in --gpu, and the numbers of GPUs from --num_gpus or from `a100-40gb:8`.

    Raise ValueError for an invalid value, or if both give a number.
    """
    from slm_toolkit.hardware.gpus import gpus_and_count

    names, counts = [], set()
    for word in words:
        parsed = gpus_and_count(word)
        if parsed is None or parsed[2] is not None:
            raise ValueError(f"--gpu {word}: not NAME or NAME:COUNT\nhint: --gpu a100-40gb:8 --prices 2.49")
        of_word, numbers, _ = parsed
        names += of_word
        counts.add(numbers)
    if counts == {()}:
        return names, num_gpus
    if num_gpus is not None or len(counts) > 1:
        raise ValueError(
            f"--gpu {' '.join(words)}: several numbers of GPUs\nhint: --gpu {' '.join(names)} --num_gpus 8"
        )
    return names, list(counts.pop())


def largest_batch_problems(given: dict[str, Any], strategies: list[Strategy], gpus: list[Any]) -> list[str]:
    problems = ["--largest_batch needs --gpu, whose memory is the limit" for gpu in gpus if gpu is None]
    problems += pair_problems({*given, "largest_batch"}, [SEARCH_HAS_NO_BATCH])
    return [*problems, *fixed_batch_problems(strategies)]


def fixed_batch_problems(strategies: list[Strategy]) -> list[str]:
    """Return a problem for each DeepSpeed JSON that sets the batch that --largest_batch searches for."""
    return [
        f"{strategy.path}: the DeepSpeed JSON sets train_micro_batch_size_per_gpu "
        f"{strategy.deepspeed.micro_batch_size}, but --largest_batch searches for it"
        for strategy in strategies
        if strategy.deepspeed is not None and strategy.deepspeed.micro_batch_size is not None
    ]


def placement_problems(strategies: list[Strategy], *, num_gpus: list[int], gpus_per_node: int) -> list[str]:
    """Return a problem for each strategy whose shards and copies don't divide the GPUs.

    Raises ValueError for a sharding without an estimate.
    """
    problems = []
    for strategy, count in itertools.product(strategies, num_gpus):
        if node_problems(count, gpus_per_node):
            continue
        per_node = ranks_of_each_node(count, gpus_per_node)
        try:
            strategy = fit_groups(strategy, num_ranks=count, ranks_per_node=per_node)
        except ValueError as error:
            problems.append(str(error).splitlines()[0])
            continue
        placement_of(strategy)
        problems += parallel_problems(strategy, num_ranks=count)
    return problems


def model_to_estimate(name: str) -> ModelSpec:
    spec = find_model(name)
    if spec.num_params > _LARGEST_MODEL:
        raise ValueError(
            f"model {name!r} has more than {_LARGEST_MODEL:,} parameters\nhint: check its config.json"
        )
    return spec
