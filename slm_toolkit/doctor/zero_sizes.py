"""Faults of a DeepSpeed JSON's sizes beside the model's: buckets, reuse, groups of hpZ, offload's pace."""

from collections.abc import Iterator

from slm_toolkit.doctor.case import Case, fault, is_count, is_true, shown
from slm_toolkit.doctor.deepspeed_faults import ZERO
from slm_toolkit.doctor.finding import REMOVE, Edit, Finding
from slm_toolkit.doctor.host import is_older

BUCKET = 13_107_200
"elements: 25 MiB in bf16, as DDP's buckets are; what ds_configs/ have"
_WORTH_SAYING_BYTES = 100 * 2**20
"a bucket that is larger than the model by less costs nobody's batch"
_DEFAULTS = {  # deepspeed 0.19.8, runtime/zero/config.py
    "reduce_bucket_size": int(5e8),
    "stage3_prefetch_bucket_size": int(5e7),
    "stage3_max_reuse_distance": int(1e9),
    "stage3_max_live_parameters": int(1e9),
}
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
    case: Case,
    severity: str,
    name: str,
    sentence: str,
    *,
    why: str,
    change: str,
    key: str,
    edits: tuple[Edit, ...],
) -> Finding:
    if case.has_json:
        where = {"file": "json", "key": key, "edits": edits}
    else:
        where = {"file": "yaml", "key": "deepspeed_config.deepspeed_config_file"}
        change = f"name a DeepSpeed JSON with {change}, such as ds_configs/zero{case.zero_stage}.json"
    return fault(case, severity, name, sentence, topic="deepspeed", why=why, change=change, **where)


def _number(case: Case, key: str) -> int:
    """Elements, after accelerate has filled in "auto", or DeepSpeed's default."""
    value = case.zero.get(key)
    if value == "auto" and key in ("reduce_bucket_size", "stage3_prefetch_bucket_size"):
        return case.spec.hidden_size**2  # accelerate 1.15; 0.9 of it for prefetching
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number else _DEFAULTS[key]


def _said(case: Case, key: str) -> str:
    """As a sentence begins: the key with its value, or DeepSpeed's default."""
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
            *(case, "unwise", "bucket-larger-than-model"),
            f"{_said(case, key)}, {case.spec.name} has {params:,}",
            why=f"DeepSpeed allocates the bucket whole{', twice for overlap_comm' * (copies - 1)}: "
            f"{2 * copies * bucket / 2**30:.1f} GiB, and nothing is reduced before backward has ended",
            change=f"{key}: {BUCKET}",
            key=f"{ZERO}.{key}",
            edits=(Edit("json", (ZERO, key), BUCKET),),
        )
    gather = case.zero.get("allgather_bucket_size")
    if case.zero_stage < 3 and isinstance(gather, int) and gather % 2:
        yield _size(
            *(case, "wrong", "odd-bucket", f"allgather_bucket_size is {gather}, an odd number"),
            why="ZeRO-1 and 2 refuse to start: NCCL's buffers begin at multiples of 4 bytes",
            change=f"allgather_bucket_size: {gather + 1}",
            key=f"{ZERO}.allgather_bucket_size",
            edits=(Edit("json", (ZERO, "allgather_bucket_size"), gather + 1),),
        )


