"""Sets up a run: checks all input, builds data and model, and hands them to the engine."""

import dataclasses
import os
import shlex
import time
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed

from slm_toolkit.base.errors import user_errors
from slm_toolkit.base.secrets import without_secrets
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.flags import training_config
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.launch.command_line import shared_launch_facts
from slm_toolkit.model.model_spec import ModelSpec, padded_spec
from slm_toolkit.model.names import check_tokenizer, find_model, has_weights, tokenizer_of
from slm_toolkit.predict.choices import completed
from slm_toolkit.predict.deepspeed_estimator import deepspeed_needs
from slm_toolkit.record.run_record import (
    RunRecord,
    everything_asked,
    identity_of,
    installed_versions,
    model_facts,
    run_name_of,
)
from slm_toolkit.record.saved_files import sweep
from slm_toolkit.run.checkpoint.checkpoint import (
    CheckpointWriter,
    check_data,
    choose,
    described,
    fingerprint,
    fingerprint_of_frozen,
    load_state,
    load_weights,
    num_held_out,
)
from slm_toolkit.run.checkpoint.files import DATA, Checkpoint
from slm_toolkit.run.checkpoint.output_dir import (
    check_writable,
    hold_run,
    hold_swap_folder,
    remove_earlier_run,
)
from slm_toolkit.run.checkpoint.start import (
    check_steps_left,
    claim,
    find_start,
    launch_description,
    run_description,
)
from slm_toolkit.run.data.batches import count_steps, make_loader
from slm_toolkit.run.data.data import load_data
from slm_toolkit.run.display import start_tracker
from slm_toolkit.run.engine.engine import (
    build_optimizer,
    check_engine,
    describe_batch,
    probe_engine,
    scale_losses,
    set_reduction,
    start_accelerator,
    without_unused_imports,
)
from slm_toolkit.run.faults.watchdog import Watchdog
from slm_toolkit.run.first_loss import CheckedForward
from slm_toolkit.run.kernels.layer_kernels import check_optional
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.model.model import build_model
from slm_toolkit.run.model.padding import without_padding
from slm_toolkit.run.observe.allocations import AllocationTrace
from slm_toolkit.run.observe.machine_load import driver_version, look_at_gpu
from slm_toolkit.run.observe.measure import num_trainable
from slm_toolkit.run.observe.progress import is_rank_0, say, starting
from slm_toolkit.run.peers.failure import record_mark, seconds_since_start
from slm_toolkit.run.peers.launch_info import (
    Launch,
    absolute_deepspeed_config,
    check_devices,
    check_environment,
    find_launch,
)
from slm_toolkit.run.peers.machines import Machines, let_collectives_wait, num_machines
from slm_toolkit.run.peers.peer_store import name_groups_anew, noted_checkpoint
from slm_toolkit.run.peers.step_exchange import control_group, rank_0_first
from slm_toolkit.run.rehearse import (
    NUM_TRACED_STEPS,
    is_fake,
    pretend_ranks,
    stay_in_place,
    tensors_of,
)
from slm_toolkit.run.run import Run
from slm_toolkit.strategy.checked_run import checked_run


def set_up(arguments: list[str], watchdog: Watchdog, *, fp32_pass: dict[str, Any] | None = None) -> Run:
    """Return a run that is ready for its first step. Exits with code 2 and a hint if an input is wrong.

    The watchdog writes failures to the run's record as soon as all input has been checked.
    """
    machines = watchdog.machines
    with user_errors():
        run = _begin(arguments, machines)
        run.note(fp32_pass=fp32_pass)
        is_ended = _claim_folder(run)
        run.config = run.config.with_steps(run.sequences_per_step)
        candidates = _find_checkpoints(run, is_ended=is_ended)
        _connect_ranks(run, machines)
        run.checkpoint = choose(candidates, run.accelerator)
        _load_data(run)
        _build_model(run)
    mark = record_mark(run.run_dir)
    watchdog.follow(run.record, run.run_dir, mark=mark, config=run.config, num_steps=run.num_steps)
    with tensors_of(run.config), starting(run.run_dir, f"setting up {run.launch.strategy.engine}"):
        _hand_to_engine(run)
        with user_errors():
            _check_engine(run)
    with user_errors():
        mark = _take_folder(run, mark)
    watchdog.follow(run.record, run.run_dir, mark=mark, config=run.config, num_steps=run.num_steps)
    _announce(run)
    return run


