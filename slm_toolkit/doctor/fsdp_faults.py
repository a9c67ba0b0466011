"""Find faults in `fsdp_config`: settings that FSDP2 ignores, reads differently or can't do."""

from collections.abc import Iterator
from typing import Any

from slm_toolkit.doctor.case import Case, is_count, is_older, is_true
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding, fault, unwise, wrong

_POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_SHARDINGS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_RESHARDS = ("FULL_SHARD", "HYBRID_SHARD")
"strategies that free a layer's parameters after its forward: accelerate 1.15, commands/to_fsdp2.py"
_DECODER_LAYERS = {  # transformers 5.23: the class in _no_split_modules
    "llama": "LlamaDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "mistral": "MistralDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3_text": "Gemma3DecoderLayer",
    "smollm3": "SmolLM3DecoderLayer",
    "olmo2": "Olmo2DecoderLayer",
    "granite": "GraniteDecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "gpt2": "GPT2Block",
    "gpt_neox": "GPTNeoXLayer",
    "mpt": "MptBlock",
}
_FOR_TIED = {"accelerate": "1.15", "torch": "2.13"}
"the first versions that keep embedding and head in one FSDP2 unit"
_DEFAULT_MIN_NUM_PARAMS = int(1e8)
"accelerate 1.15, commands/launch.py"
# accelerate 1.15, FullyShardedDataParallelPlugin: keys that apply to FSDP1 only, and why FSDP2 needs none
_OF_FSDP1 = {
    "fsdp_use_orig_params": "FSDP2 always uses the original parameters",
    "fsdp_sync_module_states": "FSDP2 shards the weights that each rank has and synchronizes nothing",
    "fsdp_forward_prefetch": "FSDP2 always prefetches one layer; --fsdp_prefetch N prefetches more",
    "fsdp_backward_prefetch": "FSDP2 always prefetches in backward; accelerate warns and ignores the key",
}


def fsdp_faults(case: Case) -> Iterator[Finding]:
    if case.engine != "FSDP" or not case.section("fsdp_config") and case.config.get("fsdp_config"):
        return  # another engine, or the section is not a mapping
    yield from (_fsdp2(case) if case.is_fsdp2 else _fsdp1(case))
    yield from _wrapping(case)
    yield from _checkpointing(case)
    yield from _loading_and_saving(case)


def _edit(case: Case, key: str, value: Any) -> Edit:
    """Return an edit of fsdp_config, in which keys may lack the prefix `fsdp_`."""
    section = case.section("fsdp_config")
    bare = key.removeprefix("fsdp_")
    return Edit("yaml", ("fsdp_config", bare if key not in section and bare in section else key), value)


def _sharding_named(value: object) -> str | None:
    """Return torch's name of a sharding strategy that is given by name or number; None: unknown."""
    if str(value).isdigit() and 1 <= int(str(value)) <= len(_SHARDINGS):
        return _SHARDINGS[int(str(value)) - 1]
    return str(value).upper() if str(value).upper() in _SHARDINGS else None


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
    edits += [_edit(case, k, REMOVE) for k in ("fsdp_sharding_strategy", *_OF_FSDP1) if k in case.fsdp]
    yield fault(
        "wrong" if version is None else "unwise",
        "fsdp-version-missing" if version is None else "fsdp1",
        "fsdp_config has no fsdp_version" if version is None else f"fsdp_version is {version}",
        *edits,
        why=("accelerate's default is 1. " if version is None else "")
        + "FSDP1 flattens the parameters of a unit into one, reads other keys and needs a GPU; this project "
        "compares FSDP2",
    )
    if version is not None and meant != runs:
        yield wrong(
            "reshard-ignored-by-fsdp1",
            f"fsdp_reshard_after_forward is {reshard} under FSDP1, which runs {runs}",
            *edits,
            why="accelerate's launcher always passes fsdp_sharding_strategy to FSDP1 (FULL_SHARD if the file "
            "has none), and FSDP1 obeys it",
            key="fsdp_config.fsdp_reshard_after_forward",
        )


