"""Find faults in a DeepSpeed JSON and in `deepspeed_config`."""

from collections.abc import Iterator
from dataclasses import replace

from slm_toolkit.doctor.case import Case, as_written, is_true, value_at
from slm_toolkit.doctor.finding import (
    REMOVE,
    Edit,
    Finding,
    change_by,
    in_json,
    in_yaml,
    wrong,
)
from slm_toolkit.doctor.rule import Rule, faults_by
from slm_toolkit.strategy.deepspeed_json import KEYS_OF_THE_JSON

ZERO = "zero_optimization"
OFFLOADED = ("offload_optimizer", "offload_param")
_AUTO_IS_TAKEN = (  # accelerate 1.15: Accelerator._prepare_deepspeed
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    "gradient_clipping",
)
BUCKET = 13_107_200
"elements: 25 MiB in bf16, like DDP's buckets; the value in ds_configs/"
_WORTH_SAYING_BYTES = 100 * 2**20
"a bucket that wastes less memory than this is not reported"
_RENAMED = {
    "cpu_offload": "offload_optimizer: {device: cpu}",
    "cpu_offload_param": "offload_param: {device: cpu}",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
}
_TWICE = "accelerate refuses this setting in a YAML that also names a DeepSpeed JSON"
_LARGER = "{key} is {value}, {spec.name} has {spec.num_params:,}"


def _reuse_distance(case: Case) -> int:
    """Between the first layer's forward and its backward, every other layer runs twice."""
    return 2 * (case.spec.num_params - case.spec.params_per_layer)


def _enough_live(case: Case) -> int:
    """Return the elements of two layers and the head."""
    return max(2 * case.spec.params_per_layer + case.spec.embedding_params, BUCKET)


def _gathers_all(case: Case, value: object) -> bool:
    zero, params = case.zero_settings, case.spec.num_params
    is_all = zero.stage == 3 and zero.stage3_max_live_parameters >= params
    return is_all and zero.stage3_prefetch_bucket_size > 0 and 2 * (params - _enough_live(case)) >= 2**30


def _node_ranks(case: Case) -> int:
    return min(case.num_ranks, case.gpus_per_node)


def _hpz_ranks(case: Case) -> int:
    """Return the ranks of hpZ's groups; 1 for none, and if a launch refuses the groups."""
    size = case.zero_settings.zero_hpz_partition_size
    size = _node_ranks(case) if size == "auto" else size
    return size if case.zero_stage == 3 and case.num_ranks % size == 0 else 1


