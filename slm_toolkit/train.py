"""The one training script; the YAML it is launched with decides how the training state is sharded.

    accelerate launch --config_file accel_configs/fsdp_shard_grad_op.yaml -m slm_toolkit.train
    accelerate launch --config_file accel_configs/ds_zero3.yaml -m slm_toolkit.train --dataset texts/
    python -m slm_toolkit.train --max_steps 20           # one process, nothing sharded

Read it downward: parse, build, prepare, check that what runs is what the YAML asked for, train, record.
"""

import dataclasses
import gc
import math
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from slm_toolkit.config import Parser, RunConfig, add_flags, config_from_args, with_underscores
from slm_toolkit.errors import user_errors
from slm_toolkit.models import find_model
from slm_toolkit.record import (
    RECORD_FILE,
    RunRecord,
    everything_asked,
    finite,
    identity_of,
    installed_versions,
    model_facts,
    read_record,
    run_name_of,
    write_record,
)
from slm_toolkit.run.batches import count_steps, endless, make_loader
from slm_toolkit.run.checkpoint import find_checkpoint, save_checkpoint, save_model, step_of
from slm_toolkit.run.data import load_datasets
from slm_toolkit.run.deepspeed_estimate import deepspeed_estimate_of
from slm_toolkit.run.engine import (
    build_optimizer,
    check_engine,
    optimizer_step,
    probe_engine,
    start_accelerator,
)
from slm_toolkit.run.launched import check_devices, check_environment, find_launch
from slm_toolkit.run.loss import RecordedLoss
from slm_toolkit.run.measure import (
    StepClock,
    gather_to_all,
    gradient_bytes,
    on_deepspeed_step,
    peak_memory,
    reset_peak_memory,
    state_bytes,
)
from slm_toolkit.run.model import build_model
from slm_toolkit.run.progress import TrainingProgress
from slm_toolkit.strategy import contradictions