def _begin(arguments: list[str], machines: Machines) -> Run:
    """Return a run with checked flags, after all machines have met.

    Raises ValueError if flags, model or YAML are invalid or contradict each other, or if a machine is missing
    or was launched differently.
    """
    launch = find_launch()
    has_gpu = torch.cuda.is_available()
    config, notes = completed(
        training_config(arguments), launch.strategy, has_gpu=has_gpu, num_ranks=launch.num_processes
    )
    for note in notes:
        say(note)
    spec, launch = _check_request(config, launch)
    if num_machines() > 1:
        machines.meet(shared_launch_facts(launch.command, launch.strategy))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    gpu_before = look_at_gpu(local_rank)  # before this process opens it
    if has_gpu:
        torch.cuda.set_device(local_rank)  # without this, all ranks would open GPU 0
    record = _begin_record(config, spec, launch, arguments, machines)
    run_dir = Path(os.path.realpath(config.output_dir), record.run_name)
    return Run(config, spec, launch, run_dir, record, gpu_before)


def _check_request(config: RunConfig, launch: Launch) -> tuple[ModelSpec, Launch]:
    """Return the model and the launch to train. Needs neither other ranks nor the run's folder."""
    spec = find_model(config.model)
    if config.rehearse is not None:
        launch = pretend_ranks(launch, config.rehearse)
    absolute_deepspeed_config(launch.strategy)
    check_environment(launch)
    if config.rehearse is None:
        check_devices(launch, num_gpus=torch.cuda.device_count(), local_processes=_local_world_size())
    checked = checked_run(
        config,
        spec,
        launch.strategy,
        num_ranks=launch.num_processes,
        mixed_precision=launch.mixed_precision,
        has_gpu=torch.cuda.is_available(),
    )
    if checked.taken_out is not None:
        say(checked.taken_out)
    check_optional(config)
    return spec, dataclasses.replace(launch, strategy=checked.strategy)


