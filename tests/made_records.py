"""Records in which every panel of a report finds something, and the mark of tests that need a browser."""

import dataclasses
from pathlib import Path

import pytest
from conftest import made_record

from slm_toolkit.record.files import write_record
from slm_toolkit.record.memory_timeline import PARTS, TIMELINE_FILE, MemoryTimeline, Segment, write_timeline
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.record.step_breakdown import Anatomy
from slm_toolkit.report.charts.files import find_browser

ENGINES = {  # strategy: engine, ZeRO stage, reshard after forward, share of DDP's rate
    "ddp": ("ddp", None, None, 1.0),
    "fsdp_full_shard": ("fsdp2", None, True, 0.8),
    "fsdp_shard_grad_op": ("fsdp2", None, False, 0.9),
    "ds_zero1": ("deepspeed", 1, None, 0.95),
    "ds_zero2": ("deepspeed", 2, None, 0.85),
}
needs_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chrome or Chromium: apt-get install chromium, or set CHROME_PATH"
)


def made(index: int) -> RunRecord:
    """Five strategies, then 1, 2, 4, 8 and 16 GPUs, then batches 1, 2, 4, ...; 500 steps, one in 25 oom."""
    strategy = list(ENGINES)[index % 5]
    engine, stage, reshard, share = ENGINES[strategy]
    world_size, batch = 2 ** (index // 5 % 5), 2 ** (index // 25)
    base = made_record()
    config = {**base.asked["config"], "per_device_train_batch_size": batch}
    is_oom = index % 25 == 24
    seconds = 0.25 * batch / share * (1 + 0.01 * world_size)
    changes = {
        "identity": f"{index:012x}",
        "strategy": strategy,
        "status": "oom" if is_oom else "ok",
        "reason": "CUDA out of memory" if is_oom else None,
        "asked": {**base.asked, "config": config, "num_processes": world_size},
        "engine": engine,
        "zero_stage": stage,
        "reshard_after_forward": reshard,
        "world_size": world_size,
        "tokens_per_step": world_size * batch * 1024,
        "losses": [] if is_oom else [10 / (1 + step / 50) + index / 1e5 for step in range(500)],
        "grad_norms": [],
        "step_seconds": [] if is_oom else [[seconds] * 500] * 2,
        "peak_allocated_bytes": None if is_oom else [int(4e9 + 5e8 * batch)] * world_size,
        "state_bytes": [{"parameters": 3 * 10**8, "master_weights": 6 * 10**8, "optimizer": 12 * 10**8}],
    }
    if index % 4 == 0 and not is_oom:
        parts = (0.030, 0.010, 0.020, 0.015, 0.012, 0.001, 0.005, 0.004)
        changes["anatomy"] = dataclasses.asdict(Anatomy(*parts, num_steps=3, device="cuda"))
    return dataclasses.replace(base, **changes)


def traced(folder: Path, index: int) -> RunRecord:
    """A rehearsal of `made(index)` with a timeline beside it: 8 layers forward, then back."""
    record = made(index)
    config = {**record.asked["config"], "rehearse": record.world_size}
    segments = [Segment("data", "", 10**9, {"parameters": 10**9})]
    for phase, layers in (("forward", range(8)), ("backward", reversed(range(8)))):
        for layer in layers:
            parts = dict.fromkeys(PARTS, 10**8) | {"activations": 5 * 10**8 * (layer + 1)}
            segments.append(Segment(phase, f"layers.{layer}", sum(parts.values()), parts))
    timeline = MemoryTimeline(tuple(segments), {"layers.7": 4 * 10**9}, reserved_bytes=10 * 10**9)
    write_timeline(timeline, folder / TIMELINE_FILE)
    return dataclasses.replace(
        record,
        identity=f"rehearsed{index}",
        gpu=None,
        asked={**record.asked, "config": config},
        losses=[],
        step_seconds=[],
        anatomy=None,
        peak_allocated_bytes=[timeline.peak.num_bytes],
        memory_at_peak=timeline.summary,
    )


def write_records(folder: Path, *, num_records: int) -> None:
    """The last tenth are rehearsals of the first runs."""
    for index in range(num_records):
        own = folder / f"run-{index:03}"
        own.mkdir(parents=True)
        num_measured = num_records - num_records // 10
        write_record(made(index) if index < num_measured else traced(own, index - num_measured), own)
