"""Recorder: watches the training of a user's own script, which an Accelerator or a Trainer drives.

`run_script.py` makes it. `slm report runs` then shows the run, as it shows runs of `slm compare`. What a
recorder can't see is unknown.
"""

import math
import os
import re
import shlex
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from slm_toolkit.model.from_config import spec_from_config
from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import (
    RECORD_FILE,
    RUN_DIR_VARIABLE,
    RunRecord,
    finite,
    identity_of,
    installed_versions,
    model_facts,
    script_asked,
)
from slm_toolkit.run.checkpoint.checkpoint import fingerprint
from slm_toolkit.run.engine.engine import RunningEngine, probe_engine
from slm_toolkit.run.engine.training_state import num_elements, parameter_name
from slm_toolkit.run.observe.machine_load import look_at_gpu
from slm_toolkit.run.observe.probe import tokens_of
from slm_toolkit.run.observe.progress import write_state
from slm_toolkit.run.observe.watch import RunWatch
from slm_toolkit.run.peers.failure import seconds_since_start
from slm_toolkit.run.peers.launch_info import find_launch
from slm_toolkit.run.peers.machines import num_machines
from slm_toolkit.run.peers.step_exchange import gather_to_all

_SECONDS_BETWEEN_SHOWN_STEPS = 0.5
_LOSSES_JOINED = 256
"the losses of so many steps become one tensor"


