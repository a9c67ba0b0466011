"""Run a user's own training script and record it.

    accelerate launch --config_file accel_configs/ddp.yaml -m slm_toolkit.run_script train.py --lr 1e-4

`slm compare --script` starts it; by itself it writes runs/NAME/record.json. It watches the Accelerator that
prepares a model and an optimizer, or the Trainer. Without a GPU it lets every strategy run over gloo.
"""

# ruff: noqa: E402 - an exit function that is registered before all imports runs after all others
import atexit

_is_done = False
"whether the script came to its end"


def _leave_if_done() -> None:
    from slm_toolkit.launch.processes import leave

    if _is_done:
        leave(0)


if __name__ == "__main__":
    atexit.register(_leave_if_done)

# isort: split
import functools
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DeepSpeedOptimizerWrapper, DistributedType
from transformers import Trainer

from slm_toolkit.base.errors import user_errors
from slm_toolkit.hardware.machine import use_huge_pages
from slm_toolkit.launch.torch_extensions import CompilerNews, use_extensions_folder
from slm_toolkit.record.run_record import RUN_DIR_VARIABLE
from slm_toolkit.recorder import Recorder, RecorderCallback
from slm_toolkit.run.peers.launch_info import absolute_deepspeed_config, find_launch


def main() -> None:
    use_huge_pages()
    words = sys.argv[1:]
    if words[:1] == ["--run_dir"]:  # in a Slurm job; other runs have it in their environment
        os.environ[RUN_DIR_VARIABLE] = words[1]
        words = words[2:]
    with user_errors():
        script = words[0] if words else ""
        if not Path(script).is_file():
            raise ValueError(
                f"no such script: {script}\nhint: python -m slm_toolkit.run_script train.py ARGUMENTS"
            )
        absolute_deepspeed_config(find_launch().strategy)
    sys.argv = words
    # as `python script.py` has it; without -P the first entry is the working folder
    sys.path[: 0 if sys.flags.safe_path else 1] = [str(Path(script).resolve().parent)]
    use_extensions_folder()
    threading.Thread(target=_report_compiles, daemon=True).start()
    if not torch.cuda.is_available():
        _run_over_gloo()
    _watch_accelerators()
    _watch_optimizers()
    _watch_trainers()
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):  # other ranks may not come to the collectives of `close`
            raise
    if Recorder.current is not None:
        Recorder.current.close()
    if Recorder.num_steps_of_all == 0:
        print(f"error: {script} was not recorded: {Recorder.why_none}", file=sys.stderr)
        sys.exit(2)


def _report_compiles() -> None:
    """Name long compiles before the first step."""
    compilers = CompilerNews()
    while Recorder.num_steps_of_all == 0:
        time.sleep(1)
        compilers.look()


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
    """Make a recorder as soon as an Accelerator has prepared an optimizer and the model of its parameters."""
    prepare, free_memory = Accelerator.prepare, Accelerator.free_memory

    @functools.wraps(prepare)
    def prepare_and_watch(accelerator: Accelerator, *parts: Any, **options: Any) -> Any:
        prepared = prepare(accelerator, *parts, **options)
        found = prepared if isinstance(prepared, tuple | list) else (prepared,)
        if any(isinstance(part, torch.nn.Module | AcceleratedOptimizer) for part in found):
            accelerator.slm_prepared = [*getattr(accelerator, "slm_prepared", ()), *found]
            _record_if_complete(accelerator, accelerator.slm_prepared)
        return prepared

    @functools.wraps(free_memory)
    def forget_and_free(accelerator: Accelerator, *objects: Any) -> Any:
        accelerator.slm_prepared = []
        return free_memory(accelerator, *objects)

    Accelerator.prepare, Accelerator.free_memory = prepare_and_watch, forget_and_free


def _record_if_complete(accelerator: Accelerator, prepared: list[Any]) -> None:
    optimizers = [part for part in prepared if isinstance(part, AcceleratedOptimizer)]
    models = [part for part in prepared if isinstance(part, torch.nn.Module)]
    if len(optimizers) > 1:
        if Recorder.current is not None:
            Recorder.current.stop()
        Recorder.why_none = (
            "it trains with several optimizers, whose steps and losses can't be told apart\n"
            "hint: compare a script with one optimizer"
        )
    elif optimizers and models and not hasattr(optimizers[0], "slm_recorder"):
        _record(accelerator, _model_of(optimizers[0], models), optimizers[0])


def _model_of(optimizer: AcceleratedOptimizer, models: list[torch.nn.Module]) -> torch.nn.Module:
    """Return the model whose parameters the optimizer updates; DeepSpeed's optimizers have copies of them."""
    updated = {id(param) for group in optimizer.param_groups for param in group["params"]}
    owners = (model for model in models if any(id(param) in updated for param in model.parameters()))
    engines = (model for model in models if hasattr(model, "zero_optimization_stage"))
    return next(owners, None) or next(engines, None) or models[0]


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
    _is_done = True
