"""Faults of a DeepSpeed JSON and of `deepspeed_config`: keys set twice, refused, or of another stage."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from slm_toolkit.doctor.case import Case, fault, is_true, shown
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding
from slm_toolkit.strategy.deepspeed_json import KEYS_OF_THE_JSON
from slm_toolkit.strategy.deepspeed_optimizer import optimizer_problems

ZERO = "zero_optimization"
# "auto" that accelerate 1.15 fills in: Accelerator._prepare_deepspeed and DeepSpeedPlugin; of offload it
# means none
_AUTO_IS_FILLED_IN = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("gradient_clipping", "bf16.enabled", "fp16.enabled", f"{ZERO}.stage", f"{ZERO}.reduce_bucket_size"),
    *(f"{ZERO}.stage3_prefetch_bucket_size", f"{ZERO}.stage3_param_persistence_threshold"),
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{ZERO}.zero_hpz_partition_size",  # by slm_toolkit.train: the ranks of a node
    *("optimizer.", "scheduler."),  # sections that are taken out: see _optimizer
)
_AUTO_IS_THE_DEFAULT = (f"{ZERO}.", "bf16.", "fp16.")  # DeepSpeedConfigModel drops it: deepspeed 0.19.8
_OF_STAGE_3 = (
    *("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_max_live_parameters"),
    *("stage3_model_persistence_threshold", "stage3_max_reuse_distance", "zero_hpz_partition_size"),
    *("stage3_gather_16bit_weights_on_model_save", "stage3_module_granularity_threshold"),
    *("stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential", "zero_quantized_weights"),
    *("zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
)
_deepspeed = partial(fault, topic="deepspeed")


def deepspeed_faults(case: Case) -> Iterator[Finding]:
    if case.engine != "DEEPSPEED":
        return
    yield from _json_itself(case)
    yield from _set_twice(case)
    yield from _zero3_init(case)
    if not case.has_json and case.section("deepspeed_config").get("deepspeed_config_file"):
        return  # a JSON that can't be read decides
    if not case.has_json or isinstance(case.files.deepspeed.get(ZERO), dict):
        for check in (_stage, _offload, _nvme_of_yaml, _saving):
            yield from check(case)
    if case.has_json:
        for check in (_autos, _other_stage, _optimizer):
            yield from check(case)


def _json_itself(case: Case) -> Iterator[Finding]:
    if case.files.json_problem is not None:
        yield _deepspeed(
            *(case, "wrong", "json-unreadable", case.files.json_problem),
            why="accelerate refuses to start without the settings that it names",
            change="name a JSON that is there; `slm configs --copy DIR` writes good ones",
            file="yaml",
            key="deepspeed_config.deepspeed_config_file",
        )
    elif case.has_json and not isinstance(case.files.deepspeed.get(ZERO), dict):
        yield _deepspeed(
            *(case, "wrong", "no-zero-section", f"the JSON has no {ZERO} section"),
            why="accelerate refuses a DeepSpeed JSON without one",
            change=f'"{ZERO}": {{"stage": 2}}',
            file="json",
            key=ZERO,
            edits=(Edit("json", (ZERO,), {"stage": 2}),),
        )


def _set_twice(case: Case) -> Iterator[Finding]:
    """Keys of the YAML that belong into the JSON: moved there where it says nothing."""
    section = case.section("deepspeed_config")
    if not section.get("deepspeed_config_file") or case.files.json_path is None:
        return
    why = "accelerate refuses to start with a setting in the YAML beside a DeepSpeed JSON"
    json_name = case.files.json_path.name
    if case.config.get("mixed_precision") not in (None, False):  # false: see unquoted-no
        yield _deepspeed(
            *(case, "wrong", "set-twice"),
            f"mixed_precision {case.config['mixed_precision']} beside {json_name}",
            why=f"{why}; its bf16 section says it",
            change="remove mixed_precision",
            file="yaml",
            key="mixed_precision",
            edits=(Edit("yaml", ("mixed_precision",), REMOVE),),
        )
    for key, json_keys in KEYS_OF_THE_JSON.items():
        if key not in section:
            continue
        said = _value(case.files.deepspeed, json_keys)
        edits = [Edit("yaml", ("deepspeed_config", key), REMOVE)]
        if said is None and case.has_json and section[key] not in (None, "none"):
            edits.append(Edit("json", json_keys, section[key]))
        yield _deepspeed(
            *(case, "wrong", "set-twice"),
            f"{key} {shown(section[key])} beside {json_name}, which says {shown(said)}",
            why=why,
            change=f"remove it from the YAML; {'.'.join(json_keys)} of the JSON counts",
            file="yaml",
            key=f"deepspeed_config.{key}",
            edits=tuple(edits),
        )


def _zero3_init(case: Case) -> Iterator[Finding]:
    section, stage = case.section("deepspeed_config"), case.zero_stage
    if stage is None:
        return
    said = section.get("zero3_init_flag")
    if said is None and stage == 3:
        yield _deepspeed(
            *(case, "unwise", "zero3-init-by-default", "zero3_init_flag is absent under ZeRO-3"),
            why="accelerate takes that for true: the model is built in pieces, and a script other than "
            "slm_toolkit.train draws other random weights from the seed than under any other strategy",
            change="zero3_init_flag: false; true where the host's RAM can't hold the model on every rank",
            file="yaml",
            key="deepspeed_config.zero3_init_flag",
            edits=(Edit("yaml", ("deepspeed_config", "zero3_init_flag"), False),),
        )
    elif is_true(said) and stage != 3:
        yield _deepspeed(
            *(case, "unwise", "zero3-init-below-stage-3", f"zero3_init_flag is true under ZeRO-{stage}"),
            why="accelerate warns and takes it for false: every rank builds the whole model",
            change="zero3_init_flag: false",
            file="yaml",
            key="deepspeed_config.zero3_init_flag",
            edits=(Edit("yaml", ("deepspeed_config", "zero3_init_flag"), False),),
        )


def _stage(case: Case) -> Iterator[Finding]:
    file = "json" if case.has_json else "yaml"
    keys = (ZERO, "stage") if case.has_json else ("deepspeed_config", "zero_stage")
    if case.zero_stage is None:
        yield _deepspeed(
            *(case, "wrong", "zero-stage", f"ZeRO stage {case.zero.get('stage')!r}"),
            why="DeepSpeed refuses all but 0 to 3, which shard nothing, optimizer, gradients, parameters",
            change=f"{keys[-1]}: 2",
            file=file,
            key=".".join(keys),
            edits=(Edit(file, keys, 2),),
        )
    elif case.zero_stage == 0:
        yield _deepspeed(
            *(case, "unwise", "zero-stage-0", "ZeRO stage 0 shards nothing"),
            why="every rank holds the whole training state, as under DDP, whose reduction overlaps better",
            change=f"{keys[-1]}: 1, or accel_configs/ddp.yaml",
            file=file,
            key=".".join(keys),
            edits=(Edit(file, keys, 1),),
        )


def _offload(case: Case) -> Iterator[Finding]:
    stage = case.zero_stage
    if stage is None:
        return
    file = "json" if case.has_json else "yaml"
    parts = ("offload_optimizer", "offload_param")
    where = {
        part: (ZERO, part) if case.has_json else ("deepspeed_config", f"{part}_device") for part in parts
    }
    if stage < 3 and case.offload("offload_param") != "none":
        keys = where["offload_param"]
        yield _deepspeed(
            *(case, "wrong", "offload-param-below-stage-3", f"offload_param under ZeRO-{stage}"),
            why="only ZeRO-3 shards parameters and can move them: below it they stay on the GPU",
            change=f"remove {keys[-1]}, or stage 3",
            file=file,
            key=".".join(keys),
            edits=(Edit(file, keys, REMOVE),),
        )
    optimizer, keys = case.offload("offload_optimizer"), where["offload_optimizer"]
    if stage == 0 and optimizer != "none":
        yield _deepspeed(
            *(case, "wrong", "offload-without-zero", "offload_optimizer under ZeRO stage 0"),
            why="only ZeRO-1, 2 and 3 move the optimizer; accelerate takes DeepSpeed's CPU Adam anyway, "
            "which refuses parameters on a GPU",
            change=f"remove {keys[-1]}, or stage 2",
            file=file,
            key=".".join(keys),
            edits=(Edit(file, keys, REMOVE),),
        )
    if stage in (1, 2) and optimizer == "nvme":
        edits = [Edit(file, (*keys, "device") if case.has_json else keys, "cpu")]
        if case.has_json and "nvme_path" in case.zero["offload_optimizer"]:
            edits.append(Edit(file, (*keys, "nvme_path"), REMOVE))
        yield _deepspeed(
            *(case, "wrong", "nvme-below-stage-3", f"offload_optimizer to nvme under ZeRO-{stage}"),
            why="ZeRO-1 and 2 take any device but none for the host's RAM: nothing reaches the disk",
            change="device: cpu, or stage 3",
            file=file,
            key=".".join(keys),
            edits=tuple(edits),
        )


def _nvme_of_yaml(case: Case) -> Iterator[Finding]:
    if case.has_json or case.zero_stage != 3:
        return
    parts = [part for part in ("offload_optimizer", "offload_param") if case.offload(part) == "nvme"]
    if parts:
        yield _deepspeed(
            *(case, "wrong", "nvme-path-of-yaml", f"{' and '.join(parts)} to nvme without a DeepSpeed JSON"),
            why="accelerate launch does not hand the YAML's *_nvme_path to the ranks: they write to a folder "
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
        of_offload = keys[1:2] and keys[1] in ("offload_optimizer", "offload_param")
        change, value = f"a value, or remove {keys[-1]}", REMOVE
        if of_offload and keys[-1] in ("device", "nvme_path"):
            severity, slug, why = "wrong", "auto-refused", "accelerate fills in none: nothing is offloaded"
            if keys[-1] == "device":
                change, value = "device: cpu", "cpu"
        elif name.startswith(_AUTO_IS_THE_DEFAULT):
            severity, slug = "unwise", "auto-is-default"
            why = "nobody fills it in here, and DeepSpeed takes its own default, as if the key were absent"
        else:
            severity, slug = "wrong", "auto-refused"
            why = "nobody fills it in, and DeepSpeed takes the word for a value: it fails, or reads true"
        yield _deepspeed(
            *(case, severity, slug, f'{name} is "auto"'),
            why=why,
            change=change,
            file="json",
            key=name,
            edits=(Edit("json", keys, value),),
        )


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
        yield _deepspeed(
            *(case, "unwise", "stage-3-key", f"{key} {shown(case.zero[key])} under ZeRO-{case.zero_stage}"),
            why="only ZeRO-3 reads it",
            change=f"remove {key}",
            file="json",
            key=f"{ZERO}.{key}",
            edits=(Edit("json", (ZERO, key), REMOVE),),
        )


def _optimizer(case: Case) -> Iterator[Finding]:
    problems = optimizer_problems(case.files.deepspeed, case.flags)
    reasons = {
        "optimizer": "slm_toolkit.train takes the section out, since its flags decide; accelerate refuses "
        "the section under other scripts that make their own optimizer",
        "scheduler": "slm_toolkit.train takes the section out, since its flags decide; under other scripts "
        "DeepSpeed sets the learning rate by it after each step",
    }
    for section, why in reasons.items():
        if section in case.files.deepspeed:
            of_section = [problem for problem in problems if section in problem]
            yield _deepspeed(
                *(case, "wrong" if of_section else "unwise", f"json-{section}"),
                f"the JSON has a section {section}",
                why="; ".join(of_section) or why,
                change=f"remove {section}: --learning_rate, --weight_decay and --warmup_steps say it",
                file="json",
                key=section,
                edits=(Edit("json", (section,), REMOVE),),
            )


def _saving(case: Case) -> Iterator[Finding]:
    key = "stage3_gather_16bit_weights_on_model_save"
    keys = (ZERO, key) if case.has_json else ("deepspeed_config", "zero3_save_16bit_model")
    file = "json" if case.has_json else "yaml"
    if case.zero_stage == 3 and case.flags.save_final_model and not is_true(case.zero.get(key)):
        yield _deepspeed(
            *(case, "wrong", "zero3-cannot-save", f"{keys[-1]} is {shown(case.zero.get(key))}"),
            why="absent and auto mean false, and accelerate then refuses to write the final model, after the "
            "last step",
            change=f"{keys[-1]}: true",
            file=file,
            key=".".join(keys),
            edits=(Edit(file, keys, True),),
        )


def _value(content: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content
