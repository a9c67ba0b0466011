"""The one training script. The YAML in its launch command decides how the training state is sharded.

    accelerate launch --config_file accel_configs/fsdp_shard_grad_op.yaml -m slm_toolkit.train
    slm train --strategy ds_zero3 --dataset texts/       # launches it with another YAML, from any folder
    python -m slm_toolkit.train --max_steps 20           # one process, nothing sharded

Read it downward: parse, set up, prepare (`run/setup.py`, which also checks that the running engine is the
YAML's), train, record.
"""

import gc
import math
import os
import sys

# Imported objects are never garbage, yet collecting them took a third of a rank's CPU time before its first
# step: 4.6 s with garbage collection during imports, 3.0 s without (one process, slm-1m, 2026-11-22).
if _COLLECTS := gc.isenabled():
    gc.disable()

# isort: split
from slm_toolkit.base.interrupts import end_at_once
from slm_toolkit.launch.processes import end_with_launcher, leave, leave_out_working_folder

if __name__ == "__main__":
    end_with_launcher()
    leave_out_working_folder()

# isort: split
from slm_toolkit.config.flags import training_config

if __name__ == "__main__":
    # torch.cuda.is_available() would open CUDA here otherwise, and no forked child could use a GPU
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    end_at_once()  # importing torch and building the model take seconds
    training_config(sys.argv[1:])  # --help and unknown flags end here

# isort: split
from slm_toolkit.hardware.machine import use_huge_pages
from slm_toolkit.launch.command_line import check_command_line

if __name__ == "__main__":
    use_huge_pages()
    check_command_line(sys.argv[1:])  # report a typo before the slow import of torch

# isort: split
import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NoReturn

import torch

from slm_toolkit.base.errors import RunEnded, user_errors
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.config.schedule import learning_rate
from slm_toolkit.hardware.gpus import num_cores
from slm_toolkit.predict.choices import completed
from slm_toolkit.record.files import write_record
from slm_toolkit.record.measurement_warnings import warnings_of
from slm_toolkit.record.memory_timeline import TIMELINE_FILE, MemoryTimeline, write_timeline
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.record.saved_files import MODEL_DIR, sweep
from slm_toolkit.run.after_step import AfterStep, BadStepFiles
from slm_toolkit.run.checkpoint.model_card import model_card
from slm_toolkit.run.checkpoint.output_dir import hold_run, remove_earlier_run, save_model
from slm_toolkit.run.checkpoint.resume import load_random_states
from slm_toolkit.run.data.batches import endless, model_inputs, place_in_data, steps_by_labels
from slm_toolkit.run.engine.engine import optimizer_step
from slm_toolkit.run.evaluate import Evaluations
from slm_toolkit.run.faults.watchdog import Watchdog
from slm_toolkit.run.fp32_pass import in_fp32_first
from slm_toolkit.run.observe.measure import profile_steps
from slm_toolkit.run.observe.progress import NoProgress, Tracker, TrainingProgress, starting
from slm_toolkit.run.observe.watch import RunWatch
from slm_toolkit.run.peers.failure import record_mark, seconds_since_start, write_failure
from slm_toolkit.run.peers.launch_info import find_launch
from slm_toolkit.run.peers.step_exchange import StepExchange
from slm_toolkit.run.rehearse import (
    TraceWatch,
    check_stepped,
    fake_batches,
    is_fake,
    tensors_of,
    trace_memory,
)
from slm_toolkit.run.setup import Job, Prepared, prepare, set_up

gc.freeze()
if _COLLECTS:
    gc.enable()


def main(argv: list[str] | None = None, *, end_after: int | None = None) -> None:
    """Train one run. `end_after`: stop after this step, though the schedule is longer."""
    arguments = sys.argv[1:] if argv is None else argv
    with user_errors():
        fp32_pass = in_fp32_first(training_config(arguments), _train_and_leave)
    with user_errors():
        watchdog = Watchdog()
    with watchdog:
        run(arguments, watchdog, fp32_pass=fp32_pass, end_after=end_after)


def _train_and_leave(arguments: list[str], end_after: int) -> NoReturn:
    try:
        main(arguments, end_after=end_after)
    except SystemExit as end:
        leave(end.code)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def _config_of(arguments: list[str]) -> RunConfig:
    """The config of the flags and, where they leave it to us, of this machine, which rank 0 explains."""
    launch = find_launch()
    has_gpu = torch.cuda.is_available()
    config, notes = completed(
        training_config(arguments), launch.strategy, has_gpu=has_gpu, num_ranks=launch.num_processes
    )
    if os.environ.get("RANK", "0") == "0":
        for note in notes:
            print(note, file=sys.stderr)
    return config