def _begin_record(
    config: RunConfig, spec: ModelSpec, launch: Launch, arguments: list[str], machines: Machines
) -> RunRecord:
    """Return the record of what was asked, under the run's name."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    asked, versions = everything_asked(config, launch.strategy, launch.num_processes), installed_versions()
    identity = identity_of(asked, versions, gpu)
    local_name = config.run_name or run_name_of(spec, launch.strategy, identity)
    weights, tokenizer = _origins(config, spec)
    typed = ("python", "-m", "slm_toolkit.train", *without_secrets(arguments))
    started = time.time() - seconds_since_start()
    return RunRecord(
        run_name=machines.of_rank_0("run_name", local_name),
        identity=identity,
        status="failed",  # becomes "ok" at the end
        strategy=launch.strategy.name,
        asked=asked,
        model=model_facts(spec),
        weights=weights,
        tokenizer=tokenizer,
        versions={**versions, **driver_version()},  # the run's name does not depend on the driver
        started_at=datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        command=shlex.join(launch.command or typed),
        gpu=gpu,
    )


def _origins(config: RunConfig, spec: ModelSpec) -> tuple[str, str]:
    """Return the origins of weights and tokenizer: an absolute path, a hub id, or a description."""

    def absolute(path: str) -> str:
        folder = typed_path(path)
        return str(folder.resolve()) if exists(folder) else path

    weights = f"random, seed {config.seed}"
    if has_weights(spec) and config.rehearse is None:
        weights = absolute(spec.path)
    elif spec.path is not None and config.rehearse is None:
        weights += f", because {absolute(spec.path)} has no weights"
    if config.dataset == SYNTHETIC:
        return weights, "none, synthetic tokens"
    tokenizer = tokenizer_of(config, spec)
    return weights, "bytes" if tokenizer is None else absolute(tokenizer)


def _claim_folder(run: Run) -> bool:
    """Lock the run's folder against other trainings, if it exists. Return whether this run has ended in it.

    Raises ValueError if the run can't use the folder. Exits if --resume_from_checkpoint is auto and the run
    has already ended.
    """
    config = run.config
    is_ended = claim(run.run_dir, config, run.spec, run.record.identity)
    if is_rank_0() and config.rehearse is None:
        for folder in run.launch.strategy.swap_folders:
            hold_swap_folder(Path(folder))
    return is_ended


def _find_checkpoints(run: Run, *, is_ended: bool) -> list[Checkpoint]:
    """Return the checkpoints that the run may resume from, best first.

    Raises ValueError if the requested one does not exist, or if the run would replace another run's files.
    """
    config = run.config
    resume = noted_checkpoint() or config.resume_from_checkpoint
    description = run_description(config, run.sequences_per_step)
    check_tokenizer(config, run.spec)
    return find_start(run.run_dir, config, description, resume, is_ended=is_ended)


def _connect_ranks(run: Run, machines: Machines) -> None:
    if is_rank_0():
        check_writable(run.run_dir)
    name_groups_anew()
    with machines.connecting():
        run.accelerator = start_accelerator(run.launch, run.config, project_dir=str(run.run_dir))
        run.control_group = control_group(run.accelerator)


def _load_data(run: Run) -> None:
    """Raises ValueError if the checkpoint was written with other data."""
    config, spec = run.config, run.spec
    say(f"weights: {run.record.weights}; tokenizer: {run.record.tokenizer}")
    if has_weights(spec) and config.seq_len > spec.max_position_embeddings:
        trained_for = f"the {spec.max_position_embeddings} positions that {spec.name} was trained for"
        say(f"note: --seq_len {config.seq_len} is longer than {trained_for}")
    if is_fake(config):
        return
    num_sequences = (config.steps_asked or 0) * run.sequences_per_step
    sizes = {"num_sequences": num_sequences, "num_held_out": num_held_out(run.checkpoint)}
    with starting(run.run_dir, f"reading data: {config.dataset}"):
        run.data = rank_0_first(lambda: load_data(config, spec, **sizes))
    if run.checkpoint is not None:
        check_data(run.checkpoint, run.data.contents)


def _build_model(run: Run) -> None:
    """Build the model; if the run resumes, load the checkpoint's weights."""
    config, spec, checkpoint = run.config, run.spec, run.checkpoint
    stage = f"{'loading' if has_weights(spec) else 'building'} {spec.name}"
    with starting(run.run_dir, stage), tensors_of(config):
        apart = run.data is not None and run.data.documents_apart
        run.model = model = build_model(spec, config, documents_apart=apart)
    if is_fake(config):
        run.accelerator.device_placement = False
        stay_in_place(model)
    if checkpoint is not None:
        load_weights(model, checkpoint)
        run.note(
            first_step=checkpoint.manifest.step, resumed_from=described(checkpoint, _launch_description(run))
        )
    elif config.rehearse is None:
        run.note(weights_fingerprint=fingerprint(without_padding(model, model.named_parameters())))


def _launch_description(run: Run) -> dict[str, Any]:
    """Return the settings that may change when a run resumes."""
    return launch_description(run.config, run.launch.strategy, run.launch.num_processes)


