"""The one training script. The YAML in its launch command decides how the training state is sharded.

    accelerate launch --config_file accel_configs/fsdp_shard_grad_op.yaml -m slm_toolkit.train
    slm train --strategy ds_zero3 --dataset texts/       # launches it with another YAML, from any folder
    python -m slm_toolkit.train --max_steps 20           # one process, nothing sharded

Read it downward: one step, the loop around it, what follows the last step, and the whole run.
"""

# ruff: noqa: E402 - the imports of torch come after `begin`
from slm_toolkit.launch.processes import begin, leave

imported = begin(__name__)  # also checks the command line, before the slow imports below

# isort: split
import dataclasses
import gc
import sys
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.flags import training_config
from slm_toolkit.config.schedule import learning_rate
from slm_toolkit.record.files import write_record
from slm_toolkit.record.measurement_warnings import warnings_of
from slm_toolkit.record.saved_files import MODEL_DIR
from slm_toolkit.run.after_step import AfterStep
from slm_toolkit.run.checkpoint.checkpoint import load_random_states
from slm_toolkit.run.checkpoint.output_dir import save_model
from slm_toolkit.run.data.batches import endless, model_inputs, place_in_data, steps_by_labels
from slm_toolkit.run.display import Tracker, TrainingProgress
from slm_toolkit.run.engine.engine import optimizer_step
from slm_toolkit.run.evaluate import Evaluations
from slm_toolkit.run.faults.watchdog import Watchdog
from slm_toolkit.run.fp32_pass import in_fp32_first
from slm_toolkit.run.observe.measure import profile_steps
from slm_toolkit.run.observe.watch import RunWatch
from slm_toolkit.run.peers.failure import seconds_since_start
from slm_toolkit.run.rehearse import TraceWatch, check_stepped, follow_memory, is_fake, rehearse
from slm_toolkit.run.run import Run
from slm_toolkit.run.setup import set_up

imported()

Batches = Iterator[dict[str, torch.Tensor]]


def train_step(
    run: Run, batches: Batches, watch: RunWatch | TraceWatch
) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Run all micro-steps and the optimizer step. Return this rank's mean loss and the gradient norm."""
    accelerator, model = run.accelerator, run.model
    step_loss = torch.zeros((), device=accelerator.device)
    norm: torch.Tensor | float | None = None
    for _ in range(run.num_micro_steps):
        with watch.phase("data"):
            batch = next(batches)
        watch.drew(batch)
        if run.config.records_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # the last pass's outputs may be overwritten
        with accelerator.accumulate(model):
            with watch.phase("forward"):
                loss = run.forward(model_inputs(batch, run.config))
            with watch.phase("backward"):
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                watch.gradients_reduced()
                with watch.phase("optimizer"):
                    norm = optimizer_step(
                        accelerator, model, run.optimizer, max_grad_norm=run.config.max_grad_norm
                    )
        step_loss += run.loss_recorder.last / run.num_micro_steps
    return step_loss, norm


def train(run: Run, watchdog: Watchdog, *, end_after: int | None = None) -> dict[str, Any]:
    """Run all steps, or those up to `end_after`. Return the record's observed fields, equal on all ranks."""
    watch = RunWatch(
        run.accelerator,
        run.model,
        run.optimizer,
        run.loss_recorder,
        gpu=run.gpu_before,
    )
    progress, tracker = TrainingProgress(run, watch), Tracker(run, watch)
    observers = [progress, tracker, Evaluations(run, watch, watchdog, tracker), watchdog]
    if run.config.rehearse is None:
        observers.append(AfterStep(run, watch, progress))
    batches = training_batches(run)

    last_step = run.num_steps if end_after is None else min(run.num_steps, end_after)
    for step in range(run.record.first_step, last_step):
        for observer in observers:
            observer.before_step(step)
        with watch.step():
            for group in run.optimizer.param_groups:
                group["lr"] = learning_rate(run.config, step, run.num_steps)
            loss, norm = train_step(run, batches, watch)
        for observer in observers:
            observer.after_step(step, loss, norm)

    observed = {"datasets": run.data.facts, "plain_kernels": run.forward.replaced}
    for observer in reversed(observers):
        observer.end(observed)
    return after_training(run, observed | watch.observed(), batches, watch, watchdog)


def training_batches(run: Run) -> Batches:
    """Return an endless iterator over this rank's batches, from the run's first step on.

    A run that resumes also restores its random number generators here, because nothing else draws random
    numbers between this call and the first step.
    """
    accelerator, first_step, num_micro_steps = run.accelerator, run.record.first_step, run.num_micro_steps
    batches = endless(accelerator, run.loader, first_step=first_step, num_micro_steps=num_micro_steps)
    if run.data.has_labels:
        batches = steps_by_labels(accelerator, batches, run.loss_recorder, num_micro_steps)
    if run.checkpoint is not None:
        in_epoch = place_in_data(run.loader, first_step, num_micro_steps)[1]
        # starting the epoch again draws its order, so that must happen before the states are restored
        if in_epoch and first_step < run.num_steps:
            batches = chain([next(batches)], batches)
        with user_errors():
            load_random_states(run.checkpoint, accelerator)
    return run.forward.after_plain(batches) if first_step < run.num_steps else batches


def after_training(
    run: Run, observed: dict[str, Any], batches: Batches, watch: RunWatch, watchdog: Watchdog
) -> dict[str, Any]:
    """Save the model, then profile or trace a few more steps. Return all that was observed.

    Those steps change the weights, so the model is saved first.
    """
    config, accelerator, folder = run.config, run.accelerator, run.run_dir / MODEL_DIR
    if config.saves_model:
        watchdog.beat("while saving the model")
        save_model(accelerator, run.model, run.data.tokenizer, folder)
        observed["model_dir"] = str(folder)
    if config.profile == "time" and run.record.first_step < run.num_steps:
        watchdog.beat("while profiling")
        anatomy = profile_steps(partial(train_step, run, batches, watch), run.run_dir, accelerator)
        observed["anatomy"] = anatomy and dataclasses.asdict(anatomy)
    if run.trace is not None:
        observed["memory_at_peak"] = follow_memory(run, partial(train_step, run, batches))
    return observed


def main(argv: list[str] | None = None, *, end_after: int | None = None) -> None:
    """Train one run. `end_after`: stop after this step, though the schedule is longer."""
    arguments = sys.argv[1:] if argv is None else argv
    with user_errors():
        fp32_pass = in_fp32_first(training_config(arguments), main)
        watchdog = Watchdog()
    with watchdog:
        run = set_up(arguments, watchdog, fp32_pass=fp32_pass)
        if is_fake(run.config):
            observed = rehearse(run, train_step)
        else:
            observed = train(run, watchdog, end_after=end_after)
        if run.config.rehearse is not None:
            check_stepped(run)
        watchdog.rest()
        write(run, observed)
        accelerator = run.accelerator
        del run  # data-loader workers and gloo's threads must end before `leave`
        accelerator.free_memory()
        gc.collect()
        accelerator.end_training()  # destroys the process group


def write(run: Run, observed: dict[str, Any]) -> None:
    """Write the record on rank 0, and print its warnings and where it is."""
    if run.accelerator.is_main_process:
        seconds = seconds_since_start()
        record = dataclasses.replace(run.record, status="ok", seconds_total=seconds, **observed)
        path = write_record(record, run.run_dir)
        print("".join(f"note: {warning}\n" for warning in warnings_of(record)), end="", file=sys.stderr)
        print(f"model: {record.model_dir}\n" * bool(record.model_dir) + f"record: {path}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        leave(end.code)
    leave(0)
