"""Records in which every panel of a report finds something, and the mark of tests that need a browser."""

import dataclasses
from itertools import product
from pathlib import Path

import pytest
from browser import find_browser
from conftest import made_record

from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.record.files import write_record
from slm_toolkit.record.memory_parts import PARTS
from slm_toolkit.record.run_record import RunRecord, model_facts
from slm_toolkit.record.step_breakdown import Anatomy

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
    anatomy = None
    if index % 4 == 0 and not is_oom:
        parts = (0.030, 0.010, 0.020, 0.015, 0.012, 0.001, 0.005, 0.004)
        anatomy = dataclasses.asdict(Anatomy(*parts, num_steps=3, device="cuda"))
    return made_record(
        identity=f"{index:012x}",
        strategy=strategy,
        status="oom" if is_oom else "ok",
        reason="CUDA out of memory" if is_oom else None,
        asked={**base.asked, "config": config, "num_processes": world_size},
        engine=engine,
        zero_stage=stage,
        reshard_after_forward=reshard,
        world_size=world_size,
        tokens_per_step=world_size * batch * 1024,
        losses=[] if is_oom else [10 / (1 + step / 50) + index / 1e5 for step in range(500)],
        grad_norms=[],
        step_seconds=[] if is_oom else [[seconds] * 500] * 2,
        peak_allocated_bytes=None if is_oom else [int(4e9 + 5e8 * batch)] * world_size,
        state_bytes=[{"parameters": 3 * 10**8, "master_weights": 6 * 10**8, "optimizer": 12 * 10**8}],
        anatomy=anatomy,
    )


def traced(index: int) -> RunRecord:
    """A rehearsal of `made(index)` with its traced peak."""
    record = made(index)
    config = {**record.asked["config"], "rehearse": record.world_size}
    parts = dict.fromkeys(PARTS, 10**8) | {"activations": 4 * 10**9}
    peak = sum(parts.values())
    return dataclasses.replace(
        record,
        identity=f"rehearsed{index}",
        gpu=None,
        asked={**record.asked, "config": config},
        losses=[],
        step_seconds=[],
        anatomy=None,
        peak_allocated_bytes=[peak],
        memory_at_peak={"phase": "backward", "module": "layers.7", "num_bytes": peak, "parts": parts},
    )


def write_records(folder: Path, *, num_records: int) -> None:
    """The last tenth are rehearsals of the first runs."""
    for index in range(num_records):
        own = folder / f"run-{index:03}"
        own.mkdir(parents=True)
        num_measured = num_records - num_records // 10
        write_record(made(index) if index < num_measured else traced(index - num_measured), own)


def write_scaled_records(folder: Path) -> None:
    """Four sizes of models, on 1, 8 and 16 GPUs (two nodes), with DDP and ZeRO-3: 24 runs."""
    models, sizes, engines = (
        ("slm-100m", "slm-500m", "slm-1b", "slm-2b"),
        (1, 8, 16),
        (("ddp", None), ("deepspeed", 3)),
    )
    for number, (model, num_gpus, (engine, stage)) in enumerate(product(models, sizes, engines)):
        base, spec, tokens = made(0), PRESETS[model], 16 * 1024
        seconds = spec.num_params / 1e9 + number / 1e3  # a utilisation of about 12 %
        config = {**base.asked["config"], "model": model, "per_device_train_batch_size": 16}
        record = dataclasses.replace(
            base,
            identity=f"scaled{number:06x}",
            strategy="ddp" if engine == "ddp" else "ds_zero3",
            engine=engine,
            zero_stage=stage,
            model=model_facts(spec),
            asked={**base.asked, "config": config, "num_processes": num_gpus},
            world_size=num_gpus,
            num_machines=2 if num_gpus == 16 else 1,
            tokens_per_step=num_gpus * tokens,
            losses=[10 / (1 + step / 50) for step in range(100)],
            step_seconds=[[seconds] * 100] * 2,
            peak_allocated_bytes=[int(4e9 + 16 * spec.num_params)] * num_gpus,
            anatomy=None,
        )
        write_record(record, folder / f"run-{number:03}")
