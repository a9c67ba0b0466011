"""Find faults in a DeepSpeed JSON and in `deepspeed_config`, and flags that don't fit strategy or GPU."""

from collections.abc import Iterator
from dataclasses import replace

from slm_toolkit.doctor.case import Case, as_written, is_true
from slm_toolkit.doctor.finding import (
    REMOVE,
    Finding,
    Rule,
    change_by,
    faults_by,
    in_json,
    in_yaml,
    wrong,
)
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.strategy.checked_run import json_contradictions
from slm_toolkit.strategy.deepspeed_json import KEYS_OF_THE_JSON
from slm_toolkit.strategy.strategy import Strategy

ZERO = "zero_optimization"
OFFLOADED = ("offload_optimizer", "offload_param")
BUCKET = 13_107_200
"elements: 25 MiB in bf16, like DDP's buckets; the value in ds_configs/"
_LIVE = 200_000_000
"elements: more than two layers and the head of a small model; the value in ds_configs/"
_WORTH_SAYING_BYTES = 100 * 2**20
"a bucket that wastes less memory than this is not reported"
_LARGER = "{key} is {value}, {spec.name} has {spec.num_params:,}"


def _reuse_distance(case: Case) -> int:
    """Between the first layer's forward and its backward, every other layer runs twice."""
    return 2 * (case.spec.num_params - case.spec.params_per_layer)


def _gathers_all(case: Case, value: object) -> bool:
    zero, params = case.zero_settings, case.spec.num_params
    is_all = zero.stage == 3 and zero.stage3_max_live_parameters >= params
    return is_all and zero.stage3_prefetch_bucket_size > 0 and 2 * (params - _LIVE) >= 2**30


# sizes: deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py
_RULES = (
    Rule(
        "unwise",
        "zero-stage-0",
        f"{ZERO}.stage",
        lambda case, value: case.zero_stage == 0,
        1,
        sentence="ZeRO stage 0 shards nothing",
        why="every rank keeps the whole training state as under DDP, which overlaps its reduction better",
        then=", or accel_configs/ddp.yaml",
    ),
    Rule(
        "wrong",
        "offload-param-below-stage-3",
        f"{ZERO}.offload_param.device",
        lambda case, value: case.zero_stage < 3 and case.zero_settings.offload_param.device != "none",
        "none",
        sentence="offload_param under ZeRO-{case.zero_stage}",
        why="only ZeRO-3 can offload parameters; under lower stages they stay on the GPU",
        then=", or stage 3",
    ),
    Rule(
        "wrong",
        "zero3-cannot-save",
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        lambda case, value: case.zero_stage == 3 and case.flags.saves_model and not is_true(value),
        True,
        why="absent and auto mean false, and accelerate then refuses to save the final model after the "
        "last step",
    ),
    Rule(
        "unwise",
        "bucket-larger-than-model",
        f"{ZERO}.reduce_bucket_size",
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
        "could be faster",
        "no-overlap",
        f"{ZERO}.overlap_comm",
        lambda case, value: case.zero_stage and value in (None, False) and not case.zero_settings.overlaps,
        True,
        sentence="{key} is {value} under ZeRO-{case.zero_stage}, so nothing overlaps",
        why="backward then waits while gradients are reduced; DDP and FSDP reduce them during backward",
        then=", which allocates a second bucket",
    ),
    Rule(
        "wrong",
        "zero3-never-releases",
        f"{ZERO}.stage3_max_reuse_distance",
        lambda case, value: (
            case.zero_stage == 3 and case.zero_settings.stage3_max_reuse_distance >= _reuse_distance(case)
        ),
        0,
        sentence="{key} is {value}, more than {spec.name} uses between a layer's forward and its backward",
        why="parameters that are used again within this distance stay gathered: from the second step on, "
        "every rank keeps all of {spec.name}, {gib:.2f} GiB, as under ZeRO-2",
    ),
    Rule(
        "unwise",
        "zero3-gathers-all",
        f"{ZERO}.stage3_max_live_parameters",
        _gathers_all,
        _LIVE,
        sentence=_LARGER,
        why="parameters are gathered ahead until this many are live: here all of them, {gib:.1f} GiB on "
        "every rank",
        then=", as in ds_configs/",
    ),
    *(
        Rule(
            "unwise",
            f"json-{section}",
            section,
            lambda case, value: value is not None,
            None,
            sentence="the JSON has a section {key}",
            why="slm_toolkit.train removes it because its flags decide; in other scripts accelerate refuses "
            "an optimizer, and DeepSpeed sets the learning rate by a scheduler",
            change=f"remove {section}: use --learning_rate, --weight_decay and --warmup_steps",
        )
        for section in ("optimizer", "scheduler")
    ),
    *(
        Rule(
            "wrong",
            "nvme-path",
            f"{ZERO}.{part}.nvme_path",
            lambda case, value, part=part: (
                case.zero_stage == 3
                and case.offload(part) == "nvme"
                and (value in (None, "auto") or not case.has_json)
            ),
            None,
            sentence=f"{part} to nvme without an nvme_path in a DeepSpeed JSON",
            why="DeepSpeed does not know where to write: accelerate launch passes on no *_nvme_path of"
            " a YAML",
            change=f"{part}.nvme_path in the JSON: a folder on a local NVMe disk",
        )
        for part in OFFLOADED
    ),
)

