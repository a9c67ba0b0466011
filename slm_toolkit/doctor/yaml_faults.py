"""Find faults in the accelerate YAML: engine, processes, machines, keys, and the settings of FSDP."""

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from slm_toolkit.doctor.case import Case, is_count, is_of_cpus
from slm_toolkit.doctor.finding import (
    REMOVE,
    Edit,
    Finding,
    Rule,
    fault,
    faults_by,
    in_yaml,
    wrong,
)
from slm_toolkit.strategy.checked_run import precision_problem
from slm_toolkit.strategy.passed_on import refused_of_json, refused_of_yaml
from slm_toolkit.strategy.settings import fsdp_settings, is_true, value_at

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
_ON_SEVERAL_GPUS = ("MULTI_GPU", "FSDP", "DEEPSPEED")
_SECTION_OF = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "parallelism_config": "FSDP"}
_NUMERICS = ": --numerics decides"
_ADDRESS = "main_process_ip: the first machine's address, or --main_process_ip at each launch"


def _compiles(case: Case, backend: object) -> bool:
    return backend is not None and str(backend).upper() not in ("NO", "FALSE")


_RULES = (
    Rule(
        "wrong",
        "processes-without-engine",
        "num_processes",
        lambda case, value: case.engine == "NO" and is_count(value) and value > 1,
        1,
        sentence="{key} is {value} with distributed_type NO",
        why="accelerate starts one process only",
        then=", or distributed_type: MULTI_GPU",
    ),
    Rule(
        "wrong",
        "more-processes-than-gpus",
        "num_processes",
        lambda case, value: (
            case.gpus_given and case.engine in _ON_SEVERAL_GPUS and (case.num_processes or 0) > case.num_gpus
        ),
        lambda case: case.num_gpus,
        sentence="{key} is {value} for {case.num_gpus} GPU(s)",
        why="each rank needs its own GPU; NCCL refuses two ranks on one GPU",
        then=", or --num_processes at the launch",
    ),
    *(
        Rule(
            "wrong",
            "compiled-by-yaml",
            key,
            _compiles,
            REMOVE,
            why="accelerate compiles the whole prepared model for this strategy only and ignores "
            "--kernels: other strategies run without compilation",
            then=", and use --kernels compiled",
        )
        for key in ("dynamo_backend", "dynamo_config.dynamo_backend", "dynamo_config.backend")
    ),
    Rule(
        "wrong",
        "use-cpu",
        "use_cpu",
        lambda case, value: (
            is_true(value) and is_of_cpus(case.config) and (case.gpu_names or case.host.gpu_names)
        ),
        False,
        sentence="use_cpu is true for a machine with GPUs",
        why="the GPUs stay idle",
    ),
    Rule(
        "wrong",
        "gpu-ids",
        "gpu_ids",
        lambda case, value: value is not None and not isinstance(value, str),
        lambda case: (
            ",".join(map(str, ids)) if isinstance(ids := case.config["gpu_ids"], list) and ids[1:] else "all"
        ),
        why="accelerate expects a string with commas and fails on a number or a list (AttributeError)",
    ),
    Rule(
        "wrong",
        "deepspeed-launcher",
        "deepspeed_config.deepspeed_multinode_launcher",
        # no launch passes on any other launcher: see `key_faults`
        lambda case, value: case.engine == "DEEPSPEED" and case.num_machines > 1 and value is None,
        "standard",
        sentence="{key} is absent with {case.num_machines} machines",
        why="accelerate then calls DeepSpeed's launcher, which needs pdsh, ssh without a password and a "
        "hostfile; with standard you run `accelerate launch` on each machine",
    ),
    Rule(
        "wrong",
        "main-process-ip-local",
        "main_process_ip",
        lambda case, value: (
            case.num_machines > 1 and str(value).startswith(("localhost", "::1", "0.0.0.0", "127."))
        ),
        None,
        sentence="{key} is {value} for {case.num_machines} machines",
        why="this address means the machine itself, so each machine waits for the others and none connects",
        change=_ADDRESS,
    ),
    Rule(
        "wrong",
        "unquoted-no",
        "mixed_precision",
        lambda case, value: value is False,
        REMOVE,
        sentence="{key}: no without quotes means false",
        why="YAML 1.1 reads an unquoted no as false, and accelerate fails on it (AttributeError)",
        then=_NUMERICS,
    ),
    Rule(
        "wrong",
        "mixed-precision-unknown",
        "mixed_precision",
        lambda case, value: value and str(value).lower() not in ("no", "bf16", "fp16", "fp8"),
        REMOVE,
        why="accelerate accepts only no, bf16, fp16 and fp8",
        then=_NUMERICS,
    ),
    Rule(
        "wrong",
        "mixed-precision-differs",
        "mixed_precision",
        lambda case, value: value and not case.has_json and precision_problem(str(value).lower(), case.flags),
        REMOVE,
        sentence="{key} is {value}, --numerics is {case.flags.numerics}",
        why="the trainer refuses to start: --numerics computes in {case.flags.computes_in}",
        then=_NUMERICS,
    ),
    *(
        Rule(
            "wrong",
            "ignored-section",
            name,
            lambda case, value, engine=engine: (
                value and case.config.get("distributed_type") in _SUPPORTED and case.engine != engine
            ),
            REMOVE,
            sentence="{key} under distributed_type {case.engine}, which does not read it",
            why="accelerate ignores the whole section",
            then=f", or write distributed_type: {engine}",
        )
        for name, engine in _SECTION_OF.items()
    ),
)