def main(argv: list[str] | None = None) -> None:
    started = psutil.Process().create_time()
    parser = Parser(prog="slm_toolkit.train", description=__doc__.splitlines()[0])
    add_flags(parser, grid=False)
    arguments = with_underscores(sys.argv[1:] if argv is None else argv)
    has_gpu = torch.cuda.is_available()

    with user_errors():
        config = config_from_args(parser.parse_args(arguments)).with_defaults(has_gpu=has_gpu)
        config.check()
        spec = find_model(config.model)
        launch = find_launch()
        local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        check_environment(launch)
        check_devices(launch, num_gpus=torch.cuda.device_count(), local_processes=local_processes)
        if found := contradictions(launch.strategy, config):
            raise ValueError("\n".join(found) + '\nhint: write "auto" in the JSON, and let the flags say it')
        gpu = torch.cuda.get_device_name() if has_gpu else None
        asked, versions = (
            everything_asked(config, launch.strategy, launch.num_processes),
            installed_versions(),
        )
        identity = identity_of(asked, versions, gpu)
        run_name = config.run_name or run_name_of(spec, launch.strategy, identity)
        run_dir = Path(config.output_dir).resolve() / run_name
        checkpoint = (
            find_checkpoint(config.resume_from_checkpoint, run_dir) if config.resume_from_checkpoint else None
        )

        accelerator = start_accelerator(launch, config, project_dir=str(run_dir))
        sequences_per_step = (
            config.per_device_train_batch_size
            * accelerator.num_processes
            * config.gradient_accumulation_steps
        )
        with accelerator.main_process_first():  # the others find its cache of packed documents
            train_set, held_out_set, tokenizer = load_datasets(
                config, spec, num_sequences=(config.steps_asked or 0) * sequences_per_step
            )
        model = build_model(spec, config)

    record = RunRecord(
        run_name=run_name,
        identity=identity,
        status="failed",
        strategy=launch.strategy.name,
        asked=asked,
        model=model_facts(spec),
        versions=versions,
        started_at=datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        command=" ".join(launch.command)
        or " ".join([Path(sys.executable).name, "-m slm_toolkit.train", *arguments]),
        gpu=gpu,
        timing_warmup_steps=config.timing_warmup_steps,
    )
    try:
        loss_recorder = RecordedLoss(model)
        optimizer = build_optimizer(model, config, engine=launch.strategy.engine)
        set_seed(config.seed)
        loader = make_loader(train_set, config, train=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        eval_loader = (
            accelerator.prepare_data_loader(make_loader(held_out_set, config, train=False))
            if held_out_set
            else None
        )
        with user_errors():
            running = probe_engine(model)
            check_engine(running, launch)
            num_steps = count_steps(config, loader)
            first_step = step_of(checkpoint) if checkpoint else 0
            if first_step >= num_steps:
                raise ValueError(f"{checkpoint} has all {num_steps} steps done\nhint: give more --max_steps")
        record = dataclasses.replace(
            record,
            world_size=running.world_size,
            engine=running.engine,
            zero_stage=running.zero_stage,
            reshard_after_forward=running.reshard_after_forward,
            attn_implementation=accelerator.unwrap_model(model).config._attn_implementation,
            tokens_per_step=sequences_per_step * config.seq_len,
            first_step=first_step,
            deepspeed_estimate=deepspeed_estimate_of(
                spec, zero_stage=running.zero_stage, world_size=running.world_size, local=local_processes
            ),
        )
        if checkpoint is not None:
            accelerator.load_state(str(checkpoint))
        if accelerator.is_main_process:
            run_dir.mkdir(parents=True, exist_ok=True)
        accelerator.wait_for_everyone()
        observed = train(
            *(accelerator, model, optimizer, loader, eval_loader, loss_recorder, config, run_dir),
            first_step=record.first_step,
            num_steps=num_steps,
            tokens_per_step=record.tokens_per_step,
        )
        if config.save_final_model:
            observed["model_dir"] = str(save_model(accelerator, model, tokenizer, run_dir / "model"))
        record = dataclasses.replace(record, status="ok", **observed)
    except Exception as error:
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        record = dataclasses.replace(record, status="oom" if out_of_memory else "failed", reason=reason)
        write_failure(
            dataclasses.replace(record, seconds_total=time.time() - started), run_dir, started=started
        )
        raise
    if accelerator.is_main_process:
        path = write_record(dataclasses.replace(record, seconds_total=time.time() - started), run_dir)
        print(f"record: {path}", file=sys.stderr)
    del model, optimizer, loader, eval_loader
    accelerator.free_memory()
    gc.collect()
    accelerator.end_training()  # destroys the process group


def train(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    eval_loader: DataLoader | None,
    loss_recorder: RecordedLoss,
    config: RunConfig,
    run_dir: Path,
    *,
    first_step: int,
    num_steps: int,
    tokens_per_step: int,
) -> dict[str, Any]:
    """Steps `first_step` to `num_steps`; returns the observed fields of the record, the same on all ranks."""
    device, deepspeed = accelerator.device, hasattr(model, "zero_optimization_stage")
    progress = None
    if accelerator.is_main_process:
        progress = TrainingProgress(
            run_dir, first_step=first_step, num_steps=num_steps, tokens_per_step=tokens_per_step
        )
    if config.report_to != "none":
        accelerator.init_trackers("slm_toolkit", config=flat(config), init_kwargs=tracker_options(run_dir))
    clock = StepClock(device)
    losses: list[torch.Tensor] = []
    grad_norms: list[torch.Tensor | float] = []
    eval_losses: list[dict[str, float]] = []
    gradients = 0

    def count_gradients() -> None:
        nonlocal gradients
        gradients = gradient_bytes(accelerator, model)

    batches = endless(accelerator, loader, skip=first_step * config.gradient_accumulation_steps)
    reset_peak_memory(device)
    for step in range(first_step, num_steps):
        count_now = step == first_step
        if count_now and deepspeed:
            on_deepspeed_step(accelerator, count_gradients)
        with clock:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step, num_steps)
            step_loss = torch.zeros((), device=device)
            for _ in range(config.gradient_accumulation_steps):
                tokens = next(batches)["input_ids"]
                with accelerator.accumulate(model):
                    loss = model(input_ids=tokens, labels=tokens).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        if count_now and not deepspeed:
                            count_gradients()
                        grad_norms.append(
                            optimizer_step(accelerator, model, optimizer, max_grad_norm=config.max_grad_norm)
                        )
                step_loss += loss_recorder.last / config.gradient_accumulation_steps
            losses.append(step_loss)

        done = step + 1
        if progress is not None and progress.due(done):
            progress.show(done, losses[-1].item())
        if config.report_to != "none":
            mean_loss = accelerator.reduce(losses[-1], reduction="mean").item()
            rate = tokens_per_step / max(gather_to_all(clock.seconds[-1]))
            lr = learning_rate(config, step, num_steps)
            accelerator.log({"loss": mean_loss, "learning_rate": lr, "tokens_per_second": rate}, step=done)
        if eval_loader is not None and (done % config.eval_steps == 0 or done == num_steps):
            eval_loss = evaluate(accelerator, model, eval_loader, loss_recorder, config.eval_batches)
            eval_losses.append({"step": done, "loss": finite(eval_loss)})
            if config.report_to != "none":
                accelerator.log({"eval_loss": eval_loss}, step=done)
        if config.save_steps and done % config.save_steps == 0:
            save_checkpoint(accelerator, run_dir, done, keep=config.save_total_limit)
    if progress is not None:
        progress.close()

    mean_losses = accelerator.reduce(torch.stack(losses), reduction="mean").tolist() if losses else []
    peaks = gather_to_all(peak_memory(device))
    return {
        "losses": [finite(loss) for loss in mean_losses],
        "grad_norms": [finite(float(norm)) for norm in grad_norms],
        "eval_losses": eval_losses,
        "step_seconds": gather_to_all(clock.seconds),
        "state_bytes": gather_to_all(state_bytes(accelerator, model, optimizer, gradients)),
        "peak_allocated_bytes": None if device.type == "cpu" else [peak["allocated"] for peak in peaks],
        "peak_reserved_bytes": None if device.type == "cpu" else [peak["reserved"] for peak in peaks],
        "peak_rss_bytes": [peak["rss"] for peak in peaks],
    }


