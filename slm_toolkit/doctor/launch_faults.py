"""Faults of the accelerate YAML's own keys: what is launched, on which processes, machines and groups."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

from slm_toolkit.doctor.case import Case, fault, is_count, is_true
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding
from slm_toolkit.doctor.keys import meant_by
from slm_toolkit.strategy.groups import PREFIX, parallel_sizes, product_problem
from slm_toolkit.strategy.strategy import is_shipped, precision_problem

_SUPPORTED = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED")
_ENGINE_SYNONYMS = {
    **dict.fromkeys(("DDP", "DATA_PARALLEL", "DISTRIBUTED", "MULTIGPU", "GPU"), "MULTI_GPU"),
    **dict.fromkeys(("FSDP2", "FSDP1", "FULL_SHARD"), "FSDP"),
    **dict.fromkeys(("ZERO", "ZERO1", "ZERO2", "ZERO3", "DEEP_SPEED"), "DEEPSPEED"),
    **dict.fromkeys(("NONE", "SINGLE", "FALSE"), "NO"),
}
_PRECISIONS = ("no", "bf16", "fp16", "fp8")
_SECTION_OF = {"fsdp_config": "FSDP", "deepspeed_config": "DEEPSPEED", "parallelism_config": "FSDP"}
_WITHOUT_A_SECTION = {  # what stands in for a section that is no mapping
    "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    "deepspeed_config": {"zero_stage": 2},
}
_launch = partial(fault, topic="launch", file="yaml")


def launch_faults(case: Case) -> Iterator[Finding]:
    if not case.files.yaml_text:  # a DeepSpeed JSON by itself
        return
    checks = (_engine, _sections, _processes, _gpu_ids, _precision, _compiler, _odds_and_ends)
    for check in checks:
        yield from check(case)


def _engine(case: Case) -> Iterator[Finding]:
    said = case.config.get("distributed_type")
    if said in _SUPPORTED:
        return
    if said is False:
        yield _launch(
            *(case, "unwise", "unquoted-no", "distributed_type: NO without quotes is false"),
            why="YAML 1.1 reads a bare NO as false; accelerate then takes it for no engine by accident",
            change='distributed_type: "NO"',
            key="distributed_type",
            edits=(Edit("yaml", ("distributed_type",), "NO"),),
        )
        return
    upper = str(said or "").upper().replace("-", "_").replace(" ", "_")
    likely = upper if upper in _SUPPORTED else _ENGINE_SYNONYMS.get(upper)
    likely = likely or meant_by(upper, _SUPPORTED) or _engine_of_sections(case)
    sentence = "there is no distributed_type" if said is None else f"distributed_type is {said}"
    yield _launch(
        *(case, "wrong", "distributed-type", sentence),
        why="accelerate takes its own words only, in capitals, and refuses others; of them "
        f"{', '.join(_SUPPORTED)} are trained here",
        change=f"distributed_type: {likely}",
        key="distributed_type",
        edits=(Edit("yaml", ("distributed_type",), likely),),
    )


def _engine_of_sections(case: Case) -> str:
    if case.section("deepspeed_config"):
        return "DEEPSPEED"
    if case.section("fsdp_config"):
        return "FSDP"
    return "MULTI_GPU" if (case.config.get("num_processes") or 1) != 1 else "NO"


def _sections(case: Case) -> Iterator[Finding]:
    """Sections that are none, and those of another engine."""
    for name, engine in _SECTION_OF.items():
        value = case.config.get(name)
        if value is not None and not isinstance(value, dict):
            instead = _WITHOUT_A_SECTION.get(name, REMOVE) if case.engine == engine else REMOVE
            yield _launch(
                *(case, "wrong", "not-a-section", f"{name} is {value!r}"),
                why="it holds settings, one per indented line; of anything else accelerate takes none",
                change=f"remove {name}" if instead is REMOVE else f"{name}: {instead}",
                key=name,
                edits=(Edit("yaml", (name,), instead),),
            )
        elif value and case.config.get("distributed_type") in _SUPPORTED and case.engine != engine:
            yield _launch(
                *(case, "wrong", "ignored-section"),
                f"{name} beside distributed_type {case.engine}, which does not read it",
                why=f"{case.engine} does nothing of what {', '.join(map(str, value))} ask for"
                + ("" if case.engine in ("FSDP", "DEEPSPEED") else ", and shards nothing"),
                change=f"remove {name}, or write distributed_type: {engine}",
                key=name,
                edits=(Edit("yaml", (name,), REMOVE),),
            )


def _processes(case: Case) -> Iterator[Finding]:
    key, count = "num_processes", case.config.get("num_processes")
    if case.num_processes is None:
        said = "there is no num_processes" if count is None else f"num_processes is {count!r}"
        yield _launch(
            *(case, "unwise" if count is None else "wrong", "num-processes", said),
            why="accelerate refuses the file unless the command gives --num_processes"
            if count is None
            else "it is a whole number of at least 1: no rank would start",
            change=f"num_processes: {case.num_gpus}",
            key=key,
            edits=(Edit("yaml", (key,), case.num_gpus),),
        )
        return
    if case.gpus_given and case.engine in ("MULTI_GPU", "FSDP", "DEEPSPEED") and count > case.num_gpus:
        yield _launch(
            *(case, "wrong", "more-processes-than-gpus"),
            f"num_processes is {count} for {case.num_gpus} GPU{'s' * (case.num_gpus > 1)}",
            why="each rank needs a GPU of its own; two on one are refused by NCCL",
            change=f"num_processes: {case.num_gpus}, or --num_processes {case.num_gpus} at the launch",
            key=key,
            edits=(Edit("yaml", (key,), case.num_gpus),),
        )
    if case.engine == "NO" and count != 1:
        yield _launch(
            *(
                case,
                "wrong",
                "processes-without-engine",
                f"num_processes is {count} with distributed_type NO",
            ),
            why="accelerate starts one process and never the others",
            change="num_processes: 1, or distributed_type: MULTI_GPU",
            key=key,
            edits=(Edit("yaml", (key,), 1),),
        )


def _gpu_ids(case: Case) -> Iterator[Finding]:
    ids = case.config.get("gpu_ids")
    if ids is None or ids == "all":
        return
    here = -(-(case.num_processes or 1) // case.num_machines)
    if not isinstance(ids, str):
        listed = ids if isinstance(ids, list) else [ids]
        text = ",".join(map(str, listed)) if len(listed) >= max(2, here) else "all"
        why = "accelerate splits a text at commas and fails on a number or a list (AttributeError)"
    elif len(ids.split(",")) < here and case.engine in ("MULTI_GPU", "FSDP", "DEEPSPEED"):
        text, why = (
            "all",
            f"each of a machine's {here} ranks needs a GPU of its own; accelerate refuses a single id",
        )
    else:
        return
    yield _launch(
        *(case, "wrong", "gpu-ids", f"gpu_ids is {ids!r}"),
        why=why,
        change="gpu_ids: all" if text == "all" else f'gpu_ids: "{text}"',
        key="gpu_ids",
        edits=(Edit("yaml", ("gpu_ids",), text),),
    )


def _precision(case: Case) -> Iterator[Finding]:
    key = "mixed_precision" if "mixed_precision" in case.config else "fp16"
    said: Any = case.config.get(key)
    if said is None or (key == "fp16" and not said):
        return
    said = "fp16" if key == "fp16" else said
    if said is False:
        yield _launch(
            *(case, "wrong", "unquoted-no", "mixed_precision: no without quotes is false"),
            why="YAML 1.1 reads a bare no as false, and accelerate fails on it (AttributeError)",
            change="remove mixed_precision: --numerics says it",
            key=key,
            edits=(Edit("yaml", (key,), REMOVE),),
        )
    elif str(said).lower() not in _PRECISIONS:
        yield _launch(
            *(case, "wrong", "mixed-precision-unknown", f"mixed_precision is {said!r}"),
            why=f"accelerate knows {', '.join(_PRECISIONS)} and refuses others",
            change="remove mixed_precision: --numerics says it",
            key=key,
            edits=(Edit("yaml", (key,), REMOVE),),
        )
    elif case.has_json:  # beside a JSON it is refused: see set-twice
        return
    elif (problem := precision_problem(str(said).lower(), case.flags)) is not None:
        yield _launch(
            *(case, "wrong", "mixed-precision-differs"),
            f"mixed_precision is {said}, --numerics is {case.flags.numerics}",
            why=f"the trainer refuses to start: {problem}",
            change="remove mixed_precision: --numerics says it",
            key=key,
            edits=(Edit("yaml", (key,), REMOVE),),
        )
    elif said != _numerics_of(case):
        yield _launch(
            *(case, "unwise", "mixed-precision-overridden"),
            f"mixed_precision is {said}, --numerics is {case.flags.numerics}",
            why="under another script than slm_toolkit.train this file trains in other numbers; "
            + ("stock takes what the file says" if case.flags.numerics == "stock" else "here the flag wins"),
            change="remove mixed_precision: --numerics says it",
            key=key,
            edits=(Edit("yaml", (key,), REMOVE),),
        )


def _numerics_of(case: Case) -> str:
    return "no" if case.flags.numerics == "fp32" else "bf16"


def _compiler(case: Case) -> Iterator[Finding]:
    section = case.section("dynamo_config")
    in_section = next((key for key in ("dynamo_backend", "backend") if section.get(key)), None)
    key = "dynamo_config" if in_section else "dynamo_backend"
    backend = section[in_section] if in_section else case.config.get(key)
    if backend is None or str(backend).upper() in ("NO", "FALSE"):
        return
    asked = "--torch_compile is on as well" if case.flags.torch_compile else "--torch_compile is off"
    yield _launch(
        *(case, "wrong", "compiled-by-yaml", f"{key} asks for {backend}, and {asked}"),
        why="accelerate compiles the whole prepared model for this file alone, whatever the flag says: other "
        "strategies run without it",
        change=f"remove {key}, and say --torch_compile",
        key=key,
        edits=(Edit("yaml", (key,), REMOVE),),
    )


def _odds_and_ends(case: Case) -> Iterator[Finding]:
    if is_true(case.config.get("use_cpu")) and (case.gpu_names or case.host.gpu_names):
        is_obeyed = case.engine in ("NO", "MULTI_CPU")
        yield _launch(
            *(case, "wrong" if is_obeyed else "unwise", "use-cpu", "use_cpu is true for a machine with GPUs"),
            why="the GPUs stay idle"
            if is_obeyed
            else f"accelerate does not hand it to the ranks of {case.engine}, which take GPUs all the same",
            change="use_cpu: false",
            key="use_cpu",
            edits=(Edit("yaml", ("use_cpu",), False),),
        )
    if is_true(case.config.get("downcast_bf16")) or case.config.get("downcast_bf16") == "yes":
        yield _launch(
            *(case, "unwise", "tpu-key", f"downcast_bf16 is {case.config['downcast_bf16']}"),
            why="only TPUs read it; on a GPU nothing is cast down",
            change="remove downcast_bf16",
            key="downcast_bf16",
            edits=(Edit("yaml", ("downcast_bf16",), REMOVE),),
        )
    if is_true(case.config.get("debug")):
        yield _launch(
            *(case, "unwise", "debug-mode", "debug is true"),
            why="accelerate then compares shapes on all ranks before each of its gathers and reductions",
            change="debug: false",
            key="debug",
            edits=(Edit("yaml", ("debug",), False),),
        )


_launch_on_several = partial(fault, topic="launch", file="yaml")


def machine_count_faults(case: Case) -> Iterator[Finding]:
    machines, rank = case.config.get("num_machines", 1), case.config.get("machine_rank", 0)
    if not is_count(machines):
        yield _launch_on_several(
            *(case, "wrong", "num-machines", f"num_machines is {machines!r}"),
            why="it is a whole number of at least 1",
            change="num_machines: 1",
            key="num_machines",
            edits=(Edit("yaml", ("num_machines",), 1),),
        )
        return
    if rank is not None and (not isinstance(rank, int) or not 0 <= rank < machines):
        yield _launch_on_several(
            *(case, "wrong", "machine-rank", f"machine_rank is {rank!r} of {machines} machines"),
            why=f"machines are numbered from 0 to {machines - 1}; the rendezvous waits for a number that "
            "never comes",
            change="machine_rank: 0 on the first, 1 on the next, or --machine_rank at each launch",
            key="machine_rank",
            edits=(Edit("yaml", ("machine_rank",), 0),),
        )
    if machines == 1:
        return
    processes = case.num_processes
    if processes is not None and processes % machines:
        started = max(1, processes // machines) * machines
        has_gpus = not case.gpus_given or started <= case.num_gpus
        yield _launch_on_several(
            *(case, "wrong", "processes-per-machine"),
            f"num_processes is {processes} on {machines} machines, which does not divide",
            why=f"accelerate starts {processes} // {machines} on each: {processes // machines * machines}",
            change=f"num_processes: {started}"
            if has_gpus
            else f"a GPU at least on each of {machines} machines",
            key="num_processes",
            edits=(Edit("yaml", ("num_processes",), started),) if has_gpus else (),
        )
    yield from _address(case, machines)
    launcher = case.section("deepspeed_config").get("deepspeed_multinode_launcher")
    if case.engine == "DEEPSPEED" and launcher is None:  # another is not passed on: see keys.py
        yield _launch_on_several(
            *(case, "wrong", "deepspeed-launcher"),
            f"deepspeed_multinode_launcher is absent with {machines} machines",
            why="accelerate then calls DeepSpeed's own launcher, which wants pdsh, password-free ssh and a "
            "hostfile; standard starts each machine by its own `accelerate launch`",
            change="deepspeed_multinode_launcher: standard",
            key="deepspeed_config.deepspeed_multinode_launcher",
            edits=(Edit("yaml", ("deepspeed_config", "deepspeed_multinode_launcher"), "standard"),),
        )


def _address(case: Case, machines: int) -> Iterator[Finding]:
    """Missing beside a machine_rank; without both, as `slm configs` writes them, the command says both."""
    address = case.config.get("main_process_ip")
    change = "main_process_ip: the first machine's address, or --main_process_ip at each launch"
    if address is None and "machine_rank" in case.config:
        yield _launch_on_several(
            *(
                case,
                "unwise",
                "main-process-ip-absent",
                f"num_machines is {machines}, without main_process_ip",
            ),
            why="unless the command gives --main_process_ip, every machine looks for rank 0 at None",
            change=change,
            key="main_process_ip",
        )
    elif str(address) in ("localhost", "::1", "0.0.0.0") or str(address).startswith("127."):
        yield _launch_on_several(
            *(
                case,
                "wrong",
                "main-process-ip-local",
                f"main_process_ip is {address} for {machines} machines",
            ),
            why="on every machine that address is the machine itself: each waits for the others at home",
            change=change,
            key="main_process_ip",
        )


_fsdp = partial(fault, topic="fsdp", file="yaml")


def group_faults(case: Case) -> Iterator[Finding]:
    yield from _sizes(case)
    yield from _product(case)


def _sizes(case: Case) -> Iterator[Finding]:
    """Sizes that FSDP2 can't form groups of."""
    section = case.section("parallelism_config")
    if not section or not case.is_fsdp2:
        return
    sizes = parallel_sizes(section)
    for name, size in sizes.items():
        if not is_count(size):
            yield _fsdp(
                *(case, "wrong", "group-size", f"{PREFIX}{name} is {size!r}"),
                why="it is a whole number of at least 1",
                change="remove parallelism_config: all ranks share one copy",
                key=f"parallelism_config.{PREFIX}{name}",
                edits=(Edit("yaml", ("parallelism_config",), REMOVE),),
            )
            return
    has_nothing = sizes["dp_shard_size"] == sizes["cp_size"] == 1
    if has_nothing and all(str(key).startswith(PREFIX) for key in section):
        yield _fsdp(
            *(case, "wrong", "nothing-to-shard"),
            f"parallelism_config has dp_replicate_size {sizes['dp_replicate_size']} and dp_shard_size 1",
            why="accelerate refuses FSDP2 without a group to shard over; copies alone are MULTI_GPU",
            change="remove parallelism_config, or give dp_shard_size the ranks of one copy",
            key="parallelism_config",
            edits=(Edit("yaml", ("parallelism_config",), REMOVE),),
        )


