"""Find faults in the accelerate YAML: engine, processes, machines, parallel groups and unknown keys."""

import math
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from slm_toolkit.doctor.case import Case, is_count, is_true
from slm_toolkit.doctor.finding import (
    KEEP_LAST,
    REMOVE,
    Edit,
    Finding,
    fault,
    in_json,
    in_yaml,
    unwise,
    wrong,
)
from slm_toolkit.strategy.groups import not_run_yet
from slm_toolkit.strategy.passed_on import OF_DEEPSPEED, refused_of_json, refused_of_yaml
from slm_toolkit.strategy.sharding import PREFIX, parallel_sizes, product_problem
from slm_toolkit.strategy.strategy import is_shipped, precision_problem

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
_ON_SEVERAL_GPUS = ("MULTI_GPU", "FSDP", "DEEPSPEED")
_ENGINE_SYNONYMS = {
    **dict.fromkeys(("DDP", "DATA_PARALLEL", "DISTRIBUTED", "MULTIGPU", "GPU"), "MULTI_GPU"),
    **dict.fromkeys(("FSDP2", "FSDP1", "FULL_SHARD"), "FSDP"),
    **dict.fromkeys(("ZERO", "ZERO1", "ZERO2", "ZERO3", "DEEP_SPEED"), "DEEPSPEED"),
    **dict.fromkeys(("NONE", "SINGLE", "FALSE"), "NO"),
}
_PRECISIONS = ("no", "bf16", "fp16", "fp8")
_SECTION_OF = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "parallelism_config": "FSDP"}
_WITHOUT_A_SECTION = {  # replaces a section that is not a mapping
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "deepspeed_config": {"zero_stage": 2},
}


def launch_faults(case: Case) -> Iterator[Finding]:
    if not case.files.yaml_text:  # a DeepSpeed JSON alone
        return
    for check in (_engine, _sections, _processes, _gpu_ids, _precision, _compiler, _odds_and_ends):
        yield from check(case)


def _engine(case: Case) -> Iterator[Finding]:
    key, engine = "distributed_type", case.config.get("distributed_type")
    if engine in _SUPPORTED:
        return
    if engine is False:
        yield unwise(
            "unquoted-no",
            f"{key}: NO without quotes means false",
            in_yaml(key, "NO"),
            why="YAML 1.1 reads an unquoted NO as false; accelerate happens to treat false like NO",
        )
        return
    upper = str(engine or "").upper().replace("-", "_").replace(" ", "_")
    likely = upper if upper in _SUPPORTED else _ENGINE_SYNONYMS.get(upper)
    likely = likely or meant_by(upper, _SUPPORTED) or _engine_of_sections(case)
    yield wrong(
        "distributed-type",
        f"{key} is missing" if engine is None else f"{key} is {engine}",
        in_yaml(key, likely),
        why="accelerate accepts only its own names, in capitals; this project supports "
        f"{', '.join(_SUPPORTED)}",
    )


def _engine_of_sections(case: Case) -> str:
    if case.section("deepspeed_config"):
        return "DEEPSPEED"
    if case.section("fsdp_config"):
        return "FSDP"
    return "MULTI_GPU" if (case.config.get("num_processes") or 1) != 1 else "NO"


def _sections(case: Case) -> Iterator[Finding]:
    """Report sections that are not mappings, and sections of another engine."""
    for name, engine in _SECTION_OF.items():
        value = case.config.get(name)
        if value is not None and not isinstance(value, dict):
            yield wrong(
                "not-a-section",
                f"{name} is {value!r}",
                in_yaml(name, _WITHOUT_A_SECTION.get(name, REMOVE) if case.engine == engine else REMOVE),
                why="a section contains one setting per indented line; accelerate ignores any other value",
            )
        elif value and case.config.get("distributed_type") in _SUPPORTED and case.engine != engine:
            yield wrong(
                "ignored-section",
                f"{name} under distributed_type {case.engine}, which does not read it",
                in_yaml(name, REMOVE),
                why=f"{case.engine} ignores {', '.join(map(str, value))}"
                + ("" if case.engine in ("FSDP", "DEEPSPEED") else " and shards nothing"),
                then=f", or write distributed_type: {engine}",
            )


