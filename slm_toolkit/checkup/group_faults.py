"""Faults of `parallelism_config`: sizes that are no groups of the ranks there are."""

import math
from collections.abc import Iterator
from functools import partial

from slm_toolkit.checkup.case import Case, fault, is_count
from slm_toolkit.finding import REMOVE, Edit, Finding
from slm_toolkit.groups import PREFIX, parallel_sizes, product_problem
from slm_toolkit.strategy import is_shipped

_fsdp = partial(fault, topic="fsdp", file="yaml")


def group_faults(case: Case) -> Iterator[Finding]:
    yield from _sizes(case)
    yield from _product(case)


def _sizes(case: Case) -> Iterator[Finding]:
    """Sizes that FSDP2 can't form groups of."""
    section = case.section("parallelism_config")
    if not section or not case.is_fsdp2:
        return
    sizes = parallel_sizes(section)
    for name, size in sizes.items():
        if not is_count(size):
            yield _fsdp(
                *(case, "wrong", "group-size", f"{PREFIX}{name} is {size!r}"),
                why="it is a whole number of at least 1",
                change="remove parallelism_config: all ranks share one copy",
                key=f"parallelism_config.{PREFIX}{name}",
                edits=(Edit("yaml", ("parallelism_config",), REMOVE),),
            )
            return
    has_nothing = sizes["dp_shard_size"] == sizes["cp_size"] == 1
    if has_nothing and all(str(key).startswith(PREFIX) for key in section):
        yield _fsdp(
            *(case, "wrong", "nothing-to-shard"),
            f"parallelism_config has dp_replicate_size {sizes['dp_replicate_size']} and dp_shard_size 1",
            why="accelerate refuses FSDP2 without a group to shard over; copies alone are MULTI_GPU",
            change="remove parallelism_config, or give dp_shard_size the ranks of one copy",
            key="parallelism_config",
            edits=(Edit("yaml", ("parallelism_config",), REMOVE),),
        )


def _product(case: Case) -> Iterator[Finding]:
    """Sizes of one's own whose product is not the number of ranks; our own files follow the nodes."""
    section = case.section("parallelism_config")
    sizes = parallel_sizes(section)
    if not all(str(key).startswith(PREFIX) for key in section):
        return  # until the keys are mended, nobody knows the sizes
    if not (case.is_fsdp2 and all(map(is_count, sizes.values()))) or is_shipped(case.files.yaml_path):
        return
    if sizes["dp_shard_size"] == sizes["cp_size"] == 1:
        return  # nothing to shard over, whatever the product
    ranks = case.num_ranks if case.gpus_given else case.num_processes or case.num_ranks
    if (problem := product_problem(sizes, ranks)) is None:
        return
    product = math.prod(sizes.values())
    shard, left = divmod(ranks * sizes["dp_shard_size"], product)
    fits = left == 0 and (shard > 1 or sizes["cp_size"] > 1)
    yield _fsdp(
        *(case, "wrong", "groups-do-not-divide", problem),
        why="accelerate multiplies all five sizes and refuses a product that is not the number of ranks",
        change=f"{PREFIX}dp_shard_size: {shard}"
        if fits
        else f"{product} ranks, or sizes whose product is {ranks}",
        key="parallelism_config",
        edits=(Edit("yaml", ("parallelism_config", f"{PREFIX}dp_shard_size"), shard),) if fits else (),
    )