_OF_THE_YAML = (
    Rule(
        "unwise",
        "zero3-init-by-default",
        "deepspeed_config.zero3_init_flag",
        lambda case, value: case.zero_stage == 3 and value is None,
        False,
        sentence="{key} is absent under ZeRO-3",
        why="accelerate's default is true, so the model is built in shards; scripts other than "
        "slm_toolkit.train then draw other random weights from the seed than under other strategies",
        then="; or true if the host's RAM is too small for a whole model per rank",
    ),
    Rule(
        "wrong",
        "set-twice",
        "mixed_precision",
        lambda case, value: case.has_json and value not in (None, False),  # false: see unquoted-no
        REMOVE,
        sentence="{key} is {value} in the YAML, which also names {case.files.json_path.name}",
        why="accelerate refuses this setting in a YAML that also names a DeepSpeed JSON",
        then="; DeepSpeed reads bf16.enabled from the JSON",
    ),
)


def deepspeed_faults(case: Case) -> Iterator[Finding]:
    if case.engine != "DEEPSPEED":
        return
    if not case.has_json and case.section("deepspeed_config").get("deepspeed_config_file"):
        return  # the settings are in a JSON that can't be read
    if case.zero_stage is not None:
        yield from faults_by(_OF_THE_YAML, case, case.config, edit=in_yaml)
        for finding in faults_by(_RULES, case, case.deepspeed, edit=in_json, shown=_shown):
            yield in_its_file(finding, case)


def _shown(case: Case, key: str, value: object) -> str:
    """Return a size as DeepSpeed will see it: the value, accelerate's "auto", or the default."""
    meant = getattr(case.zero_settings, key, value)
    is_size = isinstance(meant, int | float) and not isinstance(meant, bool)
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
    return replace(
        finding, edits=edits, file="yaml", key=f"{section}.{name}", change=change_by(edits) or finding.change
    )


# Flags

_IN_16_BITS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


def _reduces_in(case: Case) -> tuple[str, ...]:
    return ("fp32", "float32") if case.flags.numerics == "fp32" else (case.flags.computes_in,)


_OF_FLAGS = (
    Rule(
        "wrong",
        "flash-attn-in-fp32",
        "attn_implementation",
        lambda case, value: value in _IN_16_BITS and case.flags.numerics == "fp32",
        None,
        sentence="--{key} {value} with --numerics fp32",
        why="flash kernels compute in bf16 and fp16 only",
        change="--attn_implementation sdpa, or --numerics aligned",
    ),
    Rule(
        "wrong",
        "fp8-emulated",
        "fp8",
        lambda case, value: (
            value != "none" and not all(gpu_of_name(name).has_float8 for name in case.gpu_names)
        ),
        None,
        sentence="--fp8 {value} on a GPU without float8",
        why="float8 products need compute capability 8.9 (Ada, Hopper): this GPU emulates them, which rounds "
        "like float8 but is not faster",
        change="leave --fp8 out",
    ),
)
_OF_DEEPSPEED = (
    *(
        Rule(
            "unwise",
            "communication-dtype-differs",
            key,
            lambda case, value: (
                value is not None and case.flags.numerics != "stock" and value not in _reduces_in(case)
            ),
            REMOVE,
            why="other strategies reduce gradients in the dtype that the flags say: losses and traffic then "
            "differ for another reason than sharding",
        )
        for key in ("communication_data_type", "data_types.grad_accum_dtype")
    ),
)


def flag_faults(case: Case) -> Iterator[Finding]:
    yield from faults_by(_OF_FLAGS, case, vars(case.flags), edit=None)
    strategy = Strategy(
        name=case.name,
        engine="deepspeed",
        num_processes=case.num_ranks,
        accelerate_config=case.config,
        deepspeed_config=case.deepspeed,
    )
    differing = json_contradictions(strategy, case.flags, case.num_ranks, strategy.mixed_precision)
    of_json = [
        wrong(
            "json-contradicts-flag",
            sentence,
            in_json(key, "auto"),
            why="the trainer refuses to start",
            then=", so that the flags decide",
        )
        for key, sentence in differing.items()
    ]
    for finding in (*of_json, *faults_by(_OF_DEEPSPEED, case, case.deepspeed, edit=in_json)):
        yield in_its_file(finding, case)
