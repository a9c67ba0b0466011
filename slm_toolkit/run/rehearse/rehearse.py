"""One process plays rank 0 of N: the real script and engine, with collectives that send nothing."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from accelerate import Accelerator
from torch.testing._internal.distributed.fake_pg import FakeStore

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE, RunConfig
from slm_toolkit.record.memory_timeline import MemoryTimeline
from slm_toolkit.run.observe.allocations import AllocationTrace, following_modules, timeline_of
from slm_toolkit.run.observe.measure import deepspeed_engine, live_gradients, training_state
from slm_toolkit.run.peers.launch_info import Launch
from slm_toolkit.run.rehearse.fake import fake_tensors
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
