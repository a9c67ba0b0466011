"""Find faults in the accelerate YAML: engine, processes, machines, parallel groups and unknown keys."""

import math
from collections.abc import Iterator
from difflib import get_close_matches

from slm_toolkit.doctor.case import Case, is_count, is_of_cpus, value_at
from slm_toolkit.doctor.finding import (
    KEEP_LAST,
    REMOVE,
    Edit,
    Finding,
    fault,
    in_yaml,
    wrong,
)
from slm_toolkit.doctor.rule import Rule, faults_by
from slm_toolkit.strategy.groups import not_run_yet
from slm_toolkit.strategy.passed_on import refused_of_json, refused_of_yaml
from slm_toolkit.strategy.settings import is_true
from slm_toolkit.strategy.sharding import PREFIX, parallel_sizes, product_problem
from slm_toolkit.strategy.strategy import is_shipped, precision_problem

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
_ON_SEVERAL_GPUS = ("MULTI_GPU", "FSDP", "DEEPSPEED")
_SECTION_OF = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "parallelism_config": "FSDP"}
_ADDRESS = "main_process_ip: the first machine's address, or --main_process_ip at each launch"


def _compiles(case: Case, backend: object) -> bool:
    return backend is not None and str(backend).upper() not in ("NO", "FALSE")


