"""Keys that no launch passes on, with what was meant by a misspelt one; keys removed, renamed, doubled."""

from collections.abc import Iterator
from difflib import get_close_matches

from slm_toolkit.doctor.case import Case
from slm_toolkit.doctor.finding import KEEP_LAST, REMOVE, Edit, Finding, fault, in_json, wrong
from slm_toolkit.strategy.passed_on import OF_DEEPSPEED, refused_of_json, refused_of_yaml

REMOVED_FROM_DEEPSPEED = (  # runtime/config.py: it refuses them
    *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue"),
    *("sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
)
REMOVED_FROM_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
_REMOVED = (
    *((key,) for key in REMOVED_FROM_DEEPSPEED),
    *(("zero_optimization", key) for key in REMOVED_FROM_ZERO),
)
RENAMED_IN_ZERO = {  # still read, with a warning; of the new key and its value
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", True),
}
_SYNONYMS = {  # what others call it, too far from the key to be found by likeness
    "bfloat16": "bf16",
    "max_grad_norm": "gradient_clipping",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_cpu_offload": "fsdp_offload_params",
    "fsdp_min_params": "fsdp_min_num_params",
    "num_nodes": "num_machines",
    "node_rank": "machine_rank",
}


def key_faults(case: Case) -> Iterator[Finding]:
    yield from _duplicates(case)
    yield from _refused(case)
    if case.has_json:
        yield from _of_json(case)


def meant_by(key: str, known: tuple[str, ...]) -> str | None:
    """The key that a misspelt one is closest to; None where nothing is close."""
    if key in _SYNONYMS and _SYNONYMS[key] in known:
        return _SYNONYMS[key]
    close = get_close_matches(key.lower(), known, n=1, cutoff=0.8)
    return close[0] if close else None


def _duplicates(case: Case) -> Iterator[Finding]:
    for file, keys in case.files.duplicates:
        value = case.config if file == "yaml" else case.files.deepspeed
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        yield wrong(
            "duplicate-key",
            f"{'.'.join(keys)} stands more than once: the last one, {value!r}, counts",
            Edit(file, keys, KEEP_LAST),
            why="YAML and JSON readers keep the last value of a key and say nothing, so the first one is "
            "what a reader sees and not what runs",
            topic="launch" if file == "yaml" else "deepspeed",
        )


def _refused(case: Case) -> Iterator[Finding]:
    """A finding for each setting that no launch passes on: write what was meant, or remove it."""
    for file, content, refused in (
        ("yaml", case.config, refused_of_yaml),
        ("json", case.files.deepspeed if case.has_json else {}, refused_of_json),
    ):
        for one in refused(content):
            if file == "json" and one.keys in _REMOVED:
                continue
            *above, key = one.keys
            section = content
            for name in above:
                section = section[name]
            prefix = f"{above[-1]}_" if above == ["parallelism_config"] else ""
            meant = meant_by(f"{prefix}{key}", one.known) or meant_by(key, one.known)
            edits = [Edit(file, one.keys, one.allowed[0] if len(one.allowed) == 1 else REMOVE)]
            if meant is not None and meant not in section:
                edits.append(Edit(file, (*above, meant), one.value))
            program = "accelerate" if file == "yaml" else "DeepSpeed"
            topic = "deepspeed" if file == "json" or above == ["deepspeed_config"] else "launch"
            yield wrong(
                "unknown-key" if one.known else "not-passed-on",
                f"{one.sentence}: did you mean {meant}?" if meant else one.sentence,
                *edits,
                why=f"{program} refuses it, or passes over it and says nothing"
                if meant
                else f"{one.why}, so no launch passes it on to {program}",
                change=f"write {meant}" if len(edits) > 1 else one.change,
                topic=topic if meant else "security",
            )


def _of_json(case: Case) -> Iterator[Finding]:
    for keys in _REMOVED:
        if keys[-1] in (case.zero if len(keys) > 1 else case.files.deepspeed):
            yield wrong(
                "removed-key",
                f"{'.'.join(keys)} is of a feature that DeepSpeed has removed",
                Edit("json", keys, REMOVE),
                why=f"DeepSpeed {OF_DEEPSPEED} refuses to start with it",
                topic="deepspeed",
            )
    for key, (new, value) in RENAMED_IN_ZERO.items():
        if key in case.zero:
            is_double = new in case.zero
            edits = [in_json(f"zero_optimization.{key}", REMOVE)]
            if case.zero[key] and not is_double:
                edits.append(in_json(f"zero_optimization.{new}", value))
            yield fault(
                "wrong" if is_double else "unwise",
                "renamed-key",
                f"{key} is called {new} now",
                *edits,
                why="DeepSpeed refuses both names together"
                if is_double
                else "DeepSpeed warns of the old name, and will stop reading it",
                topic="deepspeed",
            )
