"""Faults of `parallelism_config`: copies and shards that are no groups of the ranks there are."""

from collections.abc import Iterator
from functools import partial

from slm_toolkit.checkup.case import Case, fault, is_count
from slm_toolkit.finding import REMOVE, Edit, Finding
from slm_toolkit.strategy import is_shipped

_fsdp = partial(fault, topic="fsdp", file="yaml")


def group_faults(case: Case) -> Iterator[Finding]:
    yield from _sizes(case)
    yield from _copies(case)


def _sizes(case: Case) -> Iterator[Finding]:
    """Sizes that FSDP2 can't form groups of."""
    section = case.section("parallelism_config")
    if not section or not case.is_fsdp2:
        return
    prefix = "parallelism_config_"
    copies = section.get(f"{prefix}dp_replicate_size", 1)
    shard = section.get(f"{prefix}dp_shard_size", 1)
    context = section.get(f"{prefix}cp_size", 1)
    for name, size in ((f"{prefix}dp_replicate_size", copies), (f"{prefix}dp_shard_size", shard)):
        if not is_count(size):
            yield _fsdp(
                *(case, "wrong", "group-size", f"{name} is {size!r}"),
                why="it is a whole number of at least 1",
                change="remove parallelism_config: all ranks share one copy",
                key=f"parallelism_config.{name}",
                edits=(Edit("yaml", ("parallelism_config",), REMOVE),),
            )
            return
    if shard == 1 and context == 1 and all(str(key).startswith(prefix) for key in section):
        yield _fsdp(
            *(case, "wrong", "nothing-to-shard"),
            f"parallelism_config has dp_replicate_size {copies} and dp_shard_size 1",
            why="accelerate refuses FSDP2 without a group to shard over; copies alone are MULTI_GPU",
            change="remove parallelism_config, or give dp_shard_size the ranks of one copy",
            key="parallelism_config",
            edits=(Edit("yaml", ("parallelism_config",), REMOVE),),
        )


def _copies(case: Case) -> Iterator[Finding]:
    """A hybrid shard of one's own whose copies and shards are not the ranks; ours follow the nodes."""
    section = case.section("parallelism_config")
    copies, shard = (section.get(f"parallelism_config_dp_{name}_size", 1) for name in ("replicate", "shard"))
    if not (case.is_fsdp2 and is_count(copies) and is_count(shard) and shard > 1):
        return
    if is_shipped(case.files.yaml_path):
        return
    ranks = case.num_ranks if case.gpus_given else case.num_processes or case.num_ranks
    if copies * shard == ranks:
        return
    fits = ranks % copies == 0 and ranks // copies > 1
    edits = (Edit("yaml", ("parallelism_config", "parallelism_config_dp_shard_size"), ranks // copies),)
    yield fault(
        *(case, "wrong", "groups-do-not-divide"),
        f"dp_replicate_size {copies} x dp_shard_size {shard} with {ranks} ranks",
        topic="fsdp",
        why="accelerate refuses sizes whose product is not the number of ranks",
        change=f"parallelism_config_dp_shard_size: {ranks // copies}"
        if fits
        else f"an even number of ranks, or {copies * shard} of them",
        file="yaml",
        key="parallelism_config",
        edits=edits if fits else (),
    )