_RULES = (
    Rule(
        *("wrong", "processes-without-engine", "num_processes"),
        lambda case, value: case.engine == "NO" and is_count(value) and value > 1,
        1,
        sentence="{key} is {value} with distributed_type NO",
        why="accelerate starts one process only",
        then=", or distributed_type: MULTI_GPU",
    ),
    Rule(
        *("wrong", "more-processes-than-gpus", "num_processes"),
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
            *("wrong", "compiled-by-yaml", key, _compiles, REMOVE),
            why="accelerate compiles the whole prepared model for this strategy only and ignores "
            "--torch_compile: other strategies run without compilation",
            then=", and use --torch_compile",
        )
        for key in ("dynamo_backend", "dynamo_config.dynamo_backend", "dynamo_config.backend")
    ),
    Rule(
        *("wrong", "use-cpu", "use_cpu"),
        lambda case, value: (
            is_true(value) and is_of_cpus(case.config) and (case.gpu_names or case.host.gpu_names)
        ),
        False,
        sentence="use_cpu is true for a machine with GPUs",
        why="the GPUs stay idle",
    ),
    Rule(
        *("wrong", "gpu-ids", "gpu_ids"),
        lambda case, value: value is not None and not isinstance(value, str),
        lambda case: (
            ",".join(map(str, ids)) if isinstance(ids := case.config["gpu_ids"], list) and ids[1:] else "all"
        ),
        why="accelerate expects a string with commas and fails on a number or a list (AttributeError)",
    ),
    Rule(
        *("wrong", "machine-rank", "machine_rank"),
        lambda case, value: (
            value is not None and not (isinstance(value, int) and 0 <= value < case.num_machines)
        ),
        0,
        sentence="{key} is {value} of {case.num_machines} machines",
        why="machines are numbered from 0; with another number the rendezvous waits for a machine that never "
        "connects",
        then=" on the first machine, 1 on the next, or --machine_rank at each launch",
    ),
    Rule(
        *("wrong", "processes-per-machine", "num_processes"),
        lambda case, value: (
            case.num_machines <= case.num_gpus and (case.num_processes or 0) % case.num_machines
        ),
        lambda case: max(1, case.num_processes // case.num_machines) * case.num_machines,
        sentence="{key} is {value}, not a multiple of {case.num_machines} machines",
        why="accelerate starts equal parts on all machines, and leaves the rest out",
    ),
    Rule(
        *("wrong", "deepspeed-launcher", "deepspeed_config.deepspeed_multinode_launcher"),
        # no launch passes on any other launcher: see `key_faults`
        lambda case, value: case.engine == "DEEPSPEED" and case.num_machines > 1 and value is None,
        "standard",
        sentence="{key} is absent with {case.num_machines} machines",
        why="accelerate then calls DeepSpeed's launcher, which needs pdsh, ssh without a password and a "
        "hostfile; with standard you run `accelerate launch` on each machine",
    ),
    Rule(
        *("unwise", "main-process-ip-absent", "main_process_ip"),
        # `slm configs` writes neither key: the launch command gives both
        lambda case, value: case.num_machines > 1 and value is None and "machine_rank" in case.config,
        None,
        sentence="num_machines is {case.num_machines}, without main_process_ip",
        why="unless the command gives --main_process_ip, every machine connects to an address called None",
        change=_ADDRESS,
    ),
    Rule(
        *("wrong", "main-process-ip-local", "main_process_ip"),
        lambda case, value: (
            case.num_machines > 1 and str(value).startswith(("localhost", "::1", "0.0.0.0", "127."))
        ),
        None,
        sentence="{key} is {value} for {case.num_machines} machines",
        why="this address means the machine itself, so each machine waits for the others and none connects",
        change=_ADDRESS,
    ),
    *(
        Rule(
            *("wrong", "ignored-section", name),
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
    Rule(
        *("unwise", "debug-mode", "debug", lambda case, value: is_true(value), False),
        why="accelerate then compares shapes on all ranks before each gather and reduction",
    ),
)


def launch_faults(case: Case) -> Iterator[Finding]:
    if not case.files.yaml_text:  # a DeepSpeed JSON alone
        return
    for check in (_engine, _precision):
        yield from check(case)
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


def _precision(case: Case) -> Iterator[Finding]:
    """Report a dtype in the YAML that --numerics overrides or contradicts; the edit removes the key."""
    key, precision, numerics = "mixed_precision", case.config.get("mixed_precision"), case.flags.numerics
    severity, sentence = "wrong", f"{key} is {precision}, --numerics is {numerics}"
    if precision is None:
        return
    if precision is False:
        name, sentence = "unquoted-no", f"{key}: no without quotes means false"
        why = "YAML 1.1 reads an unquoted no as false, and accelerate fails on it (AttributeError)"
    elif str(precision).lower() not in ("no", "bf16", "fp16", "fp8"):
        name, why = "mixed-precision-unknown", "accelerate accepts only no, bf16, fp16 and fp8"
    elif case.has_json:  # accelerate refuses it together with a JSON: see set-twice
        return
    elif (problem := precision_problem(str(precision).lower(), case.flags)) is not None:
        name, why = "mixed-precision-differs", f"the trainer refuses to start: {problem}"
    elif precision != ("no" if numerics == "fp32" else case.flags.computes_in):
        severity, name = "unwise", "mixed-precision-overridden"
        why = "other scripts, and --numerics stock, compute in the file's precision"
    else:
        return
    yield fault(severity, name, sentence, in_yaml(key, REMOVE), why=why, then=": --numerics decides")


def group_faults(case: Case) -> Iterator[Finding]:
    """Report sizes from which FSDP2 can't form groups, and sizes whose product is not the number of ranks.

    The groups of a shipped file follow the nodes.
    """
    section = case.section("parallelism_config")
    sizes = parallel_sizes(section)
    if not (section and case.is_fsdp2 and all(map(is_count, sizes.values()))):
        return
    if not all(str(key).startswith(PREFIX) for key in section):
        return  # the sizes are only known once the keys are corrected
    if sizes["dp_shard_size"] == sizes["cp_size"] == 1:
        refused = "accelerate refuses FSDP2 without a group to shard over; use MULTI_GPU for copies alone"
        yield wrong(
            "nothing-to-shard",
            f"parallelism_config has dp_replicate_size {sizes['dp_replicate_size']} and dp_shard_size 1",
            in_yaml("parallelism_config", REMOVE),
            why="; ".join([refused, *not_run_yet(sizes)]),
            then=", or set dp_shard_size to the number of ranks per copy",
        )
        return
    ranks = case.num_ranks if case.gpus_given else case.num_processes or case.num_ranks
    if is_shipped(case.files.yaml_path) or (problem := product_problem(sizes, ranks)) is None:
        return
    product = math.prod(sizes.values())
    shard, left = divmod(ranks * sizes["dp_shard_size"], product)
    fits = left == 0 and (shard > 1 or sizes["cp_size"] > 1)
    yield wrong(
        "groups-do-not-divide",
        problem,
        *([in_yaml(f"parallelism_config.{PREFIX}dp_shard_size", shard)] if fits else []),
        why="accelerate multiplies all five sizes and refuses a product that is not the number of ranks",
        change=None if fits else f"use {product} ranks, or sizes whose product is {ranks}",
        file="yaml",
        key="parallelism_config",
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
    for file, keys in case.files.duplicates:
        value = value_at(case.config if file == "yaml" else case.files.deepspeed, keys)
        yield wrong(
            "duplicate-key",
            f"{'.'.join(keys)} appears more than once: the last value, {value!r}, is used",
            Edit(file, keys, KEEP_LAST),
            why="YAML and JSON parsers silently keep the last value, so the first value that you read in the "
            "file is not the one that runs",
            change=f"keep one {keys[-1]}",
            topic="launch" if file == "yaml" else "deepspeed",
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
            topic = "deepspeed" if file == "json" or above == ["deepspeed_config"] else "launch"
            yield wrong(
                "unknown-key" if setting.known else "not-passed-on",
                f"{setting.sentence}: did you mean {meant}?" if meant else setting.sentence,
                *edits,
                why=f"{program} refuses it or silently ignores it"
                if meant
                else f"{setting.why}, so no launch passes it on to {program}",
                change=f"write {meant}" if len(edits) > 1 else setting.change,
                topic=topic if meant else "security",
            )
