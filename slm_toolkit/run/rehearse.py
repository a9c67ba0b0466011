"""Rehearsals: one process plays rank 0 of N with the real script and engine, but sends nothing.

`rehearse` and `follow_memory` are programs of their own around the script's `train_step`.
"""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial, wraps
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE, RunConfig
from slm_toolkit.hardware.gpus import num_cores
from slm_toolkit.run.observe.allocations import AllocationTrace, following_modules, peak_of
from slm_toolkit.run.observe.measure import (
    deepspeed_engine,
    each_step_in,
    live_gradients,
    training_state,
)
from slm_toolkit.run.peers.launch_info import Launch
from slm_toolkit.run.run import Run

NUM_TRACED_STEPS = 2
"the first step creates the optimizer's state (and DTensor's caches); the second is like all later steps"


def pretend_ranks(launch: Launch, num_ranks: int) -> Launch:
    """Make accelerate and every engine see this process as rank 0 of `num_ranks`. Return such a launch.

    Call it before any call to accelerate. Raises ValueError if several processes were started.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) != 1:
        raise ValueError(
            f"--rehearse {num_ranks} in {os.environ['WORLD_SIZE']} processes: a rehearsal is one process\n"
            "hint: slm train --rehearse N, or accelerate launch --num_processes 1 --config_file ..."
        )
    strategy = launch.strategy
    if strategy.is_single and num_ranks > 1:
        if strategy.accelerate_config is not None:
            raise ValueError(
                f"--rehearse {num_ranks} with {strategy.path or strategy.name}, which has only one rank\n"
                "hint: choose a strategy of several ranks: ddp, fsdp_full_shard, ds_zero2, ..."
            )
        strategy = dataclasses.replace(strategy, name="ddp", engine="ddp")  # no YAML: started by python
    if num_ranks > 1 or not strategy.is_replicated:
        local = min(num_ranks, REHEARSED_RANKS_PER_NODE)
        ranks = {"WORLD_SIZE": num_ranks, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")  # required, but nothing listens or connects there
        torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        if torch.__version__ < (2, 13):
            for name in ("reduce_scatter_tensor", "all_to_all_single"):
                setattr(torch.distributed, name, _filling(getattr(torch.distributed, name)))
    return dataclasses.replace(launch, strategy=strategy, num_processes=num_ranks)


def _filling(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that copies a part of its input to its output, like torch 2.13's fake group.

    torch 2.11's fake group leaves the output uninitialized. A NaN there would count as a bad gradient, and no
    step would update the weights.
    """

    @wraps(collective)
    def filling(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        output.view(-1).copy_(input.reshape(-1)[: output.numel()])
        return collective(output, input, *args, **options)

    return filling


def check_stepped(run: Run) -> None:
    """Raise RunEnded if the rehearsal took no optimizer step: its peak memory is not that of training."""
    if not training_state(run.accelerator, run.model, run.optimizer)["optimizer"]:
        raise RunEnded(
            "the rehearsal took no optimizer step, because its gradients were not finite: memory and seconds "
            "are not those of training\n"
            "hint: --numerics fp16 skips its first steps, so raise --max_steps; otherwise try --seed 1"
        )


def is_fake(config: RunConfig) -> bool:
    """Return True if this run uses fake tensors: a rehearsal without a GPU."""
    return config.rehearse is not None and not torch.cuda.is_available()


def tensors_of(config: RunConfig) -> AbstractContextManager[None]:
    """Return the context in which a run must create and use its tensors."""
    return fake_tensors() if is_fake(config) else nullcontext()


def rehearse(run: Run, train_step: Callable[..., Any]) -> dict[str, Any]:
    """Run steps on fake tensors and trace every allocation. Return the record's fields."""
    shape = (run.config.per_device_train_batch_size, run.config.seq_len)
    with tensors_of(run.config):
        batches = ({"input_ids": torch.zeros(shape, dtype=torch.long)} for _ in count())
        peak = follow_memory(run, partial(train_step, run, batches))
    print(
        f"rank 0 of {run.config.rehearse}: peak {peak['num_bytes'] / 2**30:.2f} GiB "
        f"in {peak['phase']}, {peak['module'] or 'optimizer'}; slm report {run.run_dir}",
        file=sys.stderr,
    )
    return {
        "memory_at_peak": peak,
        "peak_allocated_bytes": [peak["num_bytes"]],
        "num_cores": num_cores(),
    }


class TraceWatch:
    """Replaces RunWatch in `train_step`: sets the current phase of the allocation trace."""

    def __init__(self, trace: AllocationTrace, gradients_reduced: Callable[[], None]) -> None:
        self.trace, self.gradients_reduced = trace, gradients_reduced

    @contextmanager
    def phase(self, name: str) -> Any:
        self.trace.phase, self.trace.module = name, "loss" if name == "backward" else ""
        yield

    def drew(self, batch: dict[str, torch.Tensor]) -> None:
        pass


def follow_memory(run: Run, step: Callable[[TraceWatch], object]) -> dict[str, Any]:
    """Trace the allocations of NUM_TRACED_STEPS steps. Return the memory at the peak of the last one."""
    accelerator, trace = run.accelerator, run.trace
    engine = deepspeed_engine(accelerator)

    def at_gradients() -> None:
        trace.adopt(live_gradients(run.model, engine), "gradients")

    def optimizer_phase() -> AbstractContextManager[None]:
        at_gradients()
        return watch.phase("optimizer")

    watch = TraceWatch(trace, at_gradients)
    modules = following_modules(accelerator.unwrap_model(run.model), trace)
    with each_step_in(optimizer_phase, engine), trace, modules:
        for _ in range(NUM_TRACED_STEPS):
            first_event = len(trace.events)
            step(watch)
            trace.phase, trace.module = "between", ""
            for part, tensors in training_state(accelerator, run.model, run.optimizer).items():
                trace.adopt(tensors, part)
    return peak_of(trace.events, first=first_event)


# Patches for torch, accelerate and DeepSpeed, so that the real engines run on fake tensors.

_attend = torch.nn.functional.scaled_dot_product_attention
_COMPARE_RANKS = {
    f"deepspeed.runtime.zero.{name}"
    for name in ("stage3", "partition_parameters", "partitioned_param_coordinator")
}


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside this context, tensors have shape, dtype and storage size but no memory; nothing is computed.

    They are fake CPU tensors on any machine: fake CUDA tensors abort a torch built without CUDA, and meta
    tensors use the unfused attention. Checked with torch 2.13, accelerate 1.15, deepspeed 0.19.8 and
    transformers 5.23.
    """
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from transformers import masking_utils

    make_mesh = _fully_shard._init_default_mesh

    def real_mesh(*args: Any, **options: Any) -> Any:  # the mesh reads rank numbers from real tensors
        with _disable_current_modes():
            return make_mesh(*args, **options)

    with ExitStack() as stack:
        for name in _COMPARE_RANKS & sys.modules.keys():  # there are no other ranks to compare with
            agree = patch.object(sys.modules[name], "assert_ints_same_as_other_ranks", lambda _: None)
            stack.enter_context(agree)
        for context in (
            _mode(),
            patch.object(_fully_shard, "_init_default_mesh", real_mesh),
            # this function reads values of tensors; for whole sequences it returns None anyway
            patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
            # accelerate identifies parameters by their address
            patch.object(FakeTensor, "data_ptr", _address, create=True),
            patch.object(torch.nn.parallel, "DistributedDataParallel", _FakeDistributedDataParallel),
            patch.object(torch.nn.Module, "to", lambda module, *_, **__: module),  # see `stay_in_place`
            # a GPU's dropout mask takes 1 byte per element; the CPU's has the input's dtype
            patch.object(torch.nn.functional, "dropout", _dropout),
            patch.object(torch.nn.functional, "scaled_dot_product_attention", _attention_on_gpu),
        ):
            stack.enter_context(context)
        yield


def _address(tensor: torch.Tensor) -> int:
    """Return an aligned address that differs between tensors of different memory."""
    return (tensor.untyped_storage()._cdata << 12) + tensor.storage_offset() * tensor.element_size()


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return tensor
    return torch.native_dropout(tensor, p, True)[0]


def _attention_on_gpu(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Attend as SDPA does on a GPU in 16 bits: FlashAttention needs heads whose width is a multiple of 8."""
    width, dtype = query.shape[-1], query.dtype
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
    if dtype == torch.float32 or width % 8 == 0:
        return _attend(query, key, value, *args, **options)
    padded = (torch.nn.functional.pad(tensor.to(dtype), (0, -width % 8)) for tensor in (query, key, value))
    options["scale"] = options.get("scale") or width**-0.5
    return _attend(*padded, *args, **options)[..., :width]


@cache
def _mode() -> FakeTensorMode:
    """Return the process's only fake mode: tensors of two modes can't be combined."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def stay_in_place(model: torch.nn.Module) -> None:
    """Make the model's moves and casts no-ops: fake parameters can't be replaced."""
    model.to = model.bfloat16 = lambda *_, **__: model


class _FakeDistributedDataParallel(DistributedDataParallel):
    """DDP that neither broadcasts weights nor rebuilds buckets: its C++ reducer would read the tensors."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, init_sync=False)

    def _ddp_init_helper(self, *args: Any, **options: Any) -> None:
        super()._ddp_init_helper(*args, **options)
        self.reducer = _Reducer(self.reducer)


class _Reducer:
    """Wraps the C++ reducer, but never rebuilds its buckets: that would copy them."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
