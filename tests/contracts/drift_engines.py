"""What we lean on in FSDP2, DDP and accelerate: asked, with drift_zero.py, of engines that play rank 0 of 2.

python tests/contracts/drift_engines.py   # a JSON of what is broken, by row; a process of its own: it makes
                                   # the process group that does nothing
"""

import functools
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

from drift import ROOT, Leaning
from drift_zero import ZERO, small_model

_ENV = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
_ENV |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_MIXED_PRECISION": "no"}


def _fake_group() -> None:
    import torch

    assert torch.distributed.get_backend() == "fake"
    tensor = torch.ones(2)
    torch.distributed.all_reduce(tensor)
    assert tensor.tolist() == [1.0, 1.0], "collectives of the fake group move something"


def _fully_shard() -> None:
    import torch
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.fsdp._fully_shard import _fully_shard as module

    calls = []
    make = module._init_default_mesh

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return make(*arguments, **options)

    module._init_default_mesh = counted
    try:
        with torch.device("cpu"):
            unit = fully_shard(torch.nn.Linear(4, 6), reshard_after_forward=False)
    finally:
        module._init_default_mesh = make
    assert calls, "fully_shard makes its mesh by another function"
    assert isinstance(unit, FSDPModule)
    assert unit._get_fsdp_state()._fsdp_param_group._reshard_after_forward is False
    empty = fully_shard(torch.nn.Sequential(fully_shard(torch.nn.Linear(4, 4))))
    assert empty._get_fsdp_state()._fsdp_param_group is None, "a unit without parameters has a group"


def _offsets() -> None:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh = init_device_mesh("cpu", (2,))
    assert list(mesh.get_coordinate()) == [0]
    found = compute_local_shape_and_global_offset(torch.Size((5, 3)), mesh, [Shard(0)])
    assert [tuple(part) for part in found] == [(3, 3), (0, 0)], found  # 5 rows: 3 and 2
    found = compute_local_shape_and_global_offset(torch.Size((5, 3)), mesh, [Replicate()])
    assert [tuple(part) for part in found] == [(5, 3), (0, 0)], found


def _ddp() -> None:
    import torch

    from slm_toolkit.run.rehearse import _FakeDistributedDataParallel, _Reducer

    model = _FakeDistributedDataParallel(torch.nn.Linear(2, 2))
    assert isinstance(model.reducer, _Reducer), "DDP makes its reducer outside of _ddp_init_helper"
    calls, model.reducer._rebuild_buckets = [], lambda: calls.append(1)
    model(torch.ones(1, 2))
    assert calls, "DDP's forward no longer asks the reducer to rebuild its buckets"
    assert model.bucket_bytes_cap == 25 * 2**20, f"bucket_cap_mb's default is {model.bucket_bytes_cap} bytes"


def _accelerate_without_gpu() -> None:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    _reset()
    PartialState(backend="gloo")
    assert PartialState().distributed_type != DistributedType.MULTI_GPU, (
        "accelerate does it by itself: leave it out"
    )
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    assert PartialState().distributed_type == DistributedType.MULTI_GPU, "states share nothing"
    _reset()
    accelerator = _accelerator({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, is_gpu=True)
    assert accelerator.distributed_type == DistributedType.FSDP, accelerator.distributed_type
    assert accelerator.state.fsdp_plugin.fsdp_version == 2
    assert hasattr(accelerator.state.fsdp_plugin, "cpu_offload")
    assert hasattr(accelerator.state.fsdp_plugin, "mixed_precision_policy")


def _accelerate_deepspeed() -> None:
    from accelerate.utils import DistributedType
    from transformers.integrations import unset_hf_deepspeed_config
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}
    accelerator = _accelerator({**variables, "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false"})
    assert accelerator.distributed_type == DistributedType.DEEPSPEED, accelerator.distributed_type
    plugin = accelerator.deepspeed_plugin
    assert plugin.zero3_init_flag is False
    assert plugin.deepspeed_config["zero_optimization"]["stage"] == 3
    unset_hf_deepspeed_config()
    assert not is_deepspeed_zero3_enabled(), "transformers still takes models apart after the unsetting"