# sizes: deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py
_RULES = (
    Rule(
        *("unwise", "zero-stage-0", f"{ZERO}.stage", lambda case, value: case.zero_stage == 0, 1),
        sentence="ZeRO stage 0 shards nothing",
        why="every rank keeps the whole training state as under DDP, which overlaps its reduction better",
        then=", or accel_configs/ddp.yaml",
    ),
    Rule(
        *("wrong", "offload-param-below-stage-3", f"{ZERO}.offload_param.device"),
        lambda case, value: case.zero_stage < 3 and case.zero_settings.offload_param.device != "none",
        "none",
        sentence="offload_param under ZeRO-{case.zero_stage}",
        why="only ZeRO-3 can offload parameters; under lower stages they stay on the GPU",
        then=", or stage 3",
    ),
    Rule(
        *("wrong", "nvme-below-stage-3", f"{ZERO}.offload_optimizer.device"),
        lambda case, value: case.zero_stage in (1, 2) and value == "nvme",
        "cpu",
        sentence="offload_optimizer to nvme under ZeRO-{case.zero_stage}",
        why="ZeRO-1 and 2 offload to the host's RAM even if nvme is named: nothing is written to disk",
        then=", or stage 3",
    ),
    Rule(
        *("wrong", "zero3-cannot-save", f"{ZERO}.stage3_gather_16bit_weights_on_model_save"),
        lambda case, value: case.zero_stage == 3 and case.flags.save_final_model and not is_true(value),
        True,
        why="absent and auto mean false, and accelerate then refuses to save the final model after the "
        "last step",
    ),
    Rule(
        *("unwise", "bucket-larger-than-model", f"{ZERO}.reduce_bucket_size"),
        lambda case, value: (
            case.zero_stage
            and 2 * (case.zero_settings.reduce_bucket_size - case.spec.num_params) >= _WORTH_SAYING_BYTES
        ),
        BUCKET,
        sentence=_LARGER,
        why="DeepSpeed allocates the whole bucket, twice if overlap_comm is true below stage 3, and reduces "
        "no gradient before backward ends",
    ),
    Rule(
        *("could be faster", "no-overlap", f"{ZERO}.overlap_comm"),
        lambda case, value: case.zero_stage and value in (None, False) and not case.zero_settings.overlaps,
        True,
        sentence="{key} is {value} under ZeRO-{case.zero_stage}, so nothing overlaps",
        why="backward then waits while gradients are reduced; DDP and FSDP reduce them during backward",
        then=", which allocates a second bucket",
    ),
    Rule(
        *("wrong", "zero3-never-releases", f"{ZERO}.stage3_max_reuse_distance"),
        lambda case, value: (
            case.zero_stage == 3 and case.zero_settings.stage3_max_reuse_distance >= _reuse_distance(case)
        ),
        0,
        sentence="{key} is {value}, more than {spec.name} uses between a layer's forward and its backward",
        why="parameters that are used again within this distance stay gathered: from the second step on, "
        "every rank keeps all of {spec.name}, {gib:.2f} GiB, as under ZeRO-2",
    ),
    Rule(
        *("unwise", "zero3-gathers-all", f"{ZERO}.stage3_max_live_parameters", _gathers_all, _enough_live),
        sentence=_LARGER,
        why="parameters are gathered ahead until this many are live: here all of them, {gib:.1f} GiB on "
        "every rank",
        then=", enough for two layers and the head",
    ),
    Rule(
        *("unwise", "prefetch-larger-than-model", f"{ZERO}.stage3_prefetch_bucket_size"),
        lambda case, value: (
            case.zero_stage == 3
            and case.zero_settings.stage3_prefetch_bucket_size >= case.spec.num_params
            and 2 * case.spec.num_params >= _WORTH_SAYING_BYTES
        ),
        BUCKET,
        sentence=_LARGER,
        why="the first layer then prefetches the whole model at once",
    ),
    Rule(
        *("unwise", "hpz-across-nodes", f"{ZERO}.zero_hpz_partition_size"),
        lambda case, value: _hpz_ranks(case) > _node_ranks(case),
        _node_ranks,
        why="backward then gathers across nodes, which the second copy is meant to avoid",
    ),
    Rule(
        *("unwise", "hpz-on-one-node", f"{ZERO}.zero_hpz_partition_size"),
        lambda case, value: 1 < _hpz_ranks(case) <= _node_ranks(case) == case.num_ranks,
        REMOVE,
        sentence="{key} is {value} on one node",
        why="the second copy of the parameters only saves traffic between nodes, and one node has none",
        then=", or accel_configs/ds_zero3.yaml",
    ),
    *(
        Rule(
            *("unwise", f"json-{section}", section, lambda case, value: value is not None, None),
            sentence="the JSON has a section {key}",
            why="slm_toolkit.train removes it because its flags decide; in other scripts accelerate refuses "
            "an optimizer, and DeepSpeed sets the learning rate by a scheduler",
            change=f"remove {section}: use --learning_rate, --weight_decay and --warmup_steps",
        )
        for section in ("optimizer", "scheduler")
    ),
    *(
        Rule(
            *("unwise", "renamed-key", f"{ZERO}.{old}", lambda case, value: value is not None, None),
            sentence=f"{{key}} is now called {new.partition(':')[0]}",
            why="DeepSpeed warns about the old name, and refuses both names together",
            change=f"write {new}",
        )
        for old, new in _RENAMED.items()
    ),
    *(
        Rule(
            *("wrong", "auto-refused", f"{ZERO}.{part}.device", lambda case, value: value == "auto", "cpu"),
            sentence=f'{part}.device is "auto"',
            why="accelerate replaces it with none: nothing is offloaded",
        )
        for part in OFFLOADED
    ),
    *(
        Rule(
            *("could be faster", "unpinned-offload", f"{ZERO}.{part}.pin_memory"),
            lambda case, value, part=part: value is False and case.offload(part) != "none",
            True,
            sentence=f"{part}.pin_memory is false",
            why="memory that is not pinned is copied twice, and the GPU waits for each copy",
            then=", if `ulimit -l` and the RAM allow it",
        )
        for part in OFFLOADED
    ),
    *(
        Rule(
            *("wrong", "nvme-path-of-yaml", f"{ZERO}.{part}.device"),
            lambda case, value: value == "nvme" and case.zero_stage == 3 and not case.has_json,
            None,
            sentence=f"{part} to nvme without a DeepSpeed JSON",
            why="accelerate launch does not pass the YAML's *_nvme_path to the ranks: they write to a folder "
            "called none",
            change="name a JSON with nvme_path, such as ds_configs/zero3_nvme.json",
        )
        for part in OFFLOADED
    ),
    Rule(
        *("could be faster", "aio-absent", "aio"),
        lambda case, value: (
            case.has_json
            and case.zero_stage == 3
            and "nvme" in map(case.offload, OFFLOADED)
            and not isinstance(value, dict)
        ),
        None,
        sentence="nvme offload without an aio section",
        why="DeepSpeed's default is one thread with 8 reads in flight; a disk can serve more at once",
        change='copy the "aio" section of ds_configs/zero3_nvme.json',
    ),
)

