"""Find faults in `fsdp_config`: settings that FSDP2 ignores, reads differently or can't do."""

from collections.abc import Iterator
from typing import Any

from slm_toolkit.doctor.case import Case
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding, fault, wrong
from slm_toolkit.doctor.rule import Rule, faults_by
from slm_toolkit.strategy.settings import fsdp_settings, is_true

_FOR_TIED = (2, 13)
"the first version of torch that keeps embedding and head in one FSDP2 unit"
_OF_FSDP1 = (
    "fsdp_sharding_strategy",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
    "fsdp_forward_prefetch",
    "fsdp_backward_prefetch",
)
"keys that FSDP2 does not read: accelerate 1.15, FullyShardedDataParallelPlugin"
_RESHARD, _WRAP, _BY_LAYER = (
    "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy",
    "TRANSFORMER_BASED_WRAP",
)

_RULES = (
    Rule(
        "wrong",
        "no-wrap-policy",
        _WRAP,
        lambda case, value: str(value or "NO_WRAP").upper() == "NO_WRAP",
        _BY_LAYER,
        why="all {spec.num_layers} decoder layers become one unit, gathered at once: {gib:.1f} GiB; nothing "
        "overlaps and sharding saves little memory",
    ),
    Rule(
        "wrong",
        "size-based-wrap",
        _WRAP,
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


def _as_meant(case: Case) -> list[Edit]:
    """Return the edits with which FSDP2 shards as the keys of FSDP1 say."""
    reshard = case.fsdp.get(_RESHARD)
    is_set = str(reshard).lower() in ("true", "false")
    meant = is_true(reshard) if is_set else fsdp_settings(case.fsdp).reshards
    edits = [] if reshard is meant else [_edit(case, _RESHARD, meant)]
    return edits + [_edit(case, key, REMOVE) for key in _OF_FSDP1 if key in case.fsdp]


def _fsdp1(case: Case) -> Iterator[Finding]:
    version = case.fsdp.get("fsdp_version")
    yield fault(
        "wrong" if version is None else "unwise",
        "fsdp-version-missing" if version is None else "fsdp1",
        "fsdp_config has no fsdp_version" if version is None else f"fsdp_version is {version}",
        _edit(case, "fsdp_version", 2),
        *_as_meant(case),
        why="FSDP1, accelerate's default, flattens the parameters of a unit into one, reads other keys and "
        "needs a GPU; this project compares FSDP2",
    )


def _fsdp2(case: Case) -> Iterator[Finding]:
    torch, written = case.host.torch, case.fsdp.get("fsdp_sharding_strategy")
    runs = "SHARD_GRAD_OP" if str(case.fsdp.get(_RESHARD)).lower() == "false" else "FULL_SHARD"
    if written is not None and fsdp_settings(case.fsdp).sharding_strategy != runs:
        yield wrong(
            "sharding-strategy-ignored",
            f"fsdp_sharding_strategy is {written} under FSDP2, which runs {runs}",
            *_as_meant(case),
            why="accelerate reads it for FSDP1 only; under FSDP2 fsdp_reshard_after_forward decides, and "
            "parallelism_config forms the groups of a hybrid shard",
        )
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