def _fsdp2(case: Case) -> Iterator[Finding]:
    reshard = case.fsdp.get("fsdp_reshard_after_forward", True)
    if str(reshard).lower() not in ("true", "false"):
        value = (_sharding_named(reshard) or "FULL_SHARD") in _RESHARDS
        yield wrong(
            "reshard-not-boolean",
            f"fsdp_reshard_after_forward is {reshard!r}",
            _edit(case, "fsdp_reshard_after_forward", value),
            why="FSDP2 accepts true (full shard) or false (shard grad-op); accelerate refuses FSDP1's names",
        )
    yield from _sharding_strategy(case, reshard)
    for key, reason in _OF_FSDP1.items():
        value = case.fsdp.get(key)
        if value is None or str(value).upper() == "NO_PREFETCH":
            continue
        if key == "fsdp_sync_module_states" and not value:
            continue  # the launcher refuses false: see _loading_and_saving
        yield unwise(
            "fsdp1-key",
            f"{key} is {str(value).lower()} under FSDP2, which does not read it",
            _edit(case, key, REMOVE),
            why=reason,
        )
    if case.spec.tied and (old := [p for p, v in _FOR_TIED.items() if is_older(case.host, p, v)]):
        installed = " and ".join(f"{package} {case.host.versions[package]}" for package in old)
        needed = " ".join(f'"{package}>={version}"' for package, version in _FOR_TIED.items())
        yield wrong(
            "tied-embeddings",
            f"{case.spec.name} ties its embeddings; installed: {installed}",
            why="these versions put embedding and head into two FSDP2 units: their shared matrix splits into "
            "two, or torch refuses. accelerate 1.15 with torch 2.13 puts both into one unit",
            change=f"pip install -U {needed}, or ds_zero3",
            file="yaml",
            topic="versions",
        )


def _sharding_strategy(case: Case, reshard: object) -> Iterator[Finding]:
    if "fsdp_sharding_strategy" not in case.fsdp:
        return
    written = case.fsdp["fsdp_sharding_strategy"]
    named = _sharding_named(written)
    runs = "FULL_SHARD" if str(reshard).lower() != "false" else "SHARD_GRAD_OP"
    is_meant = named == runs
    reshards = named is None or named in _RESHARDS
    edits = [_edit(case, "fsdp_sharding_strategy", REMOVE)]
    if not is_meant and "fsdp_reshard_after_forward" not in case.fsdp:
        edits.append(_edit(case, "fsdp_reshard_after_forward", reshards))
    change = f"fsdp_reshard_after_forward: {str(reshards).lower()} in its place"
    if named and named.startswith("HYBRID"):
        change += ", and parallelism_config for the groups: see accel_configs/fsdp_hybrid_shard.yaml"
    if named == "NO_SHARD":
        change = "distributed_type: MULTI_GPU, which shards nothing"
    yield fault(
        "unwise" if is_meant else "wrong",
        "sharding-strategy-ignored",
        f"fsdp_sharding_strategy is {written} under FSDP2, which runs {runs}",
        *edits,
        why="accelerate reads it for FSDP1 only; under FSDP2 only fsdp_reshard_after_forward decides",
        change=None if is_meant else change,
    )


def _wrapping(case: Case) -> Iterator[Finding]:
    key, layer = "fsdp_auto_wrap_policy", case.spec.params_per_layer
    policy, minimum = case.fsdp.get(key), case.fsdp.get("fsdp_min_num_params")
    named = str(policy or "NO_WRAP").upper()
    severity, sentence, edits = "wrong", f"{key} is {policy}", [_edit(case, key, "TRANSFORMER_BASED_WRAP")]
    if named == "NO_WRAP":
        name = "no-wrap-policy"
        if policy is None:
            sentence = f"{key} is absent"
        why = (
            f"all {case.spec.num_layers} decoder layers become one unit, gathered at once: "
            f"{2 * case.spec.num_params / 2**30:.1f} GiB; nothing overlaps and sharding saves little memory"
        )
    elif named == "SIZE_BASED_WRAP":
        least = minimum if is_count(minimum) else _DEFAULT_MIN_NUM_PARAMS
        severity, name = ("wrong" if layer <= least else "unwise"), "size-based-wrap"
        sentence += f", with units of more than {least:,} parameters"
        why = (
            f"a layer of {case.spec.name} has {layer:,}: "
            + (
                "no layer becomes a unit"
                if layer <= least
                else "a layer and its larger matrices become units"
            )
            + "; communication overlaps best with one unit per decoder layer"
        )
        if minimum is not None:
            edits.append(_edit(case, "fsdp_min_num_params", REMOVE))
    elif named not in _POLICIES:
        name, why = "wrap-policy-unknown", f"accelerate accepts only {', '.join(_POLICIES)}"
    else:
        yield from _wrapped_class(case)
        return
    yield fault(severity, name, sentence, *edits, why=why)


