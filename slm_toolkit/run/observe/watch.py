"""Everything that is observed while a run trains, put together as fields of its record."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from slm_toolkit.hardware.gpus import num_cores
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.observe.dataset_losses import DatasetLosses
from slm_toolkit.run.observe.gpu import GpuState, GpuWatch, allocator_retries, gpu_state, open_gpu
from slm_toolkit.run.observe.host import HostWatch
from slm_toolkit.run.observe.live_settings import optimizer_settings
from slm_toolkit.run.observe.measure import (
    GradientCounter,
    StepClock,
    deepspeed_engine,
    num_compiled_graphs,
    peak_memory,
    reset_peak_memory,
    state_bytes,
)
from slm_toolkit.run.observe.probe import NumericsProbe
from slm_toolkit.run.peers.step_exchange import gather_to_all

MOST_PROBED_STEPS = 5
"however often a model compiles again"


@dataclass(frozen=True)
class GpuBefore:
    """NVML's handle of this rank's GPU, and who held the GPU before the run opened it."""

    handle: Any | None
    state: GpuState


def look_at_gpu(index: int) -> GpuBefore:
    """To be called before this process has a context on `cuda:index`; all unknown without a GPU or NVML."""
    handle = None
    if torch.cuda.is_available():
        handle = open_gpu(str(torch.cuda.get_device_properties(index).uuid))
    return GpuBefore(handle, gpu_state(handle) if handle is not None else GpuState(None, None))


class RunWatch:
    """Clock, probe and counters of one rank: `with watch.step()` around each step, `watch.phase` inside."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_recorder: RecordedLoss,
        *,
        gpu: GpuBefore,
        dataset_names: tuple[str, ...] = (),
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.loss_recorder = loss_recorder
        self.clock = StepClock(accelerator.device)
        self.gradients = GradientCounter(accelerator, model)
        self.numerics: dict[str, Any] | None = None
        "what the last probed step's probe saw, the same on all ranks"
        self.num_probed_steps = 0
        self._probe_next = True
        self.num_tokens_drawn = 0
        self.num_padding: torch.Tensor | int = 0
        self._before_step: tuple[int, torch.Tensor | int] = (0, 0)
        "num_tokens_drawn and num_padding"
        several = len(dataset_names) > 1
        self.dataset_losses = DatasetLosses(dataset_names, accelerator.device) if several else None
        self.num_graphs_compiled: list[int] = []
        self.phase = self.clock.phase
        self.gradients_reduced = self.gradients.count
        self.gpu_before, self.gpu, self.host = gpu.state, GpuWatch(gpu.handle), HostWatch()
        reset_peak_memory(accelerator.device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step; the first is probed too, and the next while they compile: tracing is no run."""
        probing = self._probe_next
        if not probing and len(self.num_graphs_compiled) == self.num_probed_steps:
            reset_peak_memory(self.accelerator.device)  # compiling and probing took more than training does
        probe = NumericsProbe(self.accelerator, self.model, self.optimizer) if probing else nullcontext()
        graphs = num_compiled_graphs()
        self._before_step = self.num_tokens_drawn, self.num_padding
        with probe, self.clock.step():
            yield
        compiled = num_compiled_graphs() - graphs
        self.num_graphs_compiled.append(compiled)
        self.gpu.sample()
        self.host.sample()
        if self.dataset_losses is not None:
            self.dataset_losses.end_step()
        if probing:
            self.num_probed_steps += 1
            self.numerics = dataclasses.asdict(probe.result(self.gradients))
            self._probe_next = max(gather_to_all(compiled)) > 0 and self.num_probed_steps < MOST_PROBED_STEPS
            self.clock.pause()

    def drew(self, batch: dict[str, torch.Tensor]) -> None:
        """Count the tokens of a batch that came from the data."""
        self.num_tokens_drawn += batch["input_ids"].numel()
        if "padding" in batch:
            self.num_padding = self.num_padding + batch["padding"].sum()

    def num_tokens(self) -> int:
        """What this rank drew so far, without padding; waits for the device where there is some."""
        return self.num_tokens_drawn - int(self.num_padding)

    def last_tokens_per_second(self) -> float:
        """Of the last step, over all ranks, without padding; every rank must call it."""
        drawn, padding = self._before_step
        ranks = gather_to_all((self.num_tokens() - drawn + int(padding), self.clock.last_seconds))
        return sum(num_tokens for num_tokens, _ in ranks) / max(seconds for _, seconds in ranks)

    def computed(self, batch: dict[str, torch.Tensor]) -> None:
        """Note what the loss of a batch's forward was, for each of several datasets."""
        if self.dataset_losses is not None:
            self.dataset_losses.add(batch, self.loss_recorder.last_of_tokens)

    def observed(self) -> dict[str, Any]:
        """The record's fields, the same on all ranks; every rank must call it."""
        device = self.accelerator.device
        on_gpu = device.type == "cuda"
        phases = self.clock.phase_seconds()  # waits for the device
        self.gpu.sample_last_again()
        if deepspeed_engine(self.accelerator) is not None:  # its step is part of backward
            phases = {name: seconds for name, seconds in phases.items() if name == "data"}
        mine = {
            "peaks": peak_memory(device),
            "seconds": self.clock.seconds,
            "phases": phases,
            "state": state_bytes(self.accelerator, self.model, self.optimizer, self.gradients.num_bytes),
            "graphs": self.num_graphs_compiled,
            "gpu": {
                "num_processes_before": self.gpu_before.num_processes,
                "used_bytes_before": self.gpu_before.used_bytes,
                "energy_joules": self.gpu.energy_joules,
                "throttle_reasons": self.gpu.throttle_reasons,
                "clock_mhz": self.gpu.clock_mhz,
                "utilization": self.gpu.utilization,
                "allocator": allocator_retries(device),
            },
            "host": self.host.other_busy_cores(),
            "drawn": self.num_tokens_drawn,
            "in_loss": self.loss_recorder.num_tokens,
            "padding": int(self.num_padding),
            "host_ram": self.host.ram(),
        }
        ranks = gather_to_all(mine)
        settings = optimizer_settings(self.optimizer, deepspeed_engine(self.accelerator))
        return {
            "numerics": self.numerics and {**self.numerics, "optimizer_settings_at_end": settings},
            "parameter_grad_norms": self.gradients.norms,
            "num_probed_steps": self.num_probed_steps,
            "step_seconds": [rank["seconds"] for rank in ranks],
            "phase_seconds": [rank["phases"] for rank in ranks],
            "num_graphs_compiled": [
                max(graphs) for graphs in zip(*(rank["graphs"] for rank in ranks), strict=True)
            ],
            "tokens_counted": {name: sum(rank[name] for rank in ranks) for name in ("drawn", "in_loss")},
            "num_padding_tokens": sum(rank["padding"] for rank in ranks),
            "losses_by_dataset": self.dataset_losses.observed(self.accelerator)
            if self.dataset_losses is not None
            else {},
            "host_ram": ranks[0]["host_ram"],
            "gpu_watch": [rank["gpu"] for rank in ranks] if on_gpu else [],
            "other_busy_cores": ranks[0]["host"],
            "num_cores": num_cores(),
            # without a step there were no gradients to count
            "state_bytes": [rank["state"] for rank in ranks if rank["seconds"]],
            "peak_allocated_bytes": [rank["peaks"]["allocated"] for rank in ranks] if on_gpu else None,
            "peak_reserved_bytes": [rank["peaks"]["reserved"] for rank in ranks] if on_gpu else None,
            "peak_rss_bytes": [rank["peaks"]["rss"] for rank in ranks],
        }