def _hand_to_engine(run: Run) -> None:
    """Prepare everything with accelerate."""
    config, accelerator, data = run.config, run.accelerator, run.data
    frozen = fingerprint_of_frozen(run.model) if config.save_steps else None
    if config.profile == "memory" or is_fake(config):
        run.trace = AllocationTrace(fake=is_fake(config), device_type=accelerator.device.type)
        run.trace.adopt(run.model.parameters(), "parameters")
    run.loss_recorder = RecordedLoss(run.model)
    optimizer = build_optimizer(run.model, config, run.launch.strategy)
    set_seed(config.seed)
    with run.trace or nullcontext(), without_unused_imports(run.launch.strategy):
        if data is not None:
            run.loader = accelerator.prepare_data_loader(make_loader(data.train, config, train=True))
        run.model, run.optimizer = accelerator.prepare(run.model, optimizer)
    let_collectives_wait()
    if config.numerics == "fp16":
        scale_losses(accelerator, run.model, run.optimizer)
    set_reduction(run.model, config)
    run.forward = CheckedForward(config, accelerator, run.model, run.loss_recorder)
    for name, sequences in data.held_out.items() if data is not None else ():
        held_out = make_loader(sequences, config, train=False, num_ranks=accelerator.num_processes)
        run.eval_loaders[name] = accelerator.prepare_data_loader(held_out)
    if config.save_steps is not None:
        run.checkpoint_writer = CheckpointWriter(
            accelerator,
            run.model,
            run.optimizer,
            run.run_dir,
            run={**run_description(config, run.sequences_per_step), DATA: data.contents},
            written_by=_launch_description(run),
            frozen=frozen,
            keep=config.save_total_limit,
        )


def _check_engine(run: Run) -> None:
    """Record the engine that really runs; count the steps, and load the checkpoint's state.

    Raises ValueError if the engine is not the YAML's.
    """
    config, running = run.config, probe_engine(run.model)
    check_engine(running, run.launch)
    trainable = estimate = None
    if config.peft != "none":
        trainable = num_trainable(run.model)
    else:  # DeepSpeed's estimate ignores frozen parameters
        spec, local = padded_spec(run.spec) if config.pad_widths else run.spec, _local_world_size()
        needs = deepspeed_needs(
            spec.num_params,
            spec.largest_layer_params,
            zero_stage=running.zero_stage,
            num_gpus_per_node=local,
            num_nodes=running.world_size // local,
        )
        estimate = needs and {"gpu_bytes": needs.gpu_bytes, "cpu_bytes": needs.host_bytes_per_node}
    run.note(
        **dataclasses.asdict(running),
        num_machines=None if config.rehearse else num_machines(),
        attn_implementation=config.attn_implementation,
        num_trainable_params=trainable,
        tokens_per_step=run.sequences_per_step * config.seq_len,
        deepspeed_estimate=estimate,
    )
    run.num_steps = NUM_TRACED_STEPS
    if run.loader is not None:
        run.num_steps = count_steps(config, run.loader, run.num_micro_steps)
    if run.checkpoint is not None:
        check_steps_left(run.checkpoint, run.num_steps, config.resume_from_checkpoint, run.run_dir)
        load_state(run.checkpoint, run.model, run.optimizer, run.accelerator)


def _take_folder(run: Run, mark: int | None) -> int | None:
    """Lock the folder and remove what is not this run's. Return the mark of the record that is left in it."""
    if run.accelerator.is_main_process:
        hold_run(run.run_dir)
    if run.config.overwrite_output_dir and run.checkpoint is None:
        remove_earlier_run(run.run_dir, run.accelerator)
        return None
    return mark


def _announce(run: Run) -> None:
    """Start the tracker, and print the lines before the first step."""
    if run.accelerator.is_main_process:
        sweep(run.run_dir)
    start_tracker(run)
    run.accelerator.wait_for_everyone()
    if run.data is not None:
        say(describe_batch(run.config, run.sequences_per_step, run.launch))
    if run.checkpoint is not None:
        conversion = run.record.resumed_from["conversion"]
        say(f"resumed from {run.checkpoint.path}" + (f", {conversion}" if conversion else ""))


def _local_world_size() -> int:
    """Return the number of this launch's processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