def write_failure(record: RunRecord, run_dir: Path, *, started: float) -> None:
    """Write why this rank failed, unless another rank of this launch did: its end broke ours off."""
    path = run_dir / RECORD_FILE
    first = not path.is_file() or path.stat().st_mtime < started
    if first or (record.status == "oom" and read_record(path).status != "oom"):
        write_record(record, run_dir)


def learning_rate(config: RunConfig, step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak; `step` counts from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    share_done = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    return config.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * share_done)))


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: torch.nn.Module,
    loader: DataLoader,
    loss_recorder: RecordedLoss,
    num_batches: int,
) -> float:
    """Mean loss over the first `num_batches` held-out batches of every rank."""
    model.eval()
    losses = []
    for _, batch in zip(range(num_batches), loader, strict=False):
        model(input_ids=batch["input_ids"], labels=batch["input_ids"])
        losses.append(loss_recorder.last)
    model.train()
    return accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()


def flat(config: RunConfig) -> dict[str, str | int | float | bool]:
    """The configuration as trackers take it: no None."""
    return {key: "" if value is None else value for key, value in dataclasses.asdict(config).items()}


def tracker_options(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Each tracker's word for the name of a run."""
    return {"trackio": {"name": run_dir.name}, "wandb": {"name": run_dir.name}}


if __name__ == "__main__":
    main()