def _processes(case: Case) -> Iterator[Finding]:
    key, count = "num_processes", case.config.get("num_processes")
    if case.num_processes is None:
        yield fault(
            "unwise" if count is None else "wrong",
            "num-processes",
            f"{key} is missing" if count is None else f"{key} is {count!r}",
            in_yaml(key, case.num_gpus),
            why="accelerate refuses the file unless the command gives --num_processes"
            if count is None
            else "it must be a whole number of at least 1, or no rank starts",
        )
        return
    if case.gpus_given and case.engine in _ON_SEVERAL_GPUS and count > case.num_gpus:
        yield wrong(
            "more-processes-than-gpus",
            f"{key} is {count} for {case.num_gpus} GPU{'s' * (case.num_gpus > 1)}",
            in_yaml(key, case.num_gpus),
            why="each rank needs its own GPU; NCCL refuses two ranks on one GPU",
            then=f", or --num_processes {case.num_gpus} at the launch",
        )
    if case.engine == "NO" and count != 1:
        yield wrong(
            "processes-without-engine",
            f"{key} is {count} with distributed_type NO",
            in_yaml(key, 1),
            why="accelerate starts one process only",
            then=", or distributed_type: MULTI_GPU",
        )


def _gpu_ids(case: Case) -> Iterator[Finding]:
    key, ids = "gpu_ids", case.config.get("gpu_ids")
    if ids is None or ids == "all":
        return
    num_ranks = -(-(case.num_processes or 1) // case.num_machines)
    text = "all"
    if not isinstance(ids, str):
        listed = ids if isinstance(ids, list) else [ids]
        if len(listed) >= max(2, num_ranks):
            text = ",".join(map(str, listed))
        why = "accelerate expects a string with commas and fails on a number or a list (AttributeError)"
    elif len(ids.split(",")) < num_ranks and case.engine in _ON_SEVERAL_GPUS:
        why = f"each of a machine's {num_ranks} ranks needs its own GPU; accelerate refuses a single id"
    else:
        return
    yield wrong("gpu-ids", f"{key} is {ids!r}", in_yaml(key, text), why=why)


def _precision(case: Case) -> Iterator[Finding]:
    """Report a dtype in the YAML that --numerics overrides or contradicts; the edit removes the key."""
    key = "mixed_precision" if "mixed_precision" in case.config else "fp16"
    precision: Any = case.config.get(key)
    if precision is None or (key == "fp16" and not precision):
        return
    precision = "fp16" if key == "fp16" else precision
    numerics = case.flags.numerics
    severity, sentence = "wrong", f"mixed_precision is {precision}, --numerics is {numerics}"
    if precision is False:
        name, sentence = "unquoted-no", "mixed_precision: no without quotes means false"
        why = "YAML 1.1 reads an unquoted no as false, and accelerate fails on it (AttributeError)"
    elif str(precision).lower() not in _PRECISIONS:
        name, sentence = "mixed-precision-unknown", f"mixed_precision is {precision!r}"
        why = f"accelerate accepts only {', '.join(_PRECISIONS)}"
    elif case.has_json:  # accelerate refuses it together with a JSON: see set-twice
        return
    elif (problem := precision_problem(str(precision).lower(), case.flags)) is not None:
        name, why = "mixed-precision-differs", f"the trainer refuses to start: {problem}"
    elif precision != ("no" if numerics == "fp32" else case.flags.computes_in):
        severity, name = "unwise", "mixed-precision-overridden"
        why = "scripts other than slm_toolkit.train compute in the file's precision; " + (
            "so does --numerics stock" if numerics == "stock" else "here the flag wins"
        )
    else:
        return
    yield fault(severity, name, sentence, in_yaml(key, REMOVE), why=why, then=": --numerics decides")


def _compiler(case: Case) -> Iterator[Finding]:
    section = case.section("dynamo_config")
    in_section = next((key for key in ("dynamo_backend", "backend") if section.get(key)), None)
    key = "dynamo_config" if in_section else "dynamo_backend"
    backend = section[in_section] if in_section else case.config.get(key)
    if backend is None or str(backend).upper() in ("NO", "FALSE"):
        return
    flag = "--torch_compile is on as well" if case.flags.torch_compile else "--torch_compile is off"
    yield wrong(
        "compiled-by-yaml",
        f"{key} compiles with {backend}, and {flag}",
        in_yaml(key, REMOVE),
        why="accelerate compiles the whole prepared model for this strategy only and ignores the flag: other "
        "strategies run without compilation",
        then=", and use --torch_compile",
    )


def _odds_and_ends(case: Case) -> Iterator[Finding]:
    if is_true(case.config.get("use_cpu")) and (case.gpu_names or case.host.gpu_names):
        is_obeyed = case.engine in ("NO", "MULTI_CPU")
        yield fault(
            "wrong" if is_obeyed else "unwise",
            "use-cpu",
            "use_cpu is true for a machine with GPUs",
            in_yaml("use_cpu", False),
            why="the GPUs stay idle"
            if is_obeyed
            else f"accelerate does not pass it to the ranks of {case.engine}, which use the GPUs anyway",
        )
    downcast = case.config.get("downcast_bf16")
    if is_true(downcast) or downcast == "yes":
        yield unwise(
            "tpu-key",
            f"downcast_bf16 is {downcast}",
            in_yaml("downcast_bf16", REMOVE),
            why="it only affects TPUs; on a GPU nothing is cast",
        )
    if is_true(case.config.get("debug")):
        yield unwise(
            "debug-mode",
            "debug is true",
            in_yaml("debug", False),
            why="accelerate then compares shapes on all ranks before each gather and reduction",
        )


def machine_count_faults(case: Case) -> Iterator[Finding]:
    machines, rank = case.config.get("num_machines", 1), case.config.get("machine_rank", 0)
    if not is_count(machines):
        yield wrong(
            "num-machines",
            f"num_machines is {machines!r}",
            in_yaml("num_machines", 1),
            why="it must be a whole number of at least 1",
        )
        return
    if rank is not None and (not isinstance(rank, int) or not 0 <= rank < machines):
        yield wrong(
            "machine-rank",
            f"machine_rank is {rank!r} of {machines} machines",
            in_yaml("machine_rank", 0),
            why=f"machines are numbered from 0 to {machines - 1}; with another number the rendezvous waits "
            "for a machine that never connects",
            then=" on the first machine, 1 on the next, or --machine_rank at each launch",
        )
    if machines == 1:
        return
    processes = case.num_processes
    if processes is not None and processes % machines:
        started = max(1, processes // machines) * machines
        has_gpus = not case.gpus_given or started <= case.num_gpus
        yield wrong(
            "processes-per-machine",
            f"num_processes is {processes}, not a multiple of {machines} machines",
            *([in_yaml("num_processes", started)] if has_gpus else []),
            why=f"accelerate starts {processes} // {machines} on each machine: "
            f"{processes // machines * machines} in all",
            change=None if has_gpus else f"use at least one GPU on each of {machines} machines",
            file="yaml",
            key="num_processes",
        )
    yield from _address(case, machines)
    launcher = case.section("deepspeed_config").get("deepspeed_multinode_launcher")
    if (
        case.engine == "DEEPSPEED" and launcher is None
    ):  # no launch passes on any other launcher: see `key_faults`
        yield wrong(
            "deepspeed-launcher",
            f"deepspeed_multinode_launcher is absent with {machines} machines",
            in_yaml("deepspeed_config.deepspeed_multinode_launcher", "standard"),
            why="accelerate then calls DeepSpeed's launcher, which needs pdsh, ssh without a password and a "
            "hostfile; with standard you run `accelerate launch` on each machine",
        )


def _address(case: Case, machines: int) -> Iterator[Finding]:
    """Report a missing or local main_process_ip.

    A missing address counts only if the YAML has machine_rank: `slm configs` writes neither, and the launch
    command gives both.
    """
    address = case.config.get("main_process_ip")
    if address is None and "machine_rank" in case.config:
        severity, name = "unwise", "main-process-ip-absent"
        sentence = f"num_machines is {machines}, without main_process_ip"
        why = "unless the command gives --main_process_ip, every machine connects to an address called None"
    elif str(address) in ("localhost", "::1", "0.0.0.0") or str(address).startswith("127."):
        severity, name = "wrong", "main-process-ip-local"
        sentence = f"main_process_ip is {address} for {machines} machines"
        why = "this address means the machine itself, so each machine waits for the others and none connects"
    else:
        return
    change = "main_process_ip: the first machine's address, or --main_process_ip at each launch"
    yield fault(severity, name, sentence, why=why, change=change, file="yaml", key="main_process_ip")


def group_faults(case: Case) -> Iterator[Finding]:
    """Report sizes from which FSDP2 can't form groups, and sizes whose product is not the number of ranks."""
    section = case.section("parallelism_config")
    if section and case.is_fsdp2:
        yield from _sizes(section)
        yield from _product(case, section)


def _sizes(section: dict[str, Any]) -> Iterator[Finding]:
    sizes = parallel_sizes(section)
    for name, size in sizes.items():
        if not is_count(size):
            yield wrong(
                "group-size",
                f"{PREFIX}{name} is {size!r}",
                in_yaml("parallelism_config", REMOVE),
                why="it must be a whole number of at least 1",
                then=": all ranks then shard one copy",
                key=f"parallelism_config.{PREFIX}{name}",
            )
            return
    has_nothing = sizes["dp_shard_size"] == sizes["cp_size"] == 1
    if has_nothing and all(str(key).startswith(PREFIX) for key in section):
        refused = "accelerate refuses FSDP2 without a group to shard over; use MULTI_GPU for copies alone"
        yield wrong(
            "nothing-to-shard",
            f"parallelism_config has dp_replicate_size {sizes['dp_replicate_size']} and dp_shard_size 1",
            in_yaml("parallelism_config", REMOVE),
            why="; ".join([refused, *not_run_yet(sizes)]),
            then=", or set dp_shard_size to the number of ranks per copy",
        )


def _product(case: Case, section: dict[str, Any]) -> Iterator[Finding]:
    """Check the product of the user's sizes; the groups of our files follow the nodes."""
    sizes = parallel_sizes(section)
    if not all(str(key).startswith(PREFIX) for key in section):
        return  # the sizes are only known once the keys are corrected
    if not all(map(is_count, sizes.values())) or is_shipped(case.files.yaml_path):
        return
    if sizes["dp_shard_size"] == sizes["cp_size"] == 1:
        return  # nothing to shard over, whatever the product
    ranks = case.num_ranks if case.gpus_given else case.num_processes or case.num_ranks
    if (problem := product_problem(sizes, ranks)) is None:
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


# Faulty keys: not passed on by a launch (with the key that was probably meant), removed, renamed, duplicated.

REMOVED_FROM_DEEPSPEED = (  # DeepSpeed refuses these keys: runtime/config.py
    *("nebula", "compression_training", "amp", "quantize_training", "sparse_gradients", "eigenvalue"),
    *("sparse_attention", "elasticity", "graph_harvesting", "curriculum_learning", "progressive_layer_drop"),
)
REMOVED_FROM_ZERO = ("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param")
_REMOVED = (
    *((key,) for key in REMOVED_FROM_DEEPSPEED),
    *(("zero_optimization", key) for key in REMOVED_FROM_ZERO),
)
RENAMED_IN_ZERO = {  # old key, which DeepSpeed still reads with a warning: new key and value
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", True),
}
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
    if case.has_json:
        yield from _of_json(case)


def meant_by(key: str, known: tuple[str, ...]) -> str | None:
    """Return the known key that is closest to a misspelt key; None if none is close."""
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
            f"{'.'.join(keys)} appears more than once: the last value, {value!r}, is used",
            Edit(file, keys, KEEP_LAST),
            why="YAML and JSON parsers silently keep the last value, so the first value that you read in the "
            "file is not the one that runs",
            topic="launch" if file == "yaml" else "deepspeed",
        )


def _refused(case: Case) -> Iterator[Finding]:
    """Report each setting that no launch passes on; the edits remove it, or write the key that was meant."""
    for file, content, refused in (
        ("yaml", case.config, refused_of_yaml),
        ("json", case.files.deepspeed if case.has_json else {}, refused_of_json),
    ):
        for setting in refused(content):
            if file == "json" and setting.keys in _REMOVED:
                continue
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


def _of_json(case: Case) -> Iterator[Finding]:
    for keys in _REMOVED:
        if keys[-1] in (case.zero if len(keys) > 1 else case.files.deepspeed):
            yield wrong(
                "removed-key",
                f"{'.'.join(keys)} belongs to a feature that DeepSpeed has removed",
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
                f"{key} is now called {new}",
                *edits,
                why="DeepSpeed refuses both names together"
                if is_double
                else "DeepSpeed warns about the old name and will stop reading it",
                topic="deepspeed",
            )