def run(
    arguments: list[str],
    watchdog: Watchdog,
    *,
    fp32_pass: dict[str, Any] | None = None,
    end_after: int | None = None,
) -> None:
    started = time.time() - seconds_since_start()
    try:
        with user_errors():
            job, record = set_up(
                _config_of(arguments),
                arguments,
                started,
                watchdog.machines,
            )
    except SystemExit:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # without this, gloo aborts the exit
        raise
    record = dataclasses.replace(record, fp32_pass=fp32_pass)
    mark = record_mark(job.run_dir)
    watchdog.follow(record, job.run_dir, mark=mark, config=job.config)
    try:
        with tensors_of(job.config):
            is_main = job.accelerator.is_main_process
            with starting(job.run_dir, f"setting up {job.launch.strategy.engine}", is_main=is_main):
                prepared, record = prepare(job, record)
            if is_main:
                with user_errors():
                    hold_run(job.run_dir)
            if job.config.overwrite_output_dir and job.checkpoint is None:
                with user_errors():
                    remove_earlier_run(job.run_dir, job.accelerator)
                mark = None
            watchdog.follow(record, job.run_dir, mark=mark, config=job.config)
            if is_fake(job.config):
                observed = rehearse(job, prepared)
            else:
                observed = train(job, prepared, record, watchdog, end_after=end_after)
            if job.config.rehearse is not None:
                check_stepped(job.accelerator, prepared.model, prepared.optimizer)
            watchdog.rest()
            watchdog.machines.part()
        record = dataclasses.replace(record, status="ok", **observed)
    except RunEnded as ended:
        if job.accelerator.is_main_process:
            write_failure(record, ended, job.run_dir, mark=mark)
            print(f"{'error' if ended.exit_code else 'note'}: {ended}", file=sys.stderr)
        raise SystemExit(ended.exit_code) from None
    except Exception as error:
        watchdog.settle(error)
        write_failure(record, error, job.run_dir, mark=mark)
        raise
    if job.accelerator.is_main_process:
        record = dataclasses.replace(record, seconds_total=seconds_since_start())
        path = write_record(record, job.run_dir)
        print("".join(f"note: {warning}\n" for warning in warnings_of(record)), end="", file=sys.stderr)
        print(f"model: {record.model_dir}\n" * bool(record.model_dir) + f"record: {path}", file=sys.stderr)
    accelerator = job.accelerator
    del job, prepared  # data-loader workers and gloo's threads must end before `leave`
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()  # destroys the process group


def train(
    job: Job,
    prepared: Prepared,
    record: RunRecord,
    watchdog: Watchdog,
    *,
    end_after: int | None = None,
) -> dict[str, Any]:
    """Run all steps, or those up to `end_after`. Return the record's observed fields, equal on all ranks."""
    config, num_steps = job.config, prepared.num_steps
    around = around_steps(job, prepared, record)
    watch, progress, evaluations = around.watch, around.progress, around.evaluations
    batches = training_batches(job, prepared, first_step=record.first_step)
    if record.first_step < num_steps:
        batches = prepared.forward.after_plain(batches)

    last_step = num_steps if end_after is None else min(num_steps, end_after)
    for step in range(record.first_step, last_step):
        watchdog.beat(f"at step {step + 1} of {num_steps}")
        with watch.step():
            lr = learning_rate(config, step, num_steps)
            for group in prepared.optimizer.param_groups:
                group["lr"] = lr
            step_loss, norm = train_step(job, prepared, batches, watch)
        done = step + 1
        if progress.due(done):
            progress.show(done, step_loss.item(), watch.steady_tokens_per_second())
        around.tracker.log_step(done, step_loss, lr, watch)
        if evaluations.due(done):
            watchdog.beat(f"in the evaluation after step {done}")
            evaluations.run(done)
            watch.clock.pause()
        watchdog.beat(f"after step {done} of {num_steps}")
        if around.after_step.run(step, step_loss, norm):
            watch.clock.pause()
        if step == record.first_step and prepared.forward.replaced:
            progress.say(f"WARNING: {prepared.forward.replaced}")

    around.after_step.end(last_step)
    watchdog.beat("after the last step")
    has_trained = record.first_step < num_steps
    # a run that was killed between its last checkpoint and its record has only the evaluation left to do
    if not has_trained and evaluations.due(num_steps):
        watchdog.beat(f"in the evaluation after step {num_steps}")
        evaluations.run(num_steps)
    if has_trained:
        # a rehearsal has only this rank's loss
        losses = around.after_step.losses
        progress.show(last_step, losses[-1] if losses else step_loss.item(), watch.steady_tokens_per_second())
    else:
        progress.say(f"all {num_steps} steps were already done")
    progress.close()
    more_steps = functools.partial(train_step, job, prepared, batches)
    return finish(job, prepared, record, around, watchdog, more_steps)