def _wrapped_class(case: Case) -> Iterator[Finding]:
    key, right = "fsdp_transformer_layer_cls_to_wrap", _DECODER_LAYERS.get(case.spec.model_type)
    named, minimum = case.fsdp.get(key), case.fsdp.get("fsdp_min_num_params")
    if named is not None and right is not None and right not in str(named).replace(" ", "").split(","):
        yield wrong(
            "wrapped-class",
            f"{key} is {named}; the layers of {case.spec.name} are {right}",
            _edit(case, key, right),
            why="accelerate stops if the model has no such class, and otherwise shards other modules",
            then=", or remove it: accelerate then uses the class that the model names",
        )
    if minimum is not None:
        yield unwise(
            "wrap-key-ignored",
            f"fsdp_min_num_params is {minimum}, which TRANSFORMER_BASED_WRAP does not read",
            _edit(case, "fsdp_min_num_params", REMOVE),
            why="only SIZE_BASED_WRAP reads it",
        )


def _checkpointing(case: Case) -> Iterator[Finding]:
    key = "fsdp_activation_checkpointing"
    is_on, flag = is_true(case.fsdp.get(key)), case.flags.gradient_checkpointing
    if is_on and flag != "none":
        yield wrong(
            "checkpointing-twice",
            f"{key} is true together with --gradient_checkpointing {flag}",
            _edit(case, key, False),
            why="each layer would be recomputed twice; the trainer refuses to start",
        )
    if is_true(case.fsdp.get(f"{key}_offload")) and not (is_on and case.is_fsdp2):
        yield wrong(
            "checkpointing-offload-alone",
            f"{key}_offload is true without {key} and FSDP2",
            _edit(case, f"{key}_offload", REMOVE),
            why="accelerate refuses it: no activation checkpoint exists that could be offloaded",
        )


def _loading_and_saving(case: Case) -> Iterator[Finding]:
    loads = case.fsdp.get("fsdp_cpu_ram_efficient_loading", True)  # the launcher's default
    # the launcher tests these values as Python booleans: it takes a quoted "false" as true
    if loads and not case.fsdp.get("fsdp_sync_module_states", True):
        value = "true" if "fsdp_cpu_ram_efficient_loading" in case.fsdp else "true by default"
        yield wrong(
            "ram-efficient-without-sync",
            f"fsdp_sync_module_states is false, fsdp_cpu_ram_efficient_loading is {value}",
            _edit(case, "fsdp_sync_module_states", REMOVE),
            why="accelerate launch refuses this pair, under FSDP2 too: only rank 0 would have the weights",
        )
    kinds = ("SHARDED_STATE_DICT", "FULL_STATE_DICT", *(() if case.is_fsdp2 else ("LOCAL_STATE_DICT",)))
    kind = case.fsdp.get("fsdp_state_dict_type")
    if kind is not None and str(kind).upper() not in kinds:
        yield wrong(
            "state-dict-type",
            f"fsdp_state_dict_type is {kind}",
            _edit(case, "fsdp_state_dict_type", "SHARDED_STATE_DICT"),
            why=f"FSDP{2 if case.is_fsdp2 else 1} accepts {', '.join(kinds)}; accelerate refuses others",
        )