def _overlap(case: Case) -> Iterator[Finding]:
    said = case.zero.get("overlap_comm", case.zero_stage == 3)  # deepspeed's default: of stage 3 only
    if said is False or (said is None and case.zero_stage < 3):
        is_absent = "overlap_comm" not in case.zero
        yield _size(
            *(case, "could be faster", "no-overlap"),
            f"overlap_comm is {'absent, which means false' if is_absent else 'false'} under "
            f"ZeRO-{case.zero_stage}",
            why="gradients are then reduced while backward waits; DDP and FSDP reduce beside it",
            change="overlap_comm: true, which takes a second bucket",
            key=f"{ZERO}.overlap_comm",
            edits=(Edit("json", (ZERO, "overlap_comm"), True),),
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
            *(case, "wrong", "zero3-never-releases"),
            f"{_said(case, key)}, and between a layer's forward and its backward at most "
            f"{2 * (params - layer):,} pass",
            why="what is used again within that distance is kept: from the second step on every rank holds "
            f"all of {case.spec.name} gathered, {2 * params / 2**30:.2f} GiB, as under ZeRO-2",
            change=f"{key}: 0",
            key=f"{ZERO}.{key}",
            edits=(Edit("json", (ZERO, key), 0),),
        )
    key, prefetch = "stage3_max_live_parameters", _number(case, "stage3_prefetch_bucket_size")
    wanted = max(2 * layer + case.spec.embedding_params, BUCKET)
    wasted = 2 * (min(params, _number(case, key)) - wanted)
    if prefetch and _number(case, key) >= params and wasted >= 2**30:
        yield _size(
            *(case, "unwise", "zero3-gathers-all"),
            f"{_said(case, key)}, {case.spec.name} has {params:,}",
            why="parameters are gathered ahead until so many are live: all of them, "
            f"{2 * params / 2**30:.1f} GiB on every rank",
            change=f"{key}: {_round_up(wanted)}, two layers and the head",
            key=f"{ZERO}.{key}",
            edits=(Edit("json", (ZERO, key), _round_up(wanted)),),
        )
    key = "stage3_prefetch_bucket_size"
    if prefetch >= params and 2 * params >= _WORTH_SAYING_BYTES:
        yield _size(
            *(case, "unwise", "prefetch-larger-than-model"),
            f"{_said(case, key)}, {case.spec.name} has {params:,}",
            why="the first layer's turn gathers the whole model at once",
            change=f"{key}: {BUCKET}",
            key=f"{ZERO}.{key}",
            edits=(Edit("json", (ZERO, key), BUCKET),),
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
    where = {"key": f"{ZERO}.{key}"}
    if is_older(case.host, "deepspeed", "0.19.5"):
        yield fault(
            *(case, "wrong", "hpz-version"),
            f"{key} {size} with deepspeed {case.host.versions['deepspeed']}",
            topic="versions",
            file="json",
            why="before 0.19.5 a rank whose share of the second copy begins past a small parameter's end "
            "stops with an IndexError (DeepSpeed's pull request 8210)",
            change='pip install -U "deepspeed>=0.19.5"',
            **where,
        )
    if case.num_ranks % size:
        yield _size(
            *(case, "wrong", "hpz-does-not-divide", f"{key} is {size} on {case.num_ranks} ranks"),
            why="DeepSpeed refuses groups that don't divide the ranks",
            change=f"{key}: {here}, the ranks of a node",
            edits=(Edit("json", (ZERO, key), here),),
            **where,
        )
    elif size > here:
        yield _size(
            *(case, "unwise", "hpz-across-nodes", f"{key} is {size}, a node has {here} ranks"),
            why="backward then gathers across nodes, which the second copy is there to avoid",
            change=f"{key}: {here}",
            edits=(Edit("json", (ZERO, key), here),),
            **where,
        )
    elif case.num_ranks <= case.gpus_per_node:
        second = 2 * case.spec.num_params / size / 2**30
        yield _size(
            *(case, "unwise", "hpz-on-one-node", f"{key} is {shown(case.zero[key])} on one node"),
            why=f"a second copy of the parameters, {second:.2f} GiB a rank, saves traffic between nodes: "
            "there is none",
            change=f"remove {key}, or accel_configs/ds_zero3.yaml",
            edits=(Edit("json", (ZERO, key), REMOVE),),
            **where,
        )


def _offload_speed(case: Case) -> Iterator[Finding]:
    for part in ("offload_optimizer", "offload_param"):
        if case.offload(part) != "none" and case.zero[part].get("pin_memory", True) is False:
            yield _size(
                *(case, "could be faster", "unpinned-offload", f"{part}.pin_memory is false"),
                why="pages that can be swapped out are copied twice, and the GPU waits for each copy",
                change="pin_memory: true, where `ulimit -l` and the RAM allow it",
                key=f"{ZERO}.{part}.pin_memory",
                edits=(Edit("json", (ZERO, part, "pin_memory"), True),),
            )
    on_disk = case.zero_stage == 3 and "nvme" in (
        case.offload("offload_optimizer"),
        case.offload("offload_param"),
    )
    if on_disk and not isinstance(case.files.deepspeed.get("aio"), dict):
        yield _size(
            *(case, "could be faster", "aio-absent", "nvme offload without an aio section"),
            why="DeepSpeed's default is one thread with 8 reads in flight; a disk takes more at once",
            change='"aio": as in ds_configs/zero3_nvme.json',
            key="aio",
            edits=(Edit("json", ("aio",), _AIO),),
        )
