"""Find faults in `fsdp_config`: settings that FSDP2 ignores, reads differently or can't do."""

from collections.abc import Iterator
from typing import Any

from slm_toolkit.doctor.case import Case
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding, fault, wrong
from slm_toolkit.doctor.rule import Rule, faults_by
from slm_toolkit.strategy.settings import FSDP1_SHARDING_STRATEGIES, fsdp_settings, is_true

_RESHARDS = ("FULL_SHARD", "HYBRID_SHARD")
"strategies that free a layer's parameters after its forward: accelerate 1.15, commands/to_fsdp2.py"
_FOR_TIED = (2, 13)
"the first version of torch that keeps embedding and head in one FSDP2 unit"
_OF_FSDP1 = (
    *("fsdp_sharding_strategy", "fsdp_use_orig_params", "fsdp_sync_module_states"),
    *("fsdp_forward_prefetch", "fsdp_backward_prefetch"),
)
"keys that FSDP2 does not read: accelerate 1.15, FullyShardedDataParallelPlugin"
_BY_LAYER = "TRANSFORMER_BASED_WRAP"


_RULES = (
    Rule(
        *("wrong", "no-wrap-policy", "fsdp_auto_wrap_policy"),
        lambda case, value: str(value or "NO_WRAP").upper() == "NO_WRAP",
        _BY_LAYER,
        why="all {spec.num_layers} decoder layers become one unit, gathered at once: {gib:.1f} GiB; nothing "
        "overlaps and sharding saves little memory",
    ),
    Rule(
        *("wrong", "size-based-wrap", "fsdp_auto_wrap_policy"),
        lambda case, value: str(value).upper() == "SIZE_BASED_WRAP",
        _BY_LAYER,
        why="a unit is then a module of more than fsdp_min_num_params parameters (default 100,000,000), and "
        "a layer of {spec.name} has {spec.params_per_layer:,}; communication overlaps best with one unit per "
        "decoder layer",
    ),
)


def fsdp_faults(case: Case) -> Iterator[Finding]:
    if case.engine != "FSDP" or not case.section("fsdp_config") and case.config.get("fsdp_config"):
        return  # another engine, or the section is not a mapping
    yield from (_fsdp2(case) if case.is_fsdp2 else _fsdp1(case))
    yield from faults_by(_RULES, case, case.fsdp, edit=lambda key, value: _edit(case, key, value))


def _edit(case: Case, key: str, value: Any) -> Edit:
    """Return an edit of fsdp_config, in which keys may lack the prefix `fsdp_`."""
    section = case.section("fsdp_config")
    bare = key.removeprefix("fsdp_")
    return Edit("yaml", ("fsdp_config", bare if key not in section and bare in section else key), value)


def _sharding_named(value: object) -> str | None:
    """Return torch's name of a sharding strategy that is given by name or number; None: unknown."""
    named = fsdp_settings({"fsdp_sharding_strategy": value}).sharding_strategy
    return named if named in FSDP1_SHARDING_STRATEGIES else None


def _fsdp1(case: Case) -> Iterator[Finding]:
    """Report version 1 or a missing version; the edits make FSDP2 shard as the file intends."""
    version, reshard = case.fsdp.get("fsdp_version"), case.fsdp.get("fsdp_reshard_after_forward")
    runs = _sharding_named(case.fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")) or "FULL_SHARD"
    meant = runs
    if reshard is not None:
        meant = _sharding_named(reshard) or ("FULL_SHARD" if is_true(reshard) else "SHARD_GRAD_OP")
    edits = [_edit(case, "fsdp_version", 2)]
    if reshard is not (meant in _RESHARDS):
        edits.append(_edit(case, "fsdp_reshard_after_forward", meant in _RESHARDS))
    edits += [_edit(case, key, REMOVE) for key in _OF_FSDP1 if key in case.fsdp]
    is_other = version is not None and meant != runs
    yield fault(
        "wrong" if version is None or is_other else "unwise",
        "fsdp-version-missing" if version is None else "fsdp1",
        "fsdp_config has no fsdp_version" if version is None else f"fsdp_version is {version}",
        *edits,
        why=("accelerate's default is 1. " if version is None else "")
        + (f"fsdp_reshard_after_forward is {reshard}, but FSDP1 runs {runs}. " if is_other else "")
        + "FSDP1 flattens the parameters of a unit into one, reads other keys and needs a GPU; this project "
        "compares FSDP2",
    )


def _fsdp2(case: Case) -> Iterator[Finding]:
    reshard, torch = case.fsdp.get("fsdp_reshard_after_forward", True), case.host.torch
    yield from _sharding_strategy(case, reshard)
    if case.spec.tied and torch and tuple(map(int, torch.split(".")[:2])) < _FOR_TIED:
        yield wrong(
            "tied-embeddings",
            f"{case.spec.name} ties its embeddings; installed: torch {torch}",
            why="this version puts embedding and head into two FSDP2 units: their shared matrix splits into "
            "two, or torch refuses",
            change='pip install -U "torch>=2.13", or ds_zero3',
            file="yaml",
            topic="versions",
        )


def _sharding_strategy(case: Case, reshard: object) -> Iterator[Finding]:
    written = case.fsdp.get("fsdp_sharding_strategy")
    named, runs = (
        _sharding_named(written),
        "SHARD_GRAD_OP" if str(reshard).lower() == "false" else "FULL_SHARD",
    )
    if written is None or named == runs:
        return
    reshards = named is None or named in _RESHARDS
    edits = [_edit(case, "fsdp_sharding_strategy", REMOVE)]
    if "fsdp_reshard_after_forward" not in case.fsdp:
        edits.append(_edit(case, "fsdp_reshard_after_forward", reshards))
    change = f"fsdp_reshard_after_forward: {str(reshards).lower()} in its place"
    if named and named.startswith("HYBRID"):
        change += ", and parallelism_config for the groups: see accel_configs/fsdp_hybrid_shard.yaml"
    if named == "NO_SHARD":
        change = "distributed_type: MULTI_GPU, which shards nothing"
    yield wrong(
        "sharding-strategy-ignored",
        f"fsdp_sharding_strategy is {written} under FSDP2, which runs {runs}",
        *edits,
        why="accelerate reads it for FSDP1 only; under FSDP2 only fsdp_reshard_after_forward decides",
        change=change,
    )