@dataclasses.dataclass(frozen=True)
class AroundSteps:
    """What a run does around its steps."""

    progress: TrainingProgress | NoProgress
    tracker: Tracker
    watch: RunWatch
    evaluations: Evaluations
    after_step: AfterStep


def around_steps(job: Job, prepared: Prepared, record: RunRecord) -> AroundSteps:
    """Make it, and say how the run starts. Every rank must call it: they wait for each other."""
    config, accelerator, num_steps = job.config, job.accelerator, prepared.num_steps
    model, optimizer, loss_recorder = prepared.model, prepared.optimizer, prepared.loss_recorder
    progress = NoProgress()
    if accelerator.is_main_process:
        sweep(job.run_dir)
        progress = TrainingProgress(
            job.run_dir,
            record.first_step,
            num_steps,
            device=accelerator.device,
            logging_steps=config.logging_steps,
        )
    progress.say(job.batch_described)
    if job.checkpoint is not None:
        conversion = record.resumed_from["conversion"]
        progress.say(f"resumed from {job.checkpoint.path}" + (f", {conversion}" if conversion else ""))
    tracker = Tracker(accelerator, config, job.run_dir)
    accelerator.wait_for_everyone()
    watch = RunWatch(
        accelerator, model, optimizer, loss_recorder, gpu=job.gpu_before, dataset_names=job.data.names
    )
    evaluations = Evaluations(
        config, accelerator, model, loss_recorder, prepared.eval_loaders, progress, tracker, num_steps
    )
    max_loss = 2 * math.log(job.spec.vocab_size)  # twice the loss of guessing
    if config.on_bad_step == "skip":
        loss_recorder.limit = max_loss
    after_step = AfterStep(
        config,
        accelerator,
        model,
        progress,
        run_dir=job.run_dir,
        num_steps=num_steps,
        max_loss=max_loss,
        exchange=StepExchange(accelerator, job.control_group),
        bad_steps=BadStepFiles(
            accelerator, job.run_dir, prepared.loader, prepared.num_micro_steps, job.data.tokenizer
        ),
        writer=prepared.checkpoint_writer,
        resumed_from=job.checkpoint.path if job.checkpoint else None,
    )
    return AroundSteps(progress, tracker, watch, evaluations, after_step)


def finish(
    job: Job,
    prepared: Prepared,
    record: RunRecord,
    around: AroundSteps,
    watchdog: Watchdog,
    more_steps: Callable[[RunWatch | TraceWatch], object],
) -> dict[str, Any]:
    """Save the model, then profile or trace a few `more_steps`. Return all that was observed.

    Those steps change the weights, so the model is saved first.
    """
    config, run_dir, progress = job.config, job.run_dir, around.progress
    observed = {
        **around.watch.observed(),
        **around.after_step.observed(),
        **around.evaluations.observed(),
        "datasets": job.data.facts,
        "plain_kernels": prepared.forward.replaced,
    }
    model_dir = None
    if config.saves_model:
        watchdog.beat("while saving the model")
        card = model_card(dataclasses.replace(record, **observed), config)
        tokenizer, folder = job.data.tokenizer, run_dir / MODEL_DIR
        merge = config.save_final_model == "merged"
        model_dir = save_model(job.accelerator, prepared.model, tokenizer, folder, card=card, merge=merge)
    breakdown = None
    if config.profile == "time" and record.first_step < prepared.num_steps:
        watchdog.beat("while profiling")
        progress.say(f"profiling; traces: {run_dir}/trace-rank*.json.gz, table: slm report {run_dir}")
        breakdown = profile_steps(functools.partial(more_steps, around.watch), run_dir, job.accelerator)
        if breakdown is None:
            progress.say(
                "no step anatomy: the GPU driver reported no kernels; it may allow profiling to "
                "administrators only"
            )
    timeline = follow_memory(job, prepared, more_steps) if prepared.trace is not None else None
    return observed | {
        "anatomy": dataclasses.asdict(breakdown) if breakdown else None,
        "memory_at_peak": timeline.summary if timeline else None,
        "model_dir": str(model_dir) if model_dir else None,
        "reported_to": None if config.report_to == "none" else config.report_to,
    }


