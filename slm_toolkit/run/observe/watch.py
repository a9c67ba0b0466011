"""Combine one rank's measurements of a training run into fields of its record."""

import dataclasses
import resource
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator

from slm_toolkit.hardware.gpus import num_cores
from slm_toolkit.record.steady_rate import block_rates, num_warmup_steps
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.observe.machine_load import GpuBefore, GpuWatch, HostWatch, allocator_retries
from slm_toolkit.run.observe.measure import (
    GradientCounter,
    StepClock,
    deepspeed_engine,
    num_compiled_graphs,
    reset_peak_memory,
    tensor_bytes,
    training_state,
)
from slm_toolkit.run.observe.probe import NumericsProbe, optimizer_settings
from slm_toolkit.run.peers.step_exchange import gather_to_all

MOST_PROBED_STEPS = 5
"limit for a model that compiles again and again"
_MOST_STEADY_STEPS = 2000
"steps of the live rate: older ones are left out, so that showing it takes no time in a long run"
_KEPT_STEPS = 4
"a bad step is noticed up to two steps later: see `StepExchange`"


class RunWatch:
    """Clock, probe and counters of a rank. Put `with watch.step()` around a step and `watch.phase` inside."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_recorder: RecordedLoss,
        *,
        gpu: GpuBefore,
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.loss_recorder = loss_recorder
        self.clock = StepClock(accelerator.device)
        self.gradients = GradientCounter(accelerator, model)
        self.numerics: dict[str, Any] | None = None
        "the result of the last probed step, the same on all ranks"
        self.num_probed_steps = 0
        self._probe_next = True
        self.num_tokens_drawn = 0
        self.drawn: deque[list[torch.Tensor]] = deque(maxlen=_KEPT_STEPS)
        "token ids of the last steps, by micro-step"
        self.num_padding: torch.Tensor | int = 0
        self.num_graphs_compiled: list[int] = []
        self.phase = self.clock.phase
        self.gpu_before, self.gpu, self.host = gpu, GpuWatch(gpu.handle), HostWatch()
        reset_peak_memory(accelerator.device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure one optimizer step, and probe the first one.

        While torch.compile still compiles, later steps are probed too, because a step that traces does not
        run the compiled kernels. So are those after one that overflowed in fp16: it updated nothing.
        """
        self.drawn.append([])
        probing = self._probe_next
        if not probing and len(self.num_graphs_compiled) == self.num_probed_steps:
            reset_peak_memory(self.accelerator.device)  # compiling and probing took more memory than training
        if probing and self.gradients.overflowed:  # count again, those of this step
            self.gradients = GradientCounter(self.accelerator, self.model)
        probe = NumericsProbe(self.accelerator, self.model, self.optimizer) if probing else nullcontext()
        graphs = num_compiled_graphs()
        with probe, self.clock.step():
            yield
        compiled = num_compiled_graphs() - graphs
        self.num_graphs_compiled.append(compiled)
        self.gpu.sample()
        self.host.sample()
        if probing:
            self.num_probed_steps += 1
            self.numerics = dataclasses.asdict(probe.result(self.gradients))
            again = max(gather_to_all(compiled)) > 0 or self.gradients.overflowed
            self._probe_next = again and self.num_probed_steps < MOST_PROBED_STEPS
            self.clock.pause()

    def gradients_reduced(self) -> None:
        self.gradients.count()

    def drew(self, batch: dict[str, torch.Tensor]) -> None:
        """Count the tokens of a batch that was just taken from the data."""
        self.drawn[-1].append(batch["input_ids"])
        self.num_tokens_drawn += batch["input_ids"].numel()
        if "padding" in batch:
            self.num_padding = self.num_padding + batch["padding"].sum()

    def num_tokens(self) -> int:
        """Return this rank's drawn tokens, without padding. Waits for the device if there is padding."""
        return self.num_tokens_drawn - int(self.num_padding)

    def steady_tokens_per_second(self) -> float | None:
        """Return the rate that a report would show now, by this rank's clock; None while warming up.

        That is the median of blocks of ten steps after the warm-up, of all ranks, without padding.
        """
        seconds = self.clock.seconds
        first = max(0, len(seconds) - _MOST_STEADY_STEPS)
        seconds = seconds[first:]
        start = num_warmup_steps(
            seconds,
            num_probed_steps=max(0, self.num_probed_steps - first),
            num_graphs_compiled=self.num_graphs_compiled[first:],
        )
        if start >= len(seconds):
            return None
        tokens_per_step = self.num_tokens() * self.accelerator.num_processes / len(self.num_graphs_compiled)
        return median(block_rates(seconds[start:], tokens_per_step))

    def observed(self) -> dict[str, Any]:
        """Return the record's fields: of all ranks, but for the load of the host. Every rank must call it."""
        device = self.accelerator.device
        phases = self.clock.phase_seconds()  # waits for the device
        engine = deepspeed_engine(self.accelerator)
        if engine is not None:  # its step is part of backward
            phases = {name: seconds for name, seconds in phases.items() if name == "data"}
        state = training_state(self.accelerator, self.model, self.optimizer)
        state_bytes = {part: tensor_bytes(tensors) for part, tensors in state.items()}
        own = {
            "step_seconds": self.clock.seconds,
            "phase_seconds": phases,
            "num_graphs_compiled": self.num_graphs_compiled,
            "state_bytes": {"gradients": self.gradients.num_bytes, **state_bytes},
            "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # counted in KiB
            "drawn": self.num_tokens_drawn,
            "in_loss": self.loss_recorder.num_tokens,
            "padding": int(self.num_padding),
        }
        if device.type == "cuda":
            own |= {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(device),
                "gpu_watch": {
                    "num_processes_before": self.gpu_before.num_processes,
                    "used_bytes_before": self.gpu_before.used_bytes,
                    **self.gpu.facts(),
                    "allocator": allocator_retries(device),
                },
            }
        ranks = gather_to_all(own)
        by_rank = {name: [rank[name] for rank in ranks] for name in ranks[0]}
        drawn, in_loss, padding = (sum(by_rank.pop(name)) for name in ("drawn", "in_loss", "padding"))
        settings = optimizer_settings(self.optimizer, engine)
        observed = by_rank | {
            "numerics": self.numerics and {**self.numerics, "optimizer_settings_at_end": settings},
            "parameter_grad_norms": {} if self.gradients.overflowed else self.gradients.norms,
            "num_probed_steps": self.num_probed_steps,
            "num_graphs_compiled": list(map(max, zip(*by_rank["num_graphs_compiled"], strict=True))),
            "tokens_counted": {"drawn": drawn, "in_loss": in_loss},
            "num_padding_tokens": padding,
            **self.host.facts(),
            "num_cores": num_cores(),
        }
        if not self.num_graphs_compiled:  # without a step there are no gradients to count
            observed["state_bytes"] = []
        return observed