def _accelerate_engine() -> None:
    import torch

    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
    accelerator = _accelerator(variables)
    assert getattr(accelerator, "deepspeed_engine_wrapped", None) is None
    accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 1
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    engine, wrapped = accelerator.prepare(model, optimizer)
    assert accelerator.deepspeed_engine_wrapped.engine is engine
    assert wrapped.optimizer is engine.optimizer, "accelerate's optimizer is not around ZeRO's"


def _accelerator(variables: dict[str, str], *, is_gpu: bool = False) -> Any:
    """As `run/engine/engine.py` makes it on a machine without a GPU."""
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, InitProcessGroupKwargs

    _reset()
    os.environ.update(variables)
    try:
        if is_gpu:
            PartialState(backend="gloo")
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            return Accelerator()
        return Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    finally:
        for name in variables:
            del os.environ[name]


def _reset() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


ENGINES = (
    Leaning(
        "torch: FSDP2's private state",
        (
            "_get_fsdp_state",
            "_fsdp_param_group",
            "_reshard_after_forward",
            "_init_default_mesh",
            "_fully_shard",
        ),
        "prove that FSDP2 shards as the YAML says, prefetch layers, and make its mesh of real numbers",
        "run/engine/engine.py: `probe_engine`; run/rehearse.py: `real_mesh`",
        _fully_shard,
    ),
    Leaning(
        "torch: which part of a DTensor a rank has",
        ("to_local", "device_mesh", "compute_local_shape_and_global_offset", "_utils"),
        "write a shard into a checkpoint as the stretch of the whole that it is",
        "run/engine/training_state.py: `_rows`",
        _offsets,
    ),
    Leaning(
        "torch: DDP's reducer and its default bucket",
        ("_ddp_init_helper", "_rebuild_buckets", "DistributedDataParallel"),
        "rehearse DDP on fake tensors",
        "run/rehearse.py: _FakeDistributedDataParallel; predict/speed/traffic.py: DDP_BUCKET_BYTES",
        _ddp,
    ),
    Leaning(
        "torch: the process group that does nothing",
        ("FakeStore",),
        "play rank 0 of N in a rehearsal",
        "run/rehearse.py: pretend_ranks, by torch's new name of fake_pg",
        _fake_group,
    ),
    Leaning(
        "accelerate: the state that all its objects share",
        ("_shared_state",),
        "run FSDP2 on CPU processes",
        "run/engine/engine.py: start_accelerator, as this accelerate tells that there are devices "
        "to shard over",
        _accelerate_without_gpu,
    ),
    Leaning(
        "accelerate: ZeRO-3 announced to transformers",
        ("unset_hf_deepspeed_config",),
        "build the whole model with the same weights under every strategy",
        "run/engine/engine.py: start_accelerator, what it calls where zero3_init_flag is false",
        _accelerate_deepspeed,
    ),
    Leaning(
        "accelerate: DeepSpeed's engine behind the Accelerator",
        ("deepspeed_engine_wrapped",),
        "reach the engine to count, probe and profile",
        "run/observe/measure.py: deepspeed_engine",
        _accelerate_engine,
    ),
    *ZERO,
)


@functools.cache
def broken_engines() -> dict[str, str]:
    """Of each row that no longer holds, why: all are asked in one process."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__))],
        capture_output=True,
        text=True,
        env={**env, **_ENV},
        timeout=300,
    )
    if done.returncode != 0:
        return {row.thing: done.stderr[-2000:] for row in ENGINES}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    import torch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    broken = {}
    for row in ENGINES:
        try:
            row.check()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            broken[row.thing] = (
                f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            )
    print(json.dumps(broken), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