def training_batches(job: Job, prepared: Prepared, *, first_step: int) -> Iterator[dict[str, torch.Tensor]]:
    """Return an endless iterator over this rank's batches, starting at `first_step`.

    A run that resumes also restores its random number generators here, because nothing else draws random
    numbers between this call and the first step.
    """
    accelerator, num_micro_steps = job.accelerator, prepared.num_micro_steps
    batches = endless(accelerator, prepared.loader, first_step=first_step, num_micro_steps=num_micro_steps)
    if job.data.has_labels:
        batches = steps_by_labels(accelerator, batches, prepared.loss_recorder, num_micro_steps)
    if job.checkpoint is not None:
        in_epoch = place_in_data(prepared.loader, first_step, num_micro_steps)[1]
        # starting the epoch again draws its order, so that must happen before the states are restored
        if in_epoch and first_step < prepared.num_steps:
            batches = chain([next(batches)], batches)
        with user_errors():
            load_random_states(job.checkpoint, accelerator)
    return batches


def rehearse(job: Job, prepared: Prepared) -> dict[str, Any]:
    """Run steps on fake tensors and trace every allocation. Return the record's fields."""
    steps = functools.partial(train_step, job, prepared, fake_batches(job.config))
    timeline = follow_memory(job, prepared, steps)
    peak = timeline.peak
    print(
        f"rank 0 of {job.config.rehearse}: peak {peak.num_bytes / 2**30:.2f} GiB "
        f"in {peak.phase}, {peak.module or 'optimizer'}; slm report {job.run_dir} --memory",
        file=sys.stderr,
    )
    return {
        "memory_at_peak": timeline.summary,
        "peak_allocated_bytes": [timeline.peak.num_bytes],
        "peak_reserved_bytes": [timeline.reserved_bytes],
        "num_cores": num_cores(),
    }


def follow_memory(job: Job, prepared: Prepared, steps: Callable[[TraceWatch], object]) -> MemoryTimeline:
    """Trace the allocations of a few steps. Rank 0 also writes the timeline to a file next to the record."""
    model, optimizer, trace = prepared.model, prepared.optimizer, prepared.trace
    timeline = trace_memory(steps, job.accelerator, model, optimizer, trace)
    if job.accelerator.is_main_process:
        write_timeline(timeline, job.run_dir / TIMELINE_FILE)
    return timeline


def train_step(
    job: Job,
    prepared: Prepared,
    batches: Iterator[dict[str, torch.Tensor]],
    watch: RunWatch | TraceWatch,
) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """Run all micro-steps and the optimizer step. Return this rank's mean loss and the gradient norm."""
    accelerator, model = job.accelerator, prepared.model
    step_loss = torch.zeros((), device=accelerator.device)
    norm: torch.Tensor | float | None = None
    for _ in range(prepared.num_micro_steps):
        with watch.phase("data"):
            batch = next(batches)
        watch.drew(batch)
        prepared.loss_recorder.expect(batch["input_ids"])
        if job.config.records_graphs:
            torch.compiler.cudagraph_mark_step_begin()  # the last pass's outputs may be overwritten
        with accelerator.accumulate(model):
            with watch.phase("forward"):
                loss = prepared.forward(model_inputs(batch, job.config))
            with watch.phase("backward"):
                accelerator.backward(loss)
            if accelerator.sync_gradients:
                watch.gradients_reduced()
                with watch.phase("optimizer"):
                    norm = optimizer_step(
                        accelerator, model, prepared.optimizer, max_grad_norm=job.config.max_grad_norm
                    )
        watch.computed(batch)
        step_loss += prepared.loss_recorder.last / prepared.num_micro_steps
    return step_loss, norm


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        leave(end.code)
    leave(0)
