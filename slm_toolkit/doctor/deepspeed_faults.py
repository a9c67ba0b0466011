"""Find faults in a DeepSpeed JSON and in `deepspeed_config`."""

from collections.abc import Iterator
from typing import Any

from slm_toolkit.doctor.case import Case, as_written, is_count, is_older, is_true
from slm_toolkit.doctor.finding import (
    REMOVE,
    Edit,
    Finding,
    change_by,
    fault,
    in_json,
    in_yaml,
    slow,
    unwise,
    wrong,
)
from slm_toolkit.strategy.deepspeed_json import KEYS_OF_THE_JSON
from slm_toolkit.strategy.deepspeed_optimizer import optimizer_problems
from slm_toolkit.strategy.settings import ZeroSettings

ZERO = "zero_optimization"
_OFFLOADED = ("offload_optimizer", "offload_param")
# keys whose "auto" accelerate 1.15 fills in: Accelerator._prepare_deepspeed and DeepSpeedPlugin; for offload
# devices it fills in none
_AUTO_IS_FILLED_IN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "bf16.enabled", "fp16.enabled", f"{ZERO}.stage", f"{ZERO}.reduce_bucket_size"),
    *(f"{ZERO}.stage3_prefetch_bucket_size", f"{ZERO}.stage3_param_persistence_threshold"),
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{ZERO}.zero_hpz_partition_size",  # by slm_toolkit.train: the ranks of a node
    *("optimizer.", "scheduler."),  # sections that slm_toolkit.train removes: see _optimizer
)
_AUTO_IS_THE_DEFAULT = (f"{ZERO}.", "bf16.", "fp16.")  # DeepSpeedConfigModel drops it: deepspeed 0.19.8
_OF_STAGE_3 = (
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
    *("stage3_model_persistence_threshold", "stage3_max_reuse_distance", "zero_hpz_partition_size"),
    *("stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "zero_quantized_weights"),
    *("zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
)


def deepspeed_faults(case: Case) -> Iterator[Finding]:
    if case.engine != "DEEPSPEED":
        return
    yield from _json_itself(case)
    yield from _set_twice(case)
    yield from _zero3_init(case)
    if not case.has_json and case.section("deepspeed_config").get("deepspeed_config_file"):
        return  # the settings are in a JSON that can't be read
    if not case.has_json or isinstance(case.files.deepspeed.get(ZERO), dict):
        for check in (_stage, _offload, _nvme_of_yaml, _saving):
            yield from check(case)
    if case.has_json:
        for check in (_autos, _other_stage, _optimizer):
            yield from check(case)


def _json_itself(case: Case) -> Iterator[Finding]:
    if case.files.json_problem is not None:
        yield wrong(
            "json-unreadable",
            case.files.json_problem,
            why="accelerate refuses to start if the DeepSpeed JSON can't be read",
            change="name a valid JSON; `slm configs --copy DIR` writes working ones",
            file="yaml",
            key="deepspeed_config.deepspeed_config_file",
        )
    elif case.has_json and not isinstance(case.files.deepspeed.get(ZERO), dict):
        yield wrong(
            "no-zero-section",
            f"the JSON has no {ZERO} section",
            in_json(ZERO, {"stage": 2}),
            why="accelerate refuses a DeepSpeed JSON without this section",
        )


def _set_twice(case: Case) -> Iterator[Finding]:
    """Report YAML keys that belong in the JSON; the edits move a key that the JSON lacks."""
    section = case.section("deepspeed_config")
    if not section.get("deepspeed_config_file") or case.files.json_path is None:
        return
    why = "accelerate refuses this setting in a YAML that also names a DeepSpeed JSON"
    json_name = case.files.json_path.name
    if case.config.get("mixed_precision") not in (None, False):  # false: see unquoted-no
        yield wrong(
            "set-twice",
            f"mixed_precision is {case.config['mixed_precision']} in the YAML, which also names {json_name}",
            in_yaml("mixed_precision", REMOVE),
            why=f"{why}; the JSON's bf16 section sets the precision",
        )
    for key, json_keys in KEYS_OF_THE_JSON.items():
        if key not in section:
            continue
        in_the_json = _value(case.files.deepspeed, json_keys)
        edits = [in_yaml(f"deepspeed_config.{key}", REMOVE)]
        if in_the_json is None and case.has_json and section[key] not in (None, "none"):
            edits.append(Edit("json", json_keys, section[key]))
        yield wrong(
            "set-twice",
            f"{key} is {as_written(section[key])} in the YAML and {as_written(in_the_json)} in {json_name}",
            *edits,
            why=why,
            change=f"remove it from the YAML; DeepSpeed reads {'.'.join(json_keys)} from the JSON",
        )


def _value(content: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content


def _zero3_init(case: Case) -> Iterator[Finding]:
    key, stage = "zero3_init_flag", case.zero_stage
    if stage is None:
        return
    flag = case.section("deepspeed_config").get(key)
    off = in_yaml(f"deepspeed_config.{key}", False)
    if flag is None and stage == 3:
        yield unwise(
            "zero3-init-by-default",
            f"{key} is absent under ZeRO-3",
            off,
            why="accelerate's default is true, so the model is built in shards; scripts other than "
            "slm_toolkit.train then draw other random weights from the seed than under other strategies",
            then="; or true if the host's RAM is too small for a whole model per rank",
        )
    elif is_true(flag) and stage != 3:
        yield unwise(
            "zero3-init-below-stage-3",
            f"{key} is true under ZeRO-{stage}",
            off,
            why="accelerate warns and uses false: every rank builds the whole model",
        )


def _stage(case: Case) -> Iterator[Finding]:
    if case.zero_stage is None:
        yield wrong(
            "zero-stage",
            f"ZeRO stage {case.zero.get('stage')!r}",
            case.deepspeed_edit(f"{ZERO}.stage", 2),
            why="DeepSpeed accepts 0 (shards nothing), 1 (optimizer), 2 (+ gradients) and 3 (+ parameters)",
        )
    elif case.zero_stage == 0:
        yield unwise(
            "zero-stage-0",
            "ZeRO stage 0 shards nothing",
            case.deepspeed_edit(f"{ZERO}.stage", 1),
            why="every rank keeps the whole training state as under DDP, which overlaps its reduction better",
            then=", or accel_configs/ddp.yaml",
        )


def _offload(case: Case) -> Iterator[Finding]:
    stage, optimizer = case.zero_stage, case.offload("offload_optimizer")
    if stage is None:
        return
    if stage < 3 and case.offload("offload_param") != "none":
        yield wrong(
            "offload-param-below-stage-3",
            f"offload_param under ZeRO-{stage}",
            case.deepspeed_edit(f"{ZERO}.offload_param", REMOVE),
            why="only ZeRO-3 can offload parameters; under lower stages they stay on the GPU",
            then=", or stage 3",
        )
    if stage == 0 and optimizer != "none":
        yield wrong(
            "offload-without-zero",
            "offload_optimizer under ZeRO stage 0",
            case.deepspeed_edit(f"{ZERO}.offload_optimizer", REMOVE),
            why="only ZeRO-1, 2 and 3 offload the optimizer; accelerate uses DeepSpeed's CPU Adam anyway, "
            "which refuses parameters on a GPU",
            then=", or stage 2",
        )
    if stage in (1, 2) and optimizer == "nvme":
        edits = [case.deepspeed_edit(f"{ZERO}.offload_optimizer.device", "cpu")]
        if case.has_json and "nvme_path" in case.zero["offload_optimizer"]:
            edits.append(in_json(f"{ZERO}.offload_optimizer.nvme_path", REMOVE))
        yield wrong(
            "nvme-below-stage-3",
            f"offload_optimizer to nvme under ZeRO-{stage}",
            *edits,
            why="ZeRO-1 and 2 offload to the host's RAM even if nvme is named: nothing is written to disk",
            then=", or stage 3",
        )


def _nvme_of_yaml(case: Case) -> Iterator[Finding]:
    if case.has_json or case.zero_stage != 3:
        return
    parts = [part for part in _OFFLOADED if case.offload(part) == "nvme"]
    if parts:
        yield wrong(
            "nvme-path-of-yaml",
            f"{' and '.join(parts)} to nvme without a DeepSpeed JSON",
            why="accelerate launch does not pass the YAML's *_nvme_path to the ranks: they write to a folder "
            "called none",
            change="name a JSON with nvme_path, such as ds_configs/zero3_nvme.json",
            file="yaml",
            key=f"deepspeed_config.{parts[0]}_device",
        )


def _autos(case: Case) -> Iterator[Finding]:
    for keys in _paths_to_auto(case.files.deepspeed, ()):
        name = ".".join(keys)
        if name in _AUTO_IS_FILLED_IN or name.startswith(_AUTO_IS_FILLED_IN[-2:]):
            continue
        of_offload = keys[1:2] and keys[1] in _OFFLOADED
        value, change = REMOVE, f"a value, or remove {keys[-1]}"
        if of_offload and keys[-1] in ("device", "nvme_path"):
            severity, slug = "wrong", "auto-refused"
            why = "accelerate replaces it with none: nothing is offloaded"
            if keys[-1] == "device":
                value, change = "cpu", None
        elif name.startswith(_AUTO_IS_THE_DEFAULT):
            severity, slug = "unwise", "auto-is-default"
            why = "accelerate does not fill it in, so DeepSpeed uses its default, as if the key were absent"
        else:
            severity, slug = "wrong", "auto-refused"
            why = 'accelerate does not fill it in; DeepSpeed takes the text "auto" as true, or fails on it'
        edit = Edit("json", keys, value)
        yield fault(severity, slug, f'{name} is "auto"', edit, why=why, change=change)


def _paths_to_auto(value: Any, above: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, below in value.items():
        if below == "auto":
            yield (*above, key)
        elif isinstance(below, dict):
            yield from _paths_to_auto(below, (*above, key))


def _other_stage(case: Case) -> Iterator[Finding]:
    if case.zero_stage in (3, None):
        return
    for key in (key for key in _OF_STAGE_3 if key in case.zero):
        yield unwise(
            "stage-3-key",
            f"{key} {as_written(case.zero[key])} under ZeRO-{case.zero_stage}",
            in_json(f"{ZERO}.{key}", REMOVE),
            why="only ZeRO-3 reads it",
        )


def _optimizer(case: Case) -> Iterator[Finding]:
    problems = optimizer_problems(case.files.deepspeed, case.flags)
    reasons = {
        "optimizer": "slm_toolkit.train removes the section because its flags decide; accelerate refuses "
        "the section in other scripts that create their own optimizer",
        "scheduler": "slm_toolkit.train removes the section because its flags decide; in other scripts "
        "DeepSpeed sets the learning rate by it after each step",
    }
    for section, why in reasons.items():
        if section in case.files.deepspeed:
            of_section = [problem for problem in problems if section in problem]
            yield fault(
                "wrong" if of_section else "unwise",
                f"json-{section}",
                f"the JSON has a section {section}",
                in_json(section, REMOVE),
                why="; ".join(of_section) or why,
                then=": use --learning_rate, --weight_decay and --warmup_steps",
            )


def _saving(case: Case) -> Iterator[Finding]:
    key = "stage3_gather_16bit_weights_on_model_save"
    if case.zero_stage == 3 and case.flags.save_final_model and not is_true(case.zero.get(key)):
        edit = case.deepspeed_edit(f"{ZERO}.{key}", True)
        yield wrong(
            "zero3-cannot-save",
            f"{edit.keys[-1]} is {as_written(case.zero.get(key))}",
            edit,
            why="absent and auto mean false, and accelerate then refuses to save the final model after the "
            "last step",
        )


# Faults of sizes in a DeepSpeed JSON compared with the model's: buckets, reuse distance, hpZ groups, offload.

BUCKET = 13_107_200
"elements: 25 MiB in bf16, like DDP's buckets; the value in ds_configs/"
_WORTH_SAYING_BYTES = 100 * 2**20
"a bucket that wastes less memory than this is not reported"
_AIO = {
    "block_size": 1_048_576,
    "queue_depth": 32,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
"the aio section of ds_configs/zero3_nvme.json"


def zero_size_faults(case: Case) -> Iterator[Finding]:
    """Check sizes under stages 1 to 3; a YAML without a JSON can only have DeepSpeed's defaults."""
    if case.files.json_problem is not None or not case.zero_stage:
        return
    for check in (_reduce_bucket, _overlap, _stage_3, *((_hpz, _offload_speed) if case.has_json else ())):
        yield from check(case)


def _size(
    case: Case, severity: str, name: str, sentence: str, key: str, value: Any, *, why: str, then: str = ""
) -> Finding:
    """Return a finding on `key` of zero_optimization; without a JSON the change is to name one."""
    edit = in_json(f"{ZERO}.{key}", value)
    if case.has_json:
        return fault(severity, name, sentence, edit, why=why, then=then)
    return fault(
        severity,
        name,
        sentence,
        why=why,
        change=f"name a DeepSpeed JSON with {change_by([edit])}{then}, such as "
        f"ds_configs/zero{case.zero_stage}.json",
        file="yaml",
        key="deepspeed_config.deepspeed_config_file",
    )


def _number(case: Case, key: str) -> int:
    """Return a size in elements as DeepSpeed will see it: the value, accelerate's "auto", or the default."""
    value = case.zero.get(key)
    if value == "auto" and key in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
        return case.spec.hidden_size**2  # accelerate 1.15; 0.9 of it for prefetching
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number else getattr(ZeroSettings(), key)


def _size_of(case: Case, key: str) -> str:
    """Return the first part of a sentence: the key with its value, or with DeepSpeed's default."""
    number = _number(case, key)
    is_default = case.zero.get(key) in (None, "auto")
    return f"{key} is {'absent, which means ' if is_default else ''}{number:,} elements"


def _reduce_bucket(case: Case) -> Iterator[Finding]:
    key, params = "reduce_bucket_size", case.spec.num_params
    bucket = _number(case, key)
    overlaps = case.zero.get("overlap_comm")
    copies = 2 if case.zero_stage < 3 and is_true(overlaps) else 1
    if bucket > params and 2 * copies * (bucket - params) >= _WORTH_SAYING_BYTES:
        yield _size(
            case,
            "unwise",
            "bucket-larger-than-model",
            f"{_size_of(case, key)}, {case.spec.name} has {params:,}",
            key,
            BUCKET,
            why=f"DeepSpeed allocates the whole bucket{', twice for overlap_comm' * (copies - 1)}: "
            f"{2 * copies * bucket / 2**30:.1f} GiB, and no gradient is reduced before backward ends",
        )
    gather = case.zero.get("allgather_bucket_size")
    if case.zero_stage < 3 and isinstance(gather, int) and gather % 2:
        yield _size(
            case,
            "wrong",
            "odd-bucket",
            f"allgather_bucket_size is {gather}, an odd number",
            "allgather_bucket_size",
            gather + 1,
            why="ZeRO-1 and 2 refuse to start: NCCL's buffers must start at multiples of 4 bytes",
        )


def _overlap(case: Case) -> Iterator[Finding]:
    overlaps = case.zero.get("overlap_comm", case.zero_stage == 3)  # deepspeed: true at stage 3 only
    if overlaps is False or (overlaps is None and case.zero_stage < 3):
        is_absent = "overlap_comm" not in case.zero
        yield _size(
            case,
            "could be faster",
            "no-overlap",
            f"overlap_comm is {'absent, which means false' if is_absent else 'false'} under "
            f"ZeRO-{case.zero_stage}",
            "overlap_comm",
            True,
            why="backward then waits while gradients are reduced; DDP and FSDP reduce them during backward",
            then=", which allocates a second bucket",
        )


def _stage_3(case: Case) -> Iterator[Finding]:
    """Report sizes that keep too many parameters gathered.

    Source: deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py.
    """
    if case.zero_stage != 3:
        return
    params, layer = case.spec.num_params, case.spec.params_per_layer
    key = "stage3_max_reuse_distance"
    # between the first layer's forward and its backward, every other layer runs twice
    if _number(case, key) >= 2 * (params - layer):
        yield _size(
            case,
            "wrong",
            "zero3-never-releases",
            f"{_size_of(case, key)}; at most {2 * (params - layer):,} elements are used between a layer's "
            "forward and its backward",
            key,
            0,
            why="parameters that are used again within this distance stay gathered: from the second step on, "
            f"every rank keeps all of {case.spec.name}, {2 * params / 2**30:.2f} GiB, as under ZeRO-2",
        )
    key, prefetch = "stage3_max_live_parameters", _number(case, "stage3_prefetch_bucket_size")
    wanted = max(2 * layer + case.spec.embedding_params, BUCKET)
    wasted = 2 * (min(params, _number(case, key)) - wanted)
    if prefetch and _number(case, key) >= params and wasted >= 2**30:
        yield _size(
            case,
            "unwise",
            "zero3-gathers-all",
            f"{_size_of(case, key)}, {case.spec.name} has {params:,}",
            key,
            _round_up(wanted),
            why="parameters are gathered ahead until this many are live: here all of them, "
            f"{2 * params / 2**30:.1f} GiB on every rank",
            then=", enough for two layers and the head",
        )
    key = "stage3_prefetch_bucket_size"
    if prefetch >= params and 2 * params >= _WORTH_SAYING_BYTES:
        yield _size(
            case,
            "unwise",
            "prefetch-larger-than-model",
            f"{_size_of(case, key)}, {case.spec.name} has {params:,}",
            key,
            BUCKET,
            why="the first layer then prefetches the whole model at once",
        )


def _round_up(elements: int) -> int:
    """Round up to the next ten million, for a readable number."""
    return -(-elements // 10_000_000) * 10_000_000


def _hpz(case: Case) -> Iterator[Finding]:
    key = "zero_hpz_partition_size"
    size, node_ranks = case.zero.get(key, 1), min(case.num_ranks, case.gpus_per_node)
    size = node_ranks if size == "auto" else size
    if case.zero_stage != 3 or not is_count(size) or size == 1:
        return
    if is_older(case.host, "deepspeed", "0.19.5"):
        yield wrong(
            "hpz-version",
            f"{key} {size} with deepspeed {case.host.versions['deepspeed']}",
            why="before 0.19.5 a rank stops with an IndexError if its shard of the second copy starts past "
            "the end of a small parameter (DeepSpeed's pull request 8210)",
            change='pip install -U "deepspeed>=0.19.5"',
            file="json",
            key=f"{ZERO}.{key}",
            topic="versions",
        )
    if case.num_ranks % size:
        yield wrong(
            "hpz-does-not-divide",
            f"{key} is {size} on {case.num_ranks} ranks",
            in_json(f"{ZERO}.{key}", node_ranks),
            why="DeepSpeed refuses groups that don't divide the ranks",
            then=", the ranks of a node",
        )
    elif size > node_ranks:
        yield unwise(
            "hpz-across-nodes",
            f"{key} is {size}, but a node has {node_ranks} ranks",
            in_json(f"{ZERO}.{key}", node_ranks),
            why="backward then gathers across nodes, which the second copy is meant to avoid",
        )
    elif case.num_ranks <= case.gpus_per_node:
        second = 2 * case.spec.num_params / size / 2**30
        yield unwise(
            "hpz-on-one-node",
            f"{key} is {as_written(case.zero[key])} on one node",
            in_json(f"{ZERO}.{key}", REMOVE),
            why=f"the second copy of the parameters, {second:.2f} GiB per rank, only saves traffic between "
            "nodes, and one node has none",
            then=", or accel_configs/ds_zero3.yaml",
        )


def _offload_speed(case: Case) -> Iterator[Finding]:
    parts = ("offload_optimizer", "offload_param")
    for part in parts:
        if case.offload(part) != "none" and case.zero[part].get("pin_memory", True) is False:
            yield slow(
                "unpinned-offload",
                f"{part}.pin_memory is false",
                in_json(f"{ZERO}.{part}.pin_memory", True),
                why="memory that is not pinned is copied twice, and the GPU waits for each copy",
                then=", if `ulimit -l` and the RAM allow it",
            )
    on_disk = case.zero_stage == 3 and "nvme" in [case.offload(part) for part in parts]
    if on_disk and not isinstance(case.files.deepspeed.get("aio"), dict):
        yield slow(
            "aio-absent",
            "nvme offload without an aio section",
            in_json("aio", _AIO),
            why="DeepSpeed's default is one thread with 8 reads in flight; a disk can serve more at once",
            change='copy the "aio" section of ds_configs/zero3_nvme.json',
        )