class Recorder:
    """Watch the steps of a loop, and write their record when the training ends.

    It changes no number of the training. The first step is probed, hence slow, and not timed.
    """

    current: ClassVar["Recorder | None"] = None
    "the recorder of the training that runs"
    num_steps_of_all = 0
    "steps that this process has recorded"
    why_none = (
        "no Accelerator prepared a model and an optimizer\n"
        "hint: prepare both with one Accelerator, or use a Hugging Face Trainer"
    )
    "why this process has recorded no step, with a hint"

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        """Begin to watch. All ranks must call it, with what `accelerator.prepare` returned."""
        if Recorder.current is not None:  # of a training that this one replaces
            Recorder.current.stop()
        self._accelerator, self._model = accelerator, model
        self._launch = find_launch()
        self._asked = script_asked(self._launch.strategy, self._launch.num_processes, sys.argv)
        self._fingerprint = _fingerprint(model)
        no_loss_function = SimpleNamespace(num_tokens=0)  # the loss's tokens are unknown
        gpu = look_at_gpu(accelerator.local_process_index)
        self._watch = RunWatch(accelerator, model, optimizer, no_loss_function, gpu=gpu)
        self._first_batch: dict[str, int] | None = None
        self.num_steps = 0
        self._shown_at = 0.0
        self._micro_losses: list[torch.Tensor] = []
        self._losses: list[torch.Tensor] = []
        "of all steps, on the device"
        self._norm: float | torch.Tensor | None = None
        "the gradient norm of this step; None if the script does not measure it"
        self._max_norm: float | None = None
        "the threshold of the script's clipping; None if it does not clip by the Accelerator"
        self._norms: list[float | torch.Tensor | None] = []
        self._has_evaluated = False
        "True if the model ran without gradients since the step began"
        self._has_updated = False
        "True if the optimizer's step ran since the last step's end"
        inner = optimizer
        while hasattr(inner, "optimizer"):  # wrappers of accelerate and DeepSpeed
            inner = inner.optimizer
        self._hooks = [
            model.register_forward_pre_hook(self._count_tokens, with_kwargs=True),
            inner.register_step_pre_hook(lambda *_: self._watch.gradients_reduced()),
            inner.register_step_post_hook(self._saw_update),
        ]
        self._keep_norms()
        self._close_with_training()
        self._begin_step()
        Recorder.current = self
        Recorder.why_none = (
            "no step was seen\nhint: call accelerator.backward(loss), then step() of the optimizer that the "
            "Accelerator prepared"
        )

    def note_loss(self, loss: torch.Tensor) -> None:
        """Note this rank's loss of a micro-step. A step's loss is the mean over micro-steps and ranks."""
        if Recorder.current is self:
            self._micro_losses.append(loss.detach().float().mean())

    def end_step_if_due(self) -> None:
        """End the step if the optimizer has updated the weights, or skipped that for fp16's loss scaler."""
        skipped = self._accelerator.optimizer_step_was_skipped
        if self._micro_losses and self._accelerator.sync_gradients and (self._has_updated or skipped):
            self.end_step(torch.stack(self._micro_losses).mean())

    def end_step(self, loss: torch.Tensor) -> None:
        """End a step with this rank's loss of the whole step."""
        if Recorder.current is not self:
            return
        self._losses.append(loss.detach().float().view(1))
        if len(self._losses) == _LOSSES_JOINED:
            self._losses = [torch.cat(self._losses)]
        self._norms.append(self._norm)
        self._micro_losses, self._norm, self._has_updated = [], None, False
        self.num_steps += 1
        Recorder.num_steps_of_all += 1
        self._show_progress()
        self._step.__exit__(None, None, None)
        self._begin_step()

    def pause(self) -> None:
        """Leave the time since the last step, such as an evaluation's, out of the next step's time."""
        if Recorder.current is self:  # a Trainer may evaluate after its training
            self._watch.clock.pause()

    def close(self) -> None:
        """Write the record of the steps until now. All ranks must call it."""
        if Recorder.current is not self:
            return
        record = self._record() if self.num_steps else None
        self.stop()
        if record is None or not self._accelerator.is_main_process:
            return
        planned = os.environ.get(RUN_DIR_VARIABLE)
        first = Path(planned or Path("runs", record.run_name))
        repeats = (first.with_name(f"{first.name}-r{number}") for number in count(2))
        folder = next(folder for folder in chain([first], repeats) if not (folder / RECORD_FILE).exists())
        if planned and folder != first:
            print("note: the script's first training is recorded, not this one", file=sys.stderr)
        else:
            print(f"record: {write_record(record, folder)}", file=sys.stderr)

    def stop(self) -> None:
        """Stop watching, without a record, and let go of the model."""
        if Recorder.current is not self:
            return
        Recorder.current = None
        self._step.__exit__(GeneratorExit, GeneratorExit(), None)  # removes the probe's hooks
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._model, self._watch = [], None, None

    def _begin_step(self) -> None:
        self._step = self._watch.step()
        self._step.__enter__()

    def _close_with_training(self) -> None:
        end_training = self._accelerator.end_training

        def close_and_end() -> None:
            self.close()
            end_training()

        self._accelerator.end_training = close_and_end

    def _count_tokens(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            self._has_evaluated = True
            return
        if self._has_evaluated:
            self.pause()
            self._has_evaluated = False
        if (tokens := tokens_of(args, kwargs)) is None:
            return
        if self._first_batch is None:
            self._first_batch = {"num_sequences": tokens.shape[0], "seq_len": tokens.shape[-1]}
        batch = {"input_ids": tokens}
        if isinstance(mask := kwargs.get("attention_mask"), torch.Tensor) and mask.shape == tokens.shape:
            batch["padding"] = mask == 0
        self._watch.drew(batch)

    def _saw_update(self, *arguments: Any) -> None:
        self._has_updated = True

    def _keep_norms(self) -> None:
        """Keep the norms that the script's own clipping measures."""
        clip = self._accelerator.clip_grad_norm_

        def clip_and_keep(parameters: Any, max_norm: float, **options: Any) -> Any:
            norm = clip(parameters, max_norm, **options)
            self._max_norm = float(max_norm)
            if norm is not None and self._accelerator.sync_gradients:
                self._norm = norm.detach() if isinstance(norm, torch.Tensor) else norm
            return norm

        self._accelerator.clip_grad_norm_ = clip_and_keep

    def _show_progress(self) -> None:
        """Tell `slm compare` the number of steps, twice a second. A loss or a rate would wait for the GPU."""
        is_shown = RUN_DIR_VARIABLE in os.environ and self._accelerator.is_main_process
        if not is_shown or time.monotonic() - self._shown_at < _SECONDS_BETWEEN_SHOWN_STEPS:
            return
        self._shown_at = time.monotonic()
        state = {"step": self.num_steps, "num_steps": None, "loss": None, "tokens_per_second": None}
        write_state(Path(os.environ[RUN_DIR_VARIABLE]), state)

    def _record(self) -> RunRecord:
        """Return the record. All ranks must call it."""
        observed = self._watch.observed()
        num_tokens = observed["tokens_counted"]["drawn"]
        observed["tokens_counted"] = {"drawn": num_tokens}  # the loss's tokens are unknown
        if (probed := observed["numerics"]) and probed["clipping"] is None:
            probed["clipping"] = self._max_norm  # FSDP1 clips by a method of its own
        # under DeepSpeed they would be of before clipping, under other engines of after it
        observed.pop("parameter_grad_norms")
        own = torch.cat(self._losses).tolist(), sum(map(num_elements, self._model.parameters()))
        losses, counts = zip(*gather_to_all(own), strict=True)
        running = _running_engine(self._model)
        num_params = sum(counts) if running.engine == "fsdp1" else counts[0]
        gpu = torch.cuda.get_device_name() if self._accelerator.device.type == "cuda" else None
        versions, strategy = installed_versions(), self._launch.strategy
        identity = identity_of(self._asked, versions, gpu)
        script = Path(self._asked["script"][0])
        stem = re.sub(r"[^\w.+=,@-]", "_", script.stem)
        started = datetime.now(UTC) - timedelta(seconds=seconds_since_start())
        return RunRecord(
            run_name=Path(os.environ.get(RUN_DIR_VARIABLE) or f"{stem}-{strategy.name}-{identity}").name,
            identity=identity,
            status="ok",
            strategy=strategy.name,
            asked=self._asked,
            model=_model_facts(self._accelerator.unwrap_model(self._model), script.name, num_params),
            versions=versions,
            started_at=started.isoformat(timespec="seconds"),
            command=shlex.join(self._launch.command or ("python", *self._asked["script"])),
            seconds_total=seconds_since_start(),
            gpu=gpu,
            world_size=running.world_size,
            num_machines=num_machines(),
            engine=running.engine,
            zero_stage=running.zero_stage,
            reshard_after_forward=running.reshard_after_forward,
            weights_fingerprint=self._fingerprint,
            first_batch=self._first_batch,
            tokens_per_step=round(num_tokens / self.num_steps) or None,
            losses=[finite(math.fsum(ranks) / len(ranks)) for ranks in zip(*losses, strict=True)],
            grad_norms=[] if None in self._norms else [finite(float(norm)) for norm in self._norms],
            **observed,
        )


class RecorderCallback(TrainerCallback):
    """Record the training of a Hugging Face Trainer, or of a Trainer derived from it, such as TRL's."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._recorder: Recorder | None = None
        self._losses: list[torch.Tensor] = []
        "of the step's micro-steps; the Trainer has divided them, so that their sum is the step's loss"
        step = trainer.training_step

        def step_and_keep(*arguments: Any, **keywords: Any) -> torch.Tensor:
            loss = step(*arguments, **keywords)
            self._losses.append(loss.detach())
            return loss

        trainer.training_step = step_and_keep

    def on_train_begin(self, *arguments: Any, **keywords: Any) -> None:
        trainer, self._losses = self._trainer, []
        self._recorder = Recorder(trainer.accelerator, trainer.model_wrapped, trainer.optimizer)

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        losses, self._losses = self._losses, []
        if losses:  # a Trainer may have a loop of its own
            self._recorder.end_step(torch.stack(losses).sum())

    def on_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        if self._recorder is not None:
            self._recorder.pause()

    on_save = on_evaluate

    def on_train_end(self, *arguments: Any, **keywords: Any) -> None:
        self._recorder.close()


def _fingerprint(model: torch.nn.Module) -> str | None:
    """Return the hash of the weights before step 1; None under FSDP1, whose flat parameters mix tensors."""
    if isinstance(model, FullyShardedDataParallel):
        return None
    return fingerprint(
        (parameter_name(name), param.full_tensor() if isinstance(param, DTensor) else param)
        for name, param in model.named_parameters()
    )


def _running_engine(model: torch.nn.Module) -> RunningEngine:
    try:
        return probe_engine(model)
    except (ValueError, AttributeError):  # FSDP2 with other units than transformers' decoder layers
        return RunningEngine("fsdp2", None, None, torch.distributed.get_world_size())


def _model_facts(module: torch.nn.Module, name: str, num_params: int) -> dict[str, Any]:
    """Return the model's facts under the script's name; without shapes if no closed form knows it."""
    config = getattr(module, "config", None)
    if hasattr(config, "to_dict"):
        with suppress(ValueError):
            spec = spec_from_config(config.to_dict(), name, name)
            if spec.num_params == num_params:
                return model_facts(spec)
    # FSDP2 puts a class of its own before the model's
    kind = next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))
    return {"name": name, "model_type": kind.__name__, "num_params": num_params}