_OF_THE_YAML = (
    Rule(
        *("unwise", "zero3-init-by-default", "deepspeed_config.zero3_init_flag"),
        lambda case, value: case.zero_stage == 3 and value is None,
        False,
        sentence="{key} is absent under ZeRO-3",
        why="accelerate's default is true, so the model is built in shards; scripts other than "
        "slm_toolkit.train then draw other random weights from the seed than under other strategies",
        then="; or true if the host's RAM is too small for a whole model per rank",
    ),
    Rule(
        *("wrong", "set-twice", "mixed_precision"),
        lambda case, value: case.has_json and value not in (None, False),  # false: see unquoted-no
        REMOVE,
        sentence="{key} is {value} in the YAML, which also names {case.files.json_path.name}",
        why=_TWICE,
        then="; DeepSpeed reads bf16.enabled from the JSON",
    ),
)


def deepspeed_faults(case: Case) -> Iterator[Finding]:
    if case.engine != "DEEPSPEED":
        return
    yield from _set_twice(case)
    if not case.has_json and case.section("deepspeed_config").get("deepspeed_config_file"):
        return  # the settings are in a JSON that can't be read
    if case.zero_stage is not None:
        yield from faults_by(_OF_THE_YAML, case, case.config, edit=in_yaml)
        for finding in faults_by(_RULES, case, case.deepspeed, edit=in_json, shown=_shown):
            yield in_its_file(finding, case)
    if case.has_json:
        yield from _autos(case)


def _shown(case: Case, key: str, value: object) -> str:
    """Return a size as DeepSpeed will see it: the value, accelerate's "auto", or the default."""
    meant = getattr(case.zero_settings, key, value)
    is_size = isinstance(meant, int | float) and not isinstance(meant, bool) and "hpz" not in key
    words = f"{meant:,.0f} elements" if is_size else as_written(meant)
    return f"absent, which means {words}" if value in (None, "auto") and meant is not None else words


def in_its_file(finding: Finding, case: Case) -> Finding:
    """Return a finding on the JSON; without a JSON, on the YAML's key, or with the change to name a JSON."""
    if case.has_json:
        return finding
    section, keys = "deepspeed_config", tuple(finding.key.split("."))
    name = next((name for name, of_json in KEYS_OF_THE_JSON.items() if of_json == keys), None)
    if name is None:
        change = f"name a DeepSpeed JSON with {finding.change}, such as ds_configs/zero{case.zero_stage}.json"
        key = f"{section}.deepspeed_config_file"
        return replace(finding, edits=(), file="yaml", key=key, change=change)
    values = [REMOVE if edit.value == "auto" else edit.value for edit in finding.edits]
    edits = tuple(in_yaml(f"{section}.{name}", value) for value in values)
    change = change_by(edits) + finding.change.removeprefix(change_by(finding.edits))
    return replace(finding, edits=edits, file="yaml", key=f"{section}.{name}", change=change)


def _set_twice(case: Case) -> Iterator[Finding]:
    """Report YAML keys that belong in the JSON; the edits move a key that the JSON lacks."""
    section = case.section("deepspeed_config")
    if not section.get("deepspeed_config_file") or not case.has_json:
        return
    for name, keys in KEYS_OF_THE_JSON.items():
        if name not in section:
            continue
        edits = [in_yaml(f"deepspeed_config.{name}", REMOVE)]
        if value_at(case.deepspeed, keys) is None and section[name] not in (None, "none"):
            edits.append(Edit("json", keys, section[name]))
        yield wrong(
            "set-twice",
            f"{name} is {as_written(section[name])} in the YAML; it names {case.files.json_path.name}",
            *edits,
            why=_TWICE,
            change=f"remove it from the YAML; DeepSpeed reads {'.'.join(keys)} from the JSON",
        )


def _autos(case: Case) -> Iterator[Finding]:
    for key, value in case.deepspeed.items():
        if value == "auto" and key not in _AUTO_IS_TAKEN:
            yield wrong(
                "auto-refused",
                f'{key} is "auto"',
                in_json(key, REMOVE),
                why='accelerate does not fill it in; DeepSpeed takes the text "auto" as true, or fails on it',
            )
