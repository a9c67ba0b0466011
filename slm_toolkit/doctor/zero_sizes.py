"""Faults of a DeepSpeed JSON's sizes beside the model's: buckets, reuse, groups of hpZ, offload's pace."""

from collections.abc import Iterator
from typing import Any

from slm_toolkit.doctor.case import Case, is_count, is_true, shown
from slm_toolkit.doctor.deepspeed_faults import ZERO
from slm_toolkit.doctor.finding import REMOVE, Finding, change_by, fault, in_json, slow, unwise, wrong
from slm_toolkit.doctor.host import is_older
from slm_toolkit.strategy.settings import ZeroSettings

BUCKET = 13_107_200
"elements: 25 MiB in bf16, as DDP's buckets are; what ds_configs/ have"
_WORTH_SAYING_BYTES = 100 * 2**20
"a bucket that is larger than the model by less costs nobody's batch"
_AIO = {
    "block_size": 1_048_576,
    "queue_depth": 32,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
"ds_configs/zero3_nvme.json's"


def zero_size_faults(case: Case) -> Iterator[Finding]:
    """Of stages above 0; a YAML without a JSON has DeepSpeed's defaults, and no way to say otherwise."""
    if case.files.json_problem is not None or not case.zero_stage:
        return
    for check in (_reduce_bucket, _overlap, _stage_3, *((_hpz, _offload_speed) if case.has_json else ())):
        yield from check(case)


def _size(
    case: Case, severity: str, name: str, sentence: str, key: str, value: Any, *, why: str, then: str = ""
) -> Finding:
    """A finding on `key` of the JSON's zero_optimization; without a JSON the change is to name one."""
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
    """Elements, after accelerate has filled in "auto", or DeepSpeed's default."""
    value = case.zero.get(key)
    if value == "auto" and key in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
        return case.spec.hidden_size**2  # accelerate 1.15; 0.9 of it for prefetching
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number else getattr(ZeroSettings(), key)


def _size_of(case: Case, key: str) -> str:
    """The beginning of a sentence: the key with its value, or DeepSpeed's default."""
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
            why=f"DeepSpeed allocates the bucket whole{', twice for overlap_comm' * (copies - 1)}: "
            f"{2 * copies * bucket / 2**30:.1f} GiB, and nothing is reduced before backward has ended",
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
            why="ZeRO-1 and 2 refuse to start: NCCL's buffers begin at multiples of 4 bytes",
        )


def _overlap(case: Case) -> Iterator[Finding]:
    said = case.zero.get("overlap_comm", case.zero_stage == 3)  # deepspeed's default: of stage 3 only
    if said is False or (said is None and case.zero_stage < 3):
        is_absent = "overlap_comm" not in case.zero
        yield _size(
            case,
            "could be faster",
            "no-overlap",
            f"overlap_comm is {'absent, which means false' if is_absent else 'false'} under "
            f"ZeRO-{case.zero_stage}",
            "overlap_comm",
            True,
            why="gradients are then reduced while backward waits; DDP and FSDP reduce beside it",
            then=", which takes a second bucket",
        )


def _stage_3(case: Case) -> Iterator[Finding]:
    """Parameters that stay gathered, by deepspeed 0.19.8's runtime/zero/partitioned_param_coordinator.py."""
    if case.zero_stage != 3:
        return
    params, layer = case.spec.num_params, case.spec.params_per_layer
    key = "stage3_max_reuse_distance"
    # from the first layer's forward to its backward all others pass twice
    if _number(case, key) >= 2 * (params - layer):
        yield _size(
            case,
            "wrong",
            "zero3-never-releases",
            f"{_size_of(case, key)}, and between a layer's forward and its backward at most "
            f"{2 * (params - layer):,} pass",
            key,
            0,
            why="what is used again within that distance is kept: from the second step on every rank holds "
            f"all of {case.spec.name} gathered, {2 * params / 2**30:.2f} GiB, as under ZeRO-2",
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
            why="parameters are gathered ahead until so many are live: all of them, "
            f"{2 * params / 2**30:.1f} GiB on every rank",
            then=", two layers and the head",
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
            why="the first layer's turn gathers the whole model at once",
        )


def _round_up(elements: int) -> int:
    """To the next ten million: a number that somebody will read."""
    return -(-elements // 10_000_000) * 10_000_000


def _hpz(case: Case) -> Iterator[Finding]:
    key = "zero_hpz_partition_size"
    size, here = case.zero.get(key, 1), min(case.num_ranks, case.gpus_per_node)
    size = here if size == "auto" else size
    if case.zero_stage != 3 or not is_count(size) or size == 1:
        return
    if is_older(case.host, "deepspeed", "0.19.5"):
        yield wrong(
            "hpz-version",
            f"{key} {size} with deepspeed {case.host.versions['deepspeed']}",
            why="before 0.19.5 a rank whose share of the second copy begins past a small parameter's end "
            "stops with an IndexError (DeepSpeed's pull request 8210)",
            change='pip install -U "deepspeed>=0.19.5"',
            file="json",
            key=f"{ZERO}.{key}",
            topic="versions",
        )
    if case.num_ranks % size:
        yield wrong(
            "hpz-does-not-divide",
            f"{key} is {size} on {case.num_ranks} ranks",
            in_json(f"{ZERO}.{key}", here),
            why="DeepSpeed refuses groups that don't divide the ranks",
            then=", the ranks of a node",
        )
    elif size > here:
        yield unwise(
            "hpz-across-nodes",
            f"{key} is {size}, a node has {here} ranks",
            in_json(f"{ZERO}.{key}", here),
            why="backward then gathers across nodes, which the second copy is there to avoid",
        )
    elif case.num_ranks <= case.gpus_per_node:
        second = 2 * case.spec.num_params / size / 2**30
        yield unwise(
            "hpz-on-one-node",
            f"{key} is {shown(case.zero[key])} on one node",
            in_json(f"{ZERO}.{key}", REMOVE),
            why=f"a second copy of the parameters, {second:.2f} GiB a rank, saves traffic between nodes: "
            "there is none",
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
                why="pages that can be swapped out are copied twice, and the GPU waits for each copy",
                then=", where `ulimit -l` and the RAM allow it",
            )
    on_disk = case.zero_stage == 3 and "nvme" in [case.offload(part) for part in parts]
    if on_disk and not isinstance(case.files.deepspeed.get("aio"), dict):
        yield slow(
            "aio-absent",
            "nvme offload without an aio section",
            in_json("aio", _AIO),
            why="DeepSpeed's default is one thread with 8 reads in flight; a disk takes more at once",
            change='"aio": as in ds_configs/zero3_nvme.json',
        )
