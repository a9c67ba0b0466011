"""Faults of `fsdp_config`: what FSDP2 does not read, what it reads otherwise, and what it can't do."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from slm_toolkit.doctor.case import Case, fault, is_count, is_true
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding
from slm_toolkit.doctor.host import is_older

_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_RESHARDS = ("FULL_SHARD", "HYBRID_SHARD")
"shardings that free a layer's parameters after its forward: accelerate 1.15, commands/to_fsdp2.py"
_DECODER_LAYERS = {  # transformers 5.23: the class that _no_split_modules names
    "llama": "LlamaDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "mistral": "MistralDecoderLayer",
    "gpt2": "GPT2Block",
    "gpt_neox": "GPTNeoXLayer",
    "mpt": "MptBlock",
}
_DEFAULT_MIN_NUM_PARAMS = int(1e8)
"accelerate 1.15, commands/launch.py"
# accelerate 1.15, FullyShardedDataParallelPlugin: read for FSDP1 only, or read and dropped
_OF_FSDP1 = {
    "fsdp_use_orig_params": "FSDP2 always uses the original parameters",
    "fsdp_sync_module_states": "FSDP2 shards what each rank holds and has nothing to synchronize",
    "fsdp_forward_prefetch": "FSDP2 prefetches one layer by itself; --fsdp_prefetch N asks for more",
    "fsdp_backward_prefetch": "FSDP2 prefetches in backward by itself; accelerate warns and drops it",
}
_fsdp = partial(fault, topic="fsdp", file="yaml")


def fsdp_faults(case: Case) -> Iterator[Finding]:
    if case.engine != "FSDP" or not case.section("fsdp_config") and case.config.get("fsdp_config"):
        return  # another engine, or no section to speak of
    yield from (_fsdp2(case) if case.is_fsdp2 else _fsdp1(case))
    yield from _wrapping(case)
    yield from _checkpointing(case)
    yield from _loading_and_saving(case)


def _edit(case: Case, key: str, value: Any) -> Edit:
    """Of fsdp_config, in which a key may lack its prefix."""
    section = case.section("fsdp_config")
    bare = key.removeprefix("fsdp_")
    return Edit("yaml", ("fsdp_config", bare if key not in section and bare in section else key), value)


def _sharding_named(value: object) -> str | None:
    """torch's name of a sharding strategy given by name or number."""
    if str(value).isdigit() and 1 <= int(str(value)) <= len(_SHARDINGS):
        return _SHARDINGS[int(str(value)) - 1]
    return str(value).upper() if str(value).upper() in _SHARDINGS else None


