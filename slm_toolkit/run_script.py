"""Run a user's own training script and record it, though it has no recorder.

    accelerate launch --config_file accel_configs/ddp.yaml -m slm_toolkit.run_script train.py --lr 1e-4

`slm compare --script` starts it. It watches the Accelerator that prepares a model and an optimizer, or the
Trainer. Without a GPU it lets every strategy run over gloo.
"""

import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DeepSpeedOptimizerWrapper, DistributedType
from transformers import Trainer

from slm_toolkit.base.errors import user_errors
from slm_toolkit.recorder import Recorder, RecorderCallback, recorder_of
from slm_toolkit.run.peers.launch_info import absolute_deepspeed_config, find_launch

_accelerators: list[Accelerator] = []
"those that have prepared something"


def main() -> None:
    with user_errors():
        script = _script(sys.argv[1:])
        absolute_deepspeed_config(find_launch().strategy)
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)  # as `python script.py` has it
    if not torch.cuda.is_available():
        _run_over_gloo()
    _watch_accelerators()
    _watch_optimizers()
    _watch_trainers()
    runpy.run_path(script, run_name="__main__")
    if not any(map(recorder_of, _accelerators)):
        print(
            f"error: {script} was not recorded: no Accelerator prepared a model and an optimizer\n"
            "hint: prepare both with one Accelerator, or use a Hugging Face Trainer",
            file=sys.stderr,
        )
        sys.exit(2)


def _script(words: list[str]) -> str:
    if not words or not Path(words[0]).is_file():
        named = f"no such script: {words[0]}" if words else "no script"
        raise ValueError(f"{named}\nhint: python -m slm_toolkit.run_script train.py ARGUMENTS")
    return words[0]


def _run_over_gloo() -> None:
    """Let FSDP2 and DeepSpeed run on CPU processes, which accelerate 1.15 would leave out."""
    is_deepspeed, is_fsdp = (
        os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() == "true"
        for engine in ("DEEPSPEED", "FSDP")
    )
    start = PartialState.__init__

    @functools.wraps(start)
    def start_on_cpu(state: PartialState, cpu: bool = False, **options: Any) -> None:
        is_first = PartialState._shared_state == {}
        if not (is_deepspeed or is_fsdp):
            start(state, True, **{**options, "backend": None})
            return
        start(state, cpu, **{**options, "backend": "gloo"})
        if is_fsdp and is_first:
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU

    PartialState.__init__ = start_on_cpu


def _watch_accelerators() -> None:
    """Make a recorder as soon as an Accelerator has prepared a model and an optimizer."""
    prepare = Accelerator.prepare

    @functools.wraps(prepare)
    def prepare_and_watch(accelerator: Accelerator, *parts: Any, **options: Any) -> Any:
        prepared = prepare(accelerator, *parts, **options)
        found = prepared if isinstance(prepared, tuple | list) else (prepared,)
        if accelerator not in _accelerators:
            _accelerators.append(accelerator)
            accelerator.slm_prepared = []
        accelerator.slm_prepared += found
        model = _first(accelerator.slm_prepared, torch.nn.Module)
        optimizer = _first(accelerator.slm_prepared, AcceleratedOptimizer)
        if None not in (model, optimizer) and recorder_of(accelerator) is None:
            _record(accelerator, model, optimizer)
        return prepared

    Accelerator.prepare = prepare_and_watch


def _first(parts: list[Any], kind: type) -> Any:
    return next((part for part in parts if isinstance(part, kind)), None)


def _record(accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer) -> None:
    """Record a loop without touching it: a step ends with the optimizer's step."""
    recorder = optimizer.slm_recorder = Recorder(accelerator, model, optimizer)
    backward = accelerator.backward

    def backward_and_note(loss: torch.Tensor, **options: Any) -> None:
        recorder.note_loss(loss)
        backward(loss, **options)

    accelerator.backward = backward_and_note


def _watch_optimizers() -> None:
    """End a recorder's step with its optimizer's step."""
    for kind in (AcceleratedOptimizer, DeepSpeedOptimizerWrapper):
        kind.step = _noted(kind.step)


def _noted(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def step_and_note(optimizer: AcceleratedOptimizer, *arguments: Any, **options: Any) -> Any:
        result = step(optimizer, *arguments, **options)
        if (recorder := getattr(optimizer, "slm_recorder", None)) is not None:
            recorder.end_step_if_due()
        return result

    return step_and_note


def _watch_trainers() -> None:
    """Give every Trainer a callback. Its recorder replaces the one of the Trainer's Accelerator."""
    create = Trainer.__init__

    @functools.wraps(create)
    def create_and_watch(trainer: Trainer, *arguments: Any, **options: Any) -> None:
        create(trainer, *arguments, **options)
        trainer.add_callback(RecorderCallback(trainer))

    Trainer.__init__ = create_and_watch


if __name__ == "__main__":
    main()
