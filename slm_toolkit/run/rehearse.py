"""One process plays rank 0 of N: the real script and engine, with collectives that send nothing."""

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any
from unittest.mock import patch

import torch
from accelerate import Accelerator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE, RunConfig
from slm_toolkit.record.memory_timeline import MemoryTimeline
from slm_toolkit.run.observe.allocations import AllocationTrace, following_modules, timeline_of
from slm_toolkit.run.observe.measure import deepspeed_engine, live_gradients, training_state
from slm_toolkit.run.peers.launch_info import Launch
from slm_toolkit.strategy.strategy import Strategy

NUM_TRACED_STEPS = 2
"the first makes the optimizer's state (and DTensor's caches), the second is like all later ones"


def pretend_ranks(launch: Launch, num_ranks: int) -> Launch:
    """Make this process rank 0 of `num_ranks`, for accelerate and every engine; returns that launch.

    Call it before anything of accelerate. Raises ValueError if several processes were started.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) != 1:
        raise ValueError(
            f"--rehearse {num_ranks} in {os.environ['WORLD_SIZE']} processes: one plays rank 0\n"
            "hint: slm train --rehearse N, or accelerate launch --num_processes 1 --config_file ..."
        )
    strategy = launch.strategy
    if strategy.is_single and num_ranks > 1:
        if strategy.accelerate_config is not None:
            raise ValueError(
                f"--rehearse {num_ranks} with {strategy.path or strategy.name}, which is one process\n"
                "hint: ddp, fsdp_full_shard, ds_zero2, ... have ranks"
            )
        strategy = dataclasses.replace(strategy, name="ddp", engine="ddp")  # started by python alone
    if num_ranks > 1 or not strategy.is_replicated:
        local = min(num_ranks, REHEARSED_RANKS_PER_NODE)
        ranks = {"WORLD_SIZE": num_ranks, "RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local}
        os.environ.update({name: str(value) for name, value in ranks.items()})
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")  # nothing listens there, nothing connects
        torch.distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        if torch.__version__ < (2, 13):
            for name in ("reduce_scatter_tensor", "all_to_all_single"):
                setattr(torch.distributed, name, _filling(getattr(torch.distributed, name)))
    return dataclasses.replace(launch, strategy=strategy, num_processes=num_ranks)


def _filling(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A collective whose output is a part of its input, and so finite, as in torch 2.13's fake process group.

    torch 2.11's leaves the output uninitialized; a NaN in it, read as a gradient, would stop every step.
    """

    @wraps(collective)
    def filling(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        output.view(-1).copy_(input.reshape(-1)[: output.numel()])
        return collective(output, input, *args, **options)

    return filling


def check_stepped(accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises RunEnded if the rehearsal took no optimizer step: its peak is not that of training."""
    if not training_state(accelerator, model, optimizer)["optimizer"]:
        raise RunEnded(
            "the rehearsal took no optimizer step, since its gradients were not finite: memory and seconds "
            "are not those of training\n"
            "hint: --numerics fp16 leaves out its first steps, so more --max_steps; any other, with --seed 1?"
        )


def is_fake(config: RunConfig) -> bool:
    """Whether this run has tensors without memory: a rehearsal without a GPU."""
    return config.rehearse is not None and not torch.cuda.is_available()


def check_fake(config: RunConfig, strategy: Strategy) -> None:
    """Raises ValueError for flags that tensors without memory can't follow, or would measure wrongly."""
    on_gpu = "leave it out; a GPU rehearses it"
    by_estimate = "`slm estimate` knows it; a GPU rehearses it"
    packs = config.packing not in ("auto", "concat")
    where = strategy.path or strategy.name
    cases = (
        (config.torch_compile, "with --torch_compile", "fake tensors can't be compiled", by_estimate),
        (config.fp8 != "none", f"with --fp8 {config.fp8}", "float8 is emulated and takes more", on_gpu),
        (packs, f"with --packing {config.packing}", "fake tokens are no documents", on_gpu),
        (config.peft == "qlora", "with --peft qlora", "fake tensors can't be quantized", by_estimate),
        (strategy.offloads, f"with {where}, which offloads", "they know no host from device", by_estimate),
    )
    for applies, what, why, hint in cases:
        if applies:
            raise ValueError(f"--rehearse {config.rehearse} {what} and no GPU: {why}\nhint: {hint}")


def tensors_of(config: RunConfig) -> AbstractContextManager[None]:
    """The context in which a run's tensors are made and used."""
    return fake_tensors() if is_fake(config) else nullcontext()


def fake_batches(config: RunConfig) -> Iterator[dict[str, torch.Tensor]]:
    """Batches of the right shape, without end."""
    while True:
        shape = (config.per_device_train_batch_size, config.seq_len)
        yield {"input_ids": torch.zeros(shape, dtype=torch.long)}


class TraceWatch:
    """Takes the place of RunWatch in `train_step`, and keeps the allocation trace at the current phase."""

    def __init__(self, trace: AllocationTrace, gradients_reduced: Callable[[], None]) -> None:
        self.trace, self.gradients_reduced = trace, gradients_reduced

    @contextmanager
    def phase(self, name: str) -> Any:
        self.trace.phase, self.trace.module = name, "loss" if name == "backward" else ""
        yield

    def drew(self, batch: dict[str, torch.Tensor]) -> None:
        pass

    def computed(self, batch: dict[str, torch.Tensor]) -> None:
        pass


def trace_memory(
    step: Callable[[TraceWatch], Any],
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    trace: AllocationTrace,
) -> MemoryTimeline:
    """Do NUM_TRACED_STEPS steps under `trace`; returns the timeline of the last."""
    engine = deepspeed_engine(accelerator)

    def at_gradients() -> None:
        trace.adopt(live_gradients(model, engine), "gradients")

    watch = TraceWatch(trace, at_gradients)
    if engine is not None:
        take_step = engine.step

        def step_as_a_phase(*args: Any, **options: Any) -> Any:
            at_gradients()
            with watch.phase("optimizer"):
                return take_step(*args, **options)

        engine.step = step_as_a_phase
    with trace, following_modules(accelerator.unwrap_model(model), trace):
        for _ in range(NUM_TRACED_STEPS):
            first_event = len(trace.events)
            step(watch)
            trace.phase, trace.module = "between", ""
            for part, tensors in training_state(accelerator, model, optimizer).items():
                trace.adopt(tensors, part)
    if engine is not None:
        engine.step = take_step
    return timeline_of(trace.events, first=first_event)


# Real engines run on tensors without memory: patches for torch, accelerate and DeepSpeed.

_COMPARE_RANKS = {
    f"deepspeed.runtime.zero.{name}"
    for name in ("stage3", "partition_parameters", "partitioned_param_coordinator")
}


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Inside, tensors have shape, dtype and storage size, but no memory, and nothing is computed.

    The tensors are fake CPU tensors, on any machine: fake CUDA tensors abort a torch without CUDA, and meta
    tensors take the unfused attention. Checked with torch 2.13, accelerate 1.15, deepspeed 0.19.8 and
    transformers 5.23.
    """
    from torch.distributed.fsdp._fully_shard import _fully_shard
    from transformers import masking_utils

    make_mesh = _fully_shard._init_default_mesh

    def real_mesh(*args: Any, **options: Any) -> Any:  # the mesh holds numbers of ranks, which must be real
        with _disable_current_modes():
            return make_mesh(*args, **options)

    with ExitStack() as stack:
        for name in _COMPARE_RANKS & sys.modules.keys():  # there are no other ranks to compare with
            agree = patch.object(sys.modules[name], "assert_ints_same_as_other_ranks", lambda _: None)
            stack.enter_context(agree)
        for context in (
            _mode(),
            patch.object(_fully_shard, "_init_default_mesh", real_mesh),
            # it reads values; on real tensors of whole sequences it finds nothing either
            patch.object(masking_utils, "find_packed_sequence_indices", lambda *_, **__: None),
            # accelerate tells parameters apart by it
            patch.object(FakeTensor, "data_ptr", _address, create=True),
            patch.object(torch.nn.parallel, "DistributedDataParallel", _FakeDistributedDataParallel),
            patch.object(torch.nn.Module, "to", lambda module, *_, **__: module),  # as `stay_in_place` says
            # a GPU's mask is in bytes; a CPU's own would be in the input's dtype
            patch.object(torch.nn.functional, "dropout", _dropout),
        ):
            stack.enter_context(context)
        yield


def _address(tensor: torch.Tensor) -> int:
    """An address that differs for different memory, and is well aligned."""
    return (tensor.untyped_storage()._cdata << 12) + tensor.storage_offset() * tensor.element_size()


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    if not training or p == 0:
        return tensor
    return torch.native_dropout(tensor, p, True)[0]


@cache
def _mode() -> FakeTensorMode:
    """One mode for the whole process: tensors of two modes don't mix."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def stay_in_place(model: torch.nn.Module) -> None:
    """Turn the model's moves and casts into no-ops: fake parameters can't be swapped for others."""
    model.to = model.bfloat16 = lambda *_, **__: model


class _FakeDistributedDataParallel(DistributedDataParallel):
    """DDP whose C++ reducer never reads a bucket: nothing is broadcast, buckets keep their first order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, init_sync=False)

    def _ddp_init_helper(self, *args: Any, **options: Any) -> None:
        super()._ddp_init_helper(*args, **options)
        self.reducer = _Reducer(self.reducer)


class _Reducer:
    """The C++ reducer, without the rebuilding of its buckets, which would copy them."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False