def _product(case: Case) -> Iterator[Finding]:
    """Sizes of one's own whose product is not the number of ranks; our own files follow the nodes."""
    section = case.section("parallelism_config")
    sizes = parallel_sizes(section)
    if not all(str(key).startswith(PREFIX) for key in section):
        return  # until the keys are mended, nobody knows the sizes
    if not (case.is_fsdp2 and all(map(is_count, sizes.values()))) or is_shipped(case.files.yaml_path):
        return
    if sizes["dp_shard_size"] == sizes["cp_size"] == 1:
        return  # nothing to shard over, whatever the product
    ranks = case.num_ranks if case.gpus_given else case.num_processes or case.num_ranks
    if (problem := product_problem(sizes, ranks)) is None:
        return
    product = math.prod(sizes.values())
    shard, left = divmod(ranks * sizes["dp_shard_size"], product)
    fits = left == 0 and (shard > 1 or sizes["cp_size"] > 1)
    yield _fsdp(
        *(case, "wrong", "groups-do-not-divide", problem),
        why="accelerate multiplies all five sizes and refuses a product that is not the number of ranks",
        change=f"{PREFIX}dp_shard_size: {shard}"
        if fits
        else f"{product} ranks, or sizes whose product is {ranks}",
        key="parallelism_config",
        edits=(Edit("yaml", ("parallelism_config", f"{PREFIX}dp_shard_size"), shard),) if fits else (),
    )
