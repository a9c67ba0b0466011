"""Record your own training script: three lines in an Accelerate loop, one in a Trainer's, make a record.json.

    from slm_toolkit.recorder import Recorder

    recorder = Recorder(accelerator, model, optimizer)  # after accelerator.prepare
    for batch in loader:
        ...
        recorder.after_step(loss)  # at the end of each iteration
    accelerator.end_training()

With a Hugging Face Trainer, or TRL's: `trainer.add_callback(RecorderCallback(trainer))`.
`slm report runs` then shows the run, as it shows runs of `slm compare`. What a recorder can't see is unknown.
"""

import atexit
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
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from slm_toolkit.model.from_config import spec_from_config
from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import (
    PROGRESS_FILE,
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
from slm_toolkit.run.engine.training_state import parameter_name
from slm_toolkit.run.observe.machine_load import look_at_gpu
from slm_toolkit.run.observe.probe import tokens_of
from slm_toolkit.run.observe.progress import write_state
from slm_toolkit.run.observe.watch import RunWatch
from slm_toolkit.run.peers.failure import seconds_since_start
from slm_toolkit.run.peers.launch_info import find_launch
from slm_toolkit.run.peers.machines import num_machines
from slm_toolkit.run.peers.step_exchange import gather_to_all

_SECONDS_BETWEEN_SHOWN_STEPS = 0.5
_LOSSES_READ_AT_ONCE = 256
"steps between two reads of the losses: so many that waiting for the device costs no time"


class Recorder:
    """Watch the steps of a loop that an Accelerator drives, and write their record when the script ends.

    It changes no number of the training. The first step is probed, hence slow, and not timed.
    """

    num_of_all = num_steps_of_all = 0
    "recorders and steps of this process"

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        tokens_per_batch: int | None = None,
        output_dir: str | os.PathLike[str] = "runs",
        run_name: str | None = None,
    ) -> None:
        """Begin to watch. All ranks must call it, with what `accelerator.prepare` returned.

        `tokens_per_batch`: a rank's tokens in one micro-step, for models whose forward gets no token ids;
        others are counted. The record goes to `output_dir`/`run_name`/record.json. A name that is taken gets
        `-r2` at its end. By default the name is made of script, strategy and a hash.
        """
        for earlier in open_recorders():
            earlier.stop()  # of a training that this one replaces
        self._accelerator, self._model = accelerator, model
        self._tokens_per_batch, self._output_dir, self._run_name = tokens_per_batch, output_dir, run_name
        launch = find_launch()
        self._strategy = launch.strategy
        self._asked = script_asked(launch.strategy, launch.num_processes, sys.argv)
        self._command = launch.command or ("python", *self._asked["script"])
        self._fingerprint = _fingerprint(model)
        no_loss_function = SimpleNamespace(num_tokens=0)  # the loss's tokens are unknown
        gpu = look_at_gpu(accelerator.local_process_index)
        self._watch = RunWatch(accelerator, model, optimizer, no_loss_function, gpu=gpu)
        self._first_batch: dict[str, int] | None = None
        self.num_steps = 0
        self._shown_at = 0.0
        self._micro_losses: list[torch.Tensor] = []
        self._unread: list[torch.Tensor] = []
        "losses of the last steps, still on the device"
        self._losses: list[float] = []
        self._norm: float | torch.Tensor | None = None
        "the gradient norm of this step; None if the script does not measure it"
        self._max_norm: float | None = None
        "the threshold of the script's clipping; None if it does not clip by the Accelerator"
        self._norms: list[float | torch.Tensor | None] = []
        self._has_evaluated = False
        "True if the model ran without gradients since the step began"
        self._has_updated = False
        "True if the optimizer's step ran since the last step's end"
        inner = _inner_optimizer(optimizer)
        self._hooks = [
            model.register_forward_pre_hook(self._count_tokens, with_kwargs=True),
            inner.register_step_pre_hook(lambda *_: self._watch.gradients_reduced()),
            inner.register_step_post_hook(self._saw_update),
        ]
        self._keep_norms()
        self._step = self._watch.step()
        self._step.__enter__()
        self.is_open = True
        _open.append(self)
        Recorder.num_of_all += 1
        self._close_with_training()

    def after_step(self, loss: torch.Tensor) -> None:
        """Note an iteration of the loop, whether its gradients were applied or only accumulated.

        `loss`: this rank's, of this iteration's batch, not divided by the number of micro-steps. A step's
        recorded loss is the mean over micro-steps and ranks.
        """
        self.note_loss(loss)
        self.end_step_if_due()

    def note_loss(self, loss: torch.Tensor) -> None:
        """Note the loss of a micro-step, the first half of `after_step`."""
        if self.is_open:
            self._micro_losses.append(loss.detach().float().mean())

    def end_step_if_due(self) -> None:
        """End the step if the optimizer has updated the weights, the second half of `after_step`."""
        skipped = self._accelerator.optimizer_step_was_skipped  # by fp16's loss scaler
        if self._micro_losses and self._accelerator.sync_gradients and (self._has_updated or skipped):
            self.end_step(torch.stack(self._micro_losses).mean())

    def end_step(self, loss: torch.Tensor) -> None:
        """End a step with this rank's loss of the whole step."""
        if not self.is_open:
            return
        self._unread.append(loss.detach().float())
        if len(self._unread) == _LOSSES_READ_AT_ONCE:
            self._read_losses()
        self._norms.append(self._norm)
        self._micro_losses, self._norm, self._has_updated = [], None, False
        self.num_steps += 1
        Recorder.num_steps_of_all += 1
        self._show_progress()
        self._step.__exit__(None, None, None)
        self._step = self._watch.step()
        self._step.__enter__()

    def pause(self) -> None:
        """Leave the time since the last step, such as an evaluation's, out of the next step's time."""
        if self.is_open:  # a Trainer may evaluate after its training
            self._watch.clock.pause()

    def close(self) -> Path | None:
        """Write the record of the steps until now; return its path on rank 0. All ranks must call it.

        `accelerator.end_training()` calls it. Return None without a step, and if it was called before.
        """
        if not self.is_open:
            return None
        record = self._record() if self.num_steps else None
        folder = None if record is None else self._folder_of(record)
        self.stop()
        if record is None or not self._accelerator.is_main_process:
            return None
        if folder is None:
            print("note: the script's first training is recorded, not this one", file=sys.stderr)
            return None
        path = write_record(record, folder)
        print(f"record: {path}", file=sys.stderr)
        return path

    def stop(self) -> None:
        """Stop watching, without a record, and let go of the model."""
        if not self.is_open:
            return
        self.is_open = False
        _open.remove(self)
        self._step.__exit__(GeneratorExit, GeneratorExit(), None)  # removes the probe's hooks
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._model, self._watch = [], None, None

    @property
    def is_main(self) -> bool:
        return self._accelerator.is_main_process

    @property
    def is_alone(self) -> bool:
        return self._accelerator.num_processes == 1

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
        tokens = tokens_of(args, kwargs)
        if tokens is not None and self._first_batch is None:
            self._first_batch = {"num_sequences": tokens.shape[0], "seq_len": tokens.shape[-1]}
        if self._tokens_per_batch is not None:
            self._watch.num_tokens_drawn += self._tokens_per_batch
        elif tokens is not None:
            self._watch.num_tokens_drawn += tokens.numel()
            if isinstance(mask := kwargs.get("attention_mask"), torch.Tensor) and mask.shape == tokens.shape:
                self._watch.num_padding = self._watch.num_padding + (mask == 0).sum()

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
        with suppress(OSError):  # only the display needs the file
            write_state(Path(os.environ[RUN_DIR_VARIABLE], PROGRESS_FILE), state)

    def _read_losses(self) -> None:
        if self._unread:
            self._losses += torch.stack(self._unread).tolist()
            self._unread = []

    def _record(self) -> RunRecord:
        """Return the record. All ranks must call it."""
        self._read_losses()
        observed = self._watch.observed()
        num_tokens = observed["tokens_counted"]["drawn"]
        observed["tokens_counted"] = {"drawn": num_tokens}  # the loss's tokens are unknown
        if (probed := observed["numerics"]) and probed["clipping"] is None:
            probed["clipping"] = self._max_norm  # FSDP1 clips by a method of its own
        # under DeepSpeed they would be of before clipping, under other engines of after it
        observed.pop("parameter_grad_norms")
        losses, counts = zip(*gather_to_all((self._losses, _num_params(self._model))), strict=True)
        running = _running_engine(self._model)
        num_params = sum(counts) if running.engine == "fsdp1" else counts[0]
        gpu = torch.cuda.get_device_name() if self._accelerator.device.type == "cuda" else None
        versions = installed_versions()
        identity, strategy = identity_of(self._asked, versions, gpu), self._strategy
        script = Path(self._asked["script"][0])
        stem = re.sub(r"[^\w.+=,@-]", "_", script.stem)
        started = datetime.now(UTC) - timedelta(seconds=seconds_since_start())
        return RunRecord(
            run_name=self._name_by(f"{stem}-{strategy.name}-{identity}"),
            identity=identity,
            status="ok",
            strategy=strategy.name,
            asked=self._asked,
            model=_model_facts(self._accelerator.unwrap_model(self._model), script.name, num_params),
            versions=versions,
            started_at=started.isoformat(timespec="seconds"),
            command=shlex.join(self._command),
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

    def _name_by(self, default: str) -> str:
        """Return the run's name: that of `slm compare`, the caller's, or the default."""
        planned = os.environ.get(RUN_DIR_VARIABLE)
        return Path(planned).name if planned else self._run_name or default

    def _folder_of(self, record: RunRecord) -> Path | None:
        """Return the folder that `slm compare` made for this run, or one without a record.

        None if the script's first training has left its record in that folder.
        """
        if planned := os.environ.get(RUN_DIR_VARIABLE):
            return None if Path(planned, RECORD_FILE).exists() else Path(planned)
        first = Path(self._output_dir, record.run_name)
        repeats = (first.with_name(f"{first.name}-r{number}") for number in count(2))
        return next(folder for folder in chain([first], repeats) if not (folder / RECORD_FILE).exists())


class RecorderCallback(TrainerCallback):
    """Record the training of a Hugging Face Trainer, or of a Trainer derived from it, such as TRL's."""

    def __init__(self, trainer: Any, **options: Any) -> None:
        """`trainer.add_callback(RecorderCallback(trainer))`; `options`: of Recorder."""
        self._trainer, self._options = trainer, options
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
        model, optimizer = trainer.model_wrapped, trainer.optimizer
        self._recorder = Recorder(trainer.accelerator, model, optimizer, **self._options)

    def on_step_end(self, *arguments: Any, **keywords: Any) -> None:
        losses, self._losses = self._losses, []
        if losses:  # a Trainer may have a loop of its own
            self._recorder.end_step(torch.stack(losses).sum())

    def on_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        if self._recorder is not None:
            self._recorder.pause()

    def on_save(self, *arguments: Any, **keywords: Any) -> None:
        self._recorder.pause()

    def on_train_end(self, *arguments: Any, **keywords: Any) -> None:
        self._recorder.close()


_open: list[Recorder] = []
"the recorder of the training that runs; empty if none does"


def open_recorders() -> tuple[Recorder, ...]:
    """Return the recorders that have neither been closed nor stopped: one, or none."""
    return tuple(_open)


def _close_at_exit() -> None:
    """Write the record of a script of one process. Other ranks may not come to the collectives of `close`."""
    for recorder in open_recorders():
        if recorder.is_alone:
            recorder.close()
        elif recorder.is_main:
            print(
                "note: no record\nhint: call accelerator.end_training() or recorder.close() at the end",
                file=sys.stderr,
            )


atexit.register(_close_at_exit)


def _leave_out_after_an_error(*error: Any) -> None:
    for recorder in open_recorders():
        recorder.stop()
    _report_error(*error)


_report_error, sys.excepthook = sys.excepthook, _leave_out_after_an_error


def _inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's optimizer below the wrappers of accelerate and DeepSpeed."""
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _fingerprint(model: torch.nn.Module) -> str | None:
    """Return the hash of the weights before step 1; None under FSDP1, whose flat parameters mix tensors."""
    if isinstance(model, FullyShardedDataParallel):
        return None
    named = ((parameter_name(name), param) for name, param in model.named_parameters())
    return fingerprint(
        (name, param.full_tensor() if isinstance(param, DTensor) else param) for name, param in named
    )


def _num_params(model: torch.nn.Module) -> int:
    return sum(getattr(param, "ds_numel", param.numel()) for param in model.parameters())


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
