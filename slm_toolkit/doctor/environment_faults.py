"""Faults of the environment that a launch from this shell hands to its ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slm_toolkit.doctor.case import Case, is_true
from slm_toolkit.doctor.finding import Finding, fault, slow, unwise, wrong

_ON = ("1", "true", "yes", "on")


@dataclass(frozen=True)
class _Variable:
    """One that costs time whenever it has one of these values."""

    name: str
    values: tuple[str, ...]
    slug: str
    severity: str
    why: str
    applies: Callable[[Case], bool] = lambda case: True


_VARIABLES = (
    _Variable(
        *("NCCL_P2P_DISABLE", _ON, "nccl-p2p-disabled", "wrong"),
        why="GPUs of a machine then talk through the host's RAM, past NVLink and PCIe peer access",
        applies=lambda case: case.num_ranks > 1,
    ),
    _Variable(
        *("NCCL_SHM_DISABLE", _ON, "nccl-shm-disabled", "unwise"),
        why="GPUs of a machine without peer access then talk through network sockets",
        applies=lambda case: case.num_ranks > 1,
    ),
    _Variable(
        *("NCCL_IB_DISABLE", _ON, "nccl-ib-disabled", "wrong"),
        why="nodes then talk by TCP over Ethernet, past InfiniBand and RoCE",
        applies=lambda case: case.num_ranks > case.gpus_per_node or case.num_machines > 1,
    ),
    _Variable(
        *("NCCL_DEBUG", ("info", "trace"), "nccl-debug", "unwise"),
        why="each rank writes pages of log; TRACE slows every collective",
    ),
    _Variable(
        *("CUDA_LAUNCH_BLOCKING", _ON, "cuda-launch-blocking", "wrong"),
        why="the host waits for each kernel: nothing overlaps, steps take several times as long",
    ),
    _Variable(
        *("TORCH_DISTRIBUTED_DEBUG", ("detail",), "distributed-debug", "wrong"),
        why="PyTorch then compares shapes over all ranks before every collective",
    ),
    _Variable(
        *("PYTORCH_NO_CUDA_MEMORY_CACHING", _ON, "no-memory-caching", "wrong"),
        why="every tensor becomes a cudaMalloc and a cudaFree, which stop the GPU",
    ),
    _Variable(
        *("TORCHDYNAMO_DISABLE", _ON, "dynamo-disabled", "wrong"),
        why="--torch_compile then compiles nothing",
        applies=lambda case: case.flags.torch_compile,
    ),
)
_LEFT_OVER = (
    *("ACCELERATE_USE_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_", "ACCELERATE_MIXED_PRECISION"),
    *("ACCELERATE_DYNAMO_", "FSDP_", "PARALLELISM_CONFIG_"),
)


def environment_faults(case: Case) -> Iterator[Finding]:
    for variable in _VARIABLES:
        value = case.host.variables.get(variable.name, "")
        if value.lower() in variable.values and variable.applies(case):
            yield fault(
                variable.severity,
                variable.slug,
                f"{variable.name}={value} in the environment",
                why=variable.why,
                change=f"unset {variable.name}",
                key=variable.name,
            )
    for check in (_interfaces, _left_over, _allocator, _threads):
        yield from check(case)


def _interfaces(case: Case) -> Iterator[Finding]:
    here = case.host.interfaces
    if here is None or not case.host.is_meant:
        return
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = case.host.variables.get(name, "")
        if not value or value.startswith("^"):  # NCCL: all but these
            continue
        is_exact = value.startswith("=") or name.startswith("GLOO")
        words = [word for word in value.removeprefix("=").split(",") if word]
        if not any(
            there == word or (not is_exact and there.startswith(word)) for word in words for there in here
        ):
            yield wrong(
                "interface-absent",
                f"{name}={value}, and here are {', '.join(here)}",
                why="the ranks find no interface to talk by, and end or hang at the first collective",
                change=f"unset {name}, or name one that is here",
                key=name,
            )


def _left_over(case: Case) -> Iterator[Finding]:
    names = sorted(name for name in case.host.variables if name.startswith(_LEFT_OVER))
    if names:
        yield wrong(
            "launcher-variables",
            f"{', '.join(names)} in the environment",
            why="accelerate's launcher sets these for its ranks; those that it does not set anew for this "
            "file reach them and overrule it",
            change=f"unset {' '.join(names)}",
            key=names[0],
        )


def _allocator(case: Case) -> Iterator[Finding]:
    new, old = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    values = {name: case.host.variables[name] for name in (new, old) if case.host.variables.get(name)}
    if len(values) == 2 and values[new] != values[old]:
        yield unwise(
            "allocator-set-twice",
            f"{new}={values[new]} and {old}={values[old]}",
            why="one setting, two values: parts of PyTorch read the one name first, parts the other",
            change=f"unset {old}, the older name",
            key=old,
        )
    for name, value in values.items():
        if "expandable_segments:false" in value.lower().replace(" ", ""):
            yield slow(
                "segments-not-expandable",
                f"{name}={value}",
                why="segments that can't grow leave gaps between batches of different sizes",
                change=f"{name}=expandable_segments:True",
                key=name,
            )


def _threads(case: Case) -> Iterator[Finding]:
    """accelerate's launcher, and torchrun, give each rank OMP_NUM_THREADS=1 where the shell has none."""
    cores, name = case.host.num_cores, "OMP_NUM_THREADS"
    if not case.host.is_meant or cores is None:
        return
    threads = case.host.variables.get(name, "")
    ranks = -(-(case.num_processes or 1) // case.num_machines)
    if case.host.gpu_names and case.gpus_given:
        ranks = min(case.num_ranks, case.gpus_per_node)
    offloads = case.offload("offload_optimizer") != "none" or is_true(case.fsdp.get("fsdp_offload_params"))
    if threads.isdigit() and int(threads) * ranks > cores and int(threads) > 1:
        yield unwise(
            "too-many-threads",
            f"{name}={threads} for {ranks} ranks on {cores} cores",
            why="threads that wait for a core slow those that have one",
            change=f"{name}={max(1, cores // ranks)}",
            key=name,
        )
    elif (offloads or not case.host.gpu_names) and cores >= 2 * ranks and threads in ("", "1"):
        works = "AdamW" if case.host.gpu_names else "every rank"
        yield slow(
            "one-thread-per-rank",
            f"{name} is {threads or 'unset, which the launcher makes 1'}: {ranks} ranks on {cores} cores",
            why=f"{works} runs on one core of those that each rank could have; `slm compare` shares them out",
            change=f"{name}={cores // ranks}",
            key=name,
        )