def _fsdp1(case: Case) -> Iterator[Finding]:
    """No version, or version 1; what to write so that FSDP2 does what is asked."""
    version, reshard = case.fsdp.get("fsdp_version"), case.fsdp.get("fsdp_reshard_after_forward")
    runs = _sharding_named(case.fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")) or "FULL_SHARD"
    asked = runs
    if reshard is not None:
        asked = _sharding_named(reshard) or ("FULL_SHARD" if is_true(reshard) else "SHARD_GRAD_OP")
    value = asked in _RESHARDS
    gone = [key for key in ("fsdp_sharding_strategy", *_OF_FSDP1) if key in case.fsdp]
    edits = [_edit(case, "fsdp_version", 2), *(_edit(case, key, REMOVE) for key in gone)]
    if reshard is not value:
        edits.append(_edit(case, "fsdp_reshard_after_forward", value))
    change = f"fsdp_version: 2, with fsdp_reshard_after_forward: {str(value).lower()}"
    yield _fsdp(
        *(case, "wrong" if version is None else "unwise"),
        "fsdp-version-missing" if version is None else "fsdp1",
        "fsdp_config has no fsdp_version" if version is None else f"fsdp_version is {version}",
        why=("accelerate takes a missing version for 1. " if version is None else "")
        + "FSDP1 flattens a unit's parameters into one, takes other keys and needs a GPU; what is compared "
        "here is FSDP2",
        change=change + (f", without {', '.join(gone)}" if gone else ""),
        key="fsdp_config.fsdp_version",
        edits=tuple(edits),
    )
    if version is not None and asked != runs:
        yield _fsdp(
            *(case, "wrong", "reshard-ignored-by-fsdp1"),
            f"fsdp_reshard_after_forward is {reshard} under FSDP1, which runs {runs}",
            why="accelerate's launcher always hands FSDP1 a fsdp_sharding_strategy, FULL_SHARD where the "
            "file names none, and that one wins",
            change=change,
            key="fsdp_config.fsdp_reshard_after_forward",
            edits=tuple(edits),
        )


def _fsdp2(case: Case) -> Iterator[Finding]:
    reshard = case.fsdp.get("fsdp_reshard_after_forward", True)
    if str(reshard).lower() not in ("true", "false"):
        value = (_sharding_named(reshard) or "FULL_SHARD") in _RESHARDS
        yield _fsdp(
            *(case, "wrong", "reshard-not-boolean", f"fsdp_reshard_after_forward is {reshard!r}"),
            why="FSDP2 takes true (full shard) or false (shard grad-op); accelerate refuses FSDP1's names",
            change=f"fsdp_reshard_after_forward: {str(value).lower()}",
            key="fsdp_config.fsdp_reshard_after_forward",
            edits=(_edit(case, "fsdp_reshard_after_forward", value),),
        )
    yield from _sharding_strategy(case, reshard)
    for key, reason in _OF_FSDP1.items():
        value = case.fsdp.get(key)
        if value is None or str(value).upper() == "NO_PREFETCH":
            continue
        if key == "fsdp_sync_module_states" and not _is_truthy(value):
            continue  # the launcher refuses that one: see _loading_and_saving
        yield _fsdp(
            *(
                case,
                "unwise",
                "fsdp1-key",
                f"{key} is {str(value).lower()} under FSDP2, which does not read it",
            ),
            why=reason,
            change=f"remove {key}",
            key=f"fsdp_config.{key}",
            edits=(_edit(case, key, REMOVE),),
        )
    if case.spec.tied and (old := [p for p, v in _FOR_TIED.items() if is_older(case.host, p, v)]):
        has = " and ".join(f"{package} {case.host.versions[package]}" for package in old)
        wanted = " ".join(f'"{package}>={version}"' for package, version in _FOR_TIED.items())
        yield fault(
            *(case, "wrong", "tied-embeddings", f"{case.spec.name} ties its embeddings; here is {has}"),
            topic="versions",
            why="embedding and head belong to two FSDP2 units there, and their one matrix is torn or torch "
            "refuses; both are in one unit from accelerate 1.15 with torch 2.13 on",
            change=f"pip install -U {wanted}, or ds_zero3",
            file="yaml",
        )


_FOR_TIED = {"accelerate": "1.15", "torch": "2.13"}


def _sharding_strategy(case: Case, reshard: object) -> Iterator[Finding]:
    if "fsdp_sharding_strategy" not in case.fsdp:
        return
    said = case.fsdp["fsdp_sharding_strategy"]
    named = _sharding_named(said)
    runs = "FULL_SHARD" if str(reshard).lower() != "false" else "SHARD_GRAD_OP"
    is_meant = named == runs
    edits = [_edit(case, "fsdp_sharding_strategy", REMOVE)]
    if not is_meant and "fsdp_reshard_after_forward" not in case.fsdp:
        edits.append(_edit(case, "fsdp_reshard_after_forward", named is None or named in _RESHARDS))
    change = f"fsdp_reshard_after_forward: {str(named is None or named in _RESHARDS).lower()} in its place"
    if named and named.startswith("HYBRID"):
        change += ", and parallelism_config for the groups: see accel_configs/fsdp_hybrid_shard.yaml"
    if named == "NO_SHARD":
        change = "distributed_type: MULTI_GPU, which shards nothing"
    yield _fsdp(
        *(case, "unwise" if is_meant else "wrong", "sharding-strategy-ignored"),
        f"fsdp_sharding_strategy is {said} under FSDP2, which runs {runs}",
        why="accelerate reads it for FSDP1 only; under FSDP2 fsdp_reshard_after_forward alone decides",
        change="remove fsdp_sharding_strategy" if is_meant else change,
        key="fsdp_config.fsdp_sharding_strategy",
        edits=tuple(edits),
    )


def _wrapping(case: Case) -> Iterator[Finding]:
    key, layer = "fsdp_auto_wrap_policy", case.spec.params_per_layer
    policy = case.fsdp.get(key)
    named = str(policy or "NO_WRAP").upper()
    edits = [_edit(case, key, "TRANSFORMER_BASED_WRAP")]
    minimum = case.fsdp.get("fsdp_min_num_params")
    if named == "NO_WRAP":
        severity, name = "wrong", "no-wrap-policy"
        sentence = f"{key} is absent" if policy is None else f"{key} is {policy}"
        why = (
            f"all {case.spec.num_layers} decoder layers become one unit that is gathered whole: "
            f"{2 * case.spec.num_params / 2**30:.1f} GiB at once, nothing overlaps, sharding saves little"
        )
    elif named == "SIZE_BASED_WRAP":
        least = minimum if is_count(minimum) else _DEFAULT_MIN_NUM_PARAMS
        severity, name = ("wrong" if layer <= least else "unwise"), "size-based-wrap"
        sentence = f"{key} is {policy}, with units of more than {least:,} parameters"
        why = (
            f"a layer of {case.spec.name} has {layer:,}: "
            + ("no layer becomes a unit" if layer <= least else "it is a unit, and matrices in it may be too")
            + "; a unit per decoder layer is what overlaps"
        )
        edits += [_edit(case, "fsdp_min_num_params", REMOVE)] * (minimum is not None)
    elif named not in _POLICIES:
        severity, name = "wrong", "wrap-policy-unknown"
        sentence = f"{key} is {policy}"
        why = f"accelerate knows {', '.join(_POLICIES)} and refuses others"
    else:
        yield from _wrapped_class(case)
        return
    yield _fsdp(
        *(case, severity, name, sentence),
        why=why,
        change=f"{key}: TRANSFORMER_BASED_WRAP",
        key=f"fsdp_config.{key}",
        edits=tuple(edits),
    )


def _wrapped_class(case: Case) -> Iterator[Finding]:
    key, right = "fsdp_transformer_layer_cls_to_wrap", _DECODER_LAYERS.get(case.spec.model_type)
    said = case.fsdp.get(key)
    if said is not None and right is not None and right not in str(said).replace(" ", "").split(","):
        yield _fsdp(
            *(case, "wrong", "wrapped-class", f"{key} is {said}; the layers of {case.spec.name} are {right}"),
            why="accelerate stops where the model has no such class, and else shards other modules",
            change=f"{key}: {right}, or remove it: the model names its own",
            key=f"fsdp_config.{key}",
            edits=(_edit(case, key, right),),
        )
    if (minimum := case.fsdp.get("fsdp_min_num_params")) is not None:
        yield _fsdp(
            *(
                case,
                "unwise",
                "wrap-key-ignored",
                f"fsdp_min_num_params is {minimum}, by which nothing is wrapped",
            ),
            why="only SIZE_BASED_WRAP reads it",
            change="remove fsdp_min_num_params",
            key="fsdp_config.fsdp_min_num_params",
            edits=(_edit(case, "fsdp_min_num_params", REMOVE),),
        )


def _checkpointing(case: Case) -> Iterator[Finding]:
    key = "fsdp_activation_checkpointing"
    own, flag = is_true(case.fsdp.get(key)), case.flags.gradient_checkpointing
    if own and flag != "none":
        yield _fsdp(
            *(case, "wrong", "checkpointing-twice", f"{key} is true beside --gradient_checkpointing {flag}"),
            why="layers that are computed again would be computed again in that; the trainer refuses it",
            change=f"{key}: false",
            key=f"fsdp_config.{key}",
            edits=(_edit(case, key, False),),
        )
    if is_true(case.fsdp.get(f"{key}_offload")) and not (own and case.is_fsdp2):
        yield _fsdp(
            *(case, "wrong", "checkpointing-offload-alone", f"{key}_offload is true without {key} and FSDP2"),
            why="accelerate refuses it: there is no checkpoint to offload",
            change=f"remove {key}_offload",
            key=f"fsdp_config.{key}_offload",
            edits=(_edit(case, f"{key}_offload", REMOVE),),
        )


def _loading_and_saving(case: Case) -> Iterator[Finding]:
    loads = case.fsdp.get("fsdp_cpu_ram_efficient_loading", True)  # the launcher's own default
    sync = case.fsdp.get("fsdp_sync_module_states", True)
    # the launcher tests for truth, before it makes texts of the values: "false" in quotes is true to it
    if _is_truthy(loads) and not _is_truthy(sync):
        said = "true" if "fsdp_cpu_ram_efficient_loading" in case.fsdp else "true by default"
        yield _fsdp(
            *(case, "wrong", "ram-efficient-without-sync"),
            f"fsdp_sync_module_states is false, fsdp_cpu_ram_efficient_loading is {said}",
            why="accelerate launch refuses the pair, under FSDP2 too: rank 0 alone would hold the weights",
            change="remove fsdp_sync_module_states",
            key="fsdp_config.fsdp_sync_module_states",
            edits=(_edit(case, "fsdp_sync_module_states", REMOVE),),
        )
    kinds = ("SHARDED_STATE_DICT", "FULL_STATE_DICT", *(() if case.is_fsdp2 else ("LOCAL_STATE_DICT",)))
    kind = case.fsdp.get("fsdp_state_dict_type")
    if kind is not None and str(kind).upper() not in kinds:
        yield _fsdp(
            *(case, "wrong", "state-dict-type", f"fsdp_state_dict_type is {kind}"),
            why=f"FSDP{2 if case.is_fsdp2 else 1} takes {', '.join(kinds)}; accelerate refuses others",
            change="fsdp_state_dict_type: SHARDED_STATE_DICT",
            key="fsdp_config.fsdp_state_dict_type",
            edits=(_edit(case, "fsdp_state_dict_type", "SHARDED_STATE_DICT"),),
        )


def _is_truthy(value: object) -> bool:
    return bool(value)