def launch_faults(case: Case) -> Iterator[Finding]:
    if not case.files.yaml_text:  # a DeepSpeed JSON alone
        return
    yield from _engine(case)
    yield from faults_by(_RULES, case, case.config, edit=in_yaml)


def _engine(case: Case) -> Iterator[Finding]:
    key, engine = "distributed_type", case.config.get("distributed_type")
    if engine in _SUPPORTED or engine is False:  # YAML reads an unquoted NO as false, and accelerate takes it
        return
    upper = str(engine or "").upper().replace("-", "_").replace(" ", "_")
    likely = upper if upper in _SUPPORTED else meant_by(upper, _SUPPORTED)
    of_sections = [of for name, of in _SECTION_OF.items() if case.section(name)]
    several = "MULTI_GPU" if (case.num_processes or 1) > 1 else "NO"
    yield wrong(
        "distributed-type",
        f"{key} is missing" if engine is None else f"{key} is {engine}",
        in_yaml(key, likely or next(iter(of_sections), several)),
        why="accelerate accepts only its own names, in capitals; this project supports "
        f"{', '.join(_SUPPORTED)}",
    )


# Faulty keys: not passed on by a launch (with the key that was probably meant), or duplicated.

_SYNONYMS = {  # names of other tools that get_close_matches does not find
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


def meant_by(key: str, known: tuple[str, ...]) -> str | None:
    """Return the known key that is closest to a misspelt key; None if none is close."""
    if key in _SYNONYMS and _SYNONYMS[key] in known:
        return _SYNONYMS[key]
    close = get_close_matches(key.lower(), known, n=1, cutoff=0.8)
    return close[0] if close else None


def _duplicates(case: Case) -> Iterator[Finding]:
    for keys in case.files.duplicates:
        key, value = ".".join(keys), value_at(case.config, keys)
        yield wrong(
            "duplicate-key",
            f"{key} appears more than once: the last value, {value!r}, is used",
            why="YAML parsers silently keep the last value, so the first value that you read in the file is "
            "not the one that runs",
            change=f"keep one {keys[-1]}",
            file="yaml",
            key=key,
        )


def _refused(case: Case) -> Iterator[Finding]:
    """Report each setting that no launch passes on; the edits remove it, or write the key that was meant."""
    for file, content, refused in (
        ("yaml", case.config, refused_of_yaml),
        ("json", case.files.deepspeed if case.has_json else {}, refused_of_json),
    ):
        for setting in refused(content):
            *above, key = setting.keys
            section = content
            for name in above:
                section = section[name]
            prefix = f"{above[-1]}_" if above == ["parallelism_config"] else ""
            meant = meant_by(f"{prefix}{key}", setting.known) or meant_by(key, setting.known)
            edits = [Edit(file, setting.keys, setting.allowed[0] if len(setting.allowed) == 1 else REMOVE)]
            if meant is not None and meant not in section:
                edits.append(Edit(file, (*above, meant), setting.value))
            program = "accelerate" if file == "yaml" else "DeepSpeed"
            yield wrong(
                "unknown-key" if setting.known else "not-passed-on",
                f"{setting.sentence}: did you mean {meant}?" if meant else setting.sentence,
                *edits,
                why=f"{program} refuses it or silently ignores it"
                if meant
                else f"{setting.why}, so no launch passes it on to {program}",
                change=f"write {meant}" if len(edits) > 1 else setting.change,
            )


# fsdp_config: settings that FSDP2 ignores, reads differently or can't do

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

_FSDP_RULES = (
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
    yield from faults_by(_FSDP_RULES, case, case.fsdp, edit=lambda key, value: _edit(case, key, value))


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
        )
