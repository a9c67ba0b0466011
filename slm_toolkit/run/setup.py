"""Sets up and checks a run, then hands model, optimizer and data to the engine."""

import dataclasses
import os
import shlex
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.distributed import ProcessGroup
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from slm_toolkit.base.errors import user_errors
from slm_toolkit.base.secrets import without_secrets
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.launch.command_line import shared_launch_facts
from slm_toolkit.model.from_config import check_trainable
from slm_toolkit.model.model_spec import ModelSpec, padded_spec
from slm_toolkit.model.names import (
    check_adapter_base,
    check_tokenizer,
    find_model,
    has_weights,
    tokenizer_of,
)
from slm_toolkit.predict.deepspeed_estimator import live_deepspeed_needs
from slm_toolkit.record.run_record import (
    RunRecord,
    everything_asked,
    identity_of,
    installed_versions,
    model_facts,
    run_name_of,
)
from slm_toolkit.run.checkpoint.checkpoint import (
    CheckpointWriter,
    fingerprint,
    fingerprint_of_frozen,
)
from slm_toolkit.run.checkpoint.files import DATA
from slm_toolkit.run.checkpoint.output_dir import check_writable, hold_swap_folder
from slm_toolkit.run.checkpoint.resume import (
    check_data,
    choose,
    described,
    load_state,
    load_weights,
    num_held_out,
)
from slm_toolkit.run.checkpoint.start import (
    Checkpoint,
    check_steps_left,
    claim,
    find_start,
    launch_description,
    run_description,
)
from slm_toolkit.run.data.batches import count_steps, make_loader
from slm_toolkit.run.data.data import Data, load_data
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
from slm_toolkit.run.faults.restarts import name_groups_anew, noted_checkpoint
from slm_toolkit.run.first_loss import CheckedForward
from slm_toolkit.run.kernels.layer_kernels import check_optional
from slm_toolkit.run.model.adapters import check_adapters
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.model.model import build_model
from slm_toolkit.run.model.padding import without_padding
from slm_toolkit.run.observe.allocations import AllocationTrace
from slm_toolkit.run.observe.machine_load import GpuBefore, driver_version, look_at_gpu
from slm_toolkit.run.observe.measure import num_trainable
from slm_toolkit.run.observe.progress import starting
from slm_toolkit.run.peers.launch_info import (
    Launch,
    absolute_deepspeed_config,
    check_devices,
    check_environment,
    find_launch,
)
from slm_toolkit.run.peers.machines import Machines, let_collectives_wait, num_machines
from slm_toolkit.run.peers.step_exchange import control_group, rank_0_first
from slm_toolkit.run.rehearse import (
    NUM_TRACED_STEPS,
    is_fake,
    pretend_ranks,
    stay_in_place,
    tensors_of,
)
from slm_toolkit.strategy.deepspeed_optimizer import as_flags_say
from slm_toolkit.strategy.strategy import contradictions, sequences_per_step


def deepspeed_estimate_of(
    spec: ModelSpec, *, zero_stage: int | None, world_size: int, local: int
) -> dict[str, int] | None:
    """Return DeepSpeed's own estimate in bytes per GPU and per node's host; None unless ZeRO-2 or ZeRO-3.

    `local`: the ranks on each node.
    """
    needs = live_deepspeed_needs(
        spec.num_params,
        spec.largest_layer_params,
        zero_stage=zero_stage,
        num_gpus_per_node=local,
        num_nodes=world_size // local,
    )
    return {"gpu_bytes": needs.gpu_bytes, "cpu_bytes": needs.host_bytes_per_node} if needs else None


@dataclass(frozen=True)
class Job:
    """A run that is set up: all user input has been checked, and nothing has been written yet."""

    config: RunConfig
    spec: ModelSpec
    launch: Launch
    accelerator: Accelerator
    run_dir: Path
    checkpoint: Checkpoint | None
    "the checkpoint that the run resumes from"
    description: dict[str, Any]
    "the settings that must stay equal when a run resumes from this run's checkpoints"
    launch_description: dict[str, Any]
    "the settings that may change when a run resumes"
    fingerprint_of_frozen: str | None
    data: Data | None
    "None in a rehearsal on fake tensors"
    model: PreTrainedModel
    gpu_before: GpuBefore
    batch_described: str
    "one line: the sequences per step, and the learning rate if it was scaled"
    control_group: ProcessGroup | None


@dataclass(frozen=True)
class Prepared:
    """The objects of a job after `accelerator.prepare`, wrapped by the engine."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader | None
    "None in a rehearsal on fake tensors"
    eval_loaders: dict[str, DataLoader]
    "by held-out set"
    loss_recorder: RecordedLoss
    num_steps: int
    num_micro_steps: int
    "per optimizer step, as the engine counts them: in `stock`, a DeepSpeed JSON's value overrides the flag"
    checkpoint_writer: CheckpointWriter | None
    "None without --save_steps"
    forward: CheckedForward
    trace: AllocationTrace | None
    "only if allocations are traced; already includes the engine's allocations in `accelerate.prepare`"


def set_up(
    config: RunConfig, arguments: list[str], started: float, machines: Machines
) -> tuple[Job, RunRecord]:
    """Check all user input, then build data and model. Raises ValueError with a hint."""
    request = _check_request(config)
    folder = _claim_folder(request, machines)
    start = _choose_start(request, folder)
    built = _build(request, start, folder.run_dir)
    job = Job(
        config=start.config,
        spec=request.spec,
        launch=request.launch,
        accelerator=start.accelerator,
        run_dir=folder.run_dir,
        checkpoint=start.checkpoint,
        description=built.description,
        launch_description=start.launch_description,
        fingerprint_of_frozen=fingerprint_of_frozen(built.model) if start.config.save_steps else None,
        data=built.data,
        model=built.model,
        gpu_before=folder.gpu_before,
        batch_described=start.batch_described,
        control_group=start.control_group,
    )
    return job, _record_at_start(job, folder, built, arguments, started)


@dataclass(frozen=True)
class _Request:
    """Flags, model and launch, after the checks that need neither other ranks nor the run's folder."""

    config: RunConfig
    spec: ModelSpec
    launch: Launch


def _check_request(config: RunConfig) -> _Request:
    """Raise ValueError if flags, model or YAML are invalid or contradict each other."""
    config.check()
    spec, launch = find_model(config.model), find_launch()
    check_trainable(spec, config)
    if config.rehearse is not None:
        launch = pretend_ranks(launch, config.rehearse)
    absolute_deepspeed_config(launch.strategy)
    check_environment(launch)
    if config.rehearse is None:
        check_devices(launch, num_gpus=torch.cuda.device_count(), local_processes=local_world_size())
    problems = contradictions(
        launch.strategy,
        config,
        num_processes=launch.num_processes,
        mixed_precision=launch.mixed_precision,
        has_gpu=torch.cuda.is_available(),
    )
    if problems:
        raise ValueError("\n".join(problems) + "\nhint: see --help of the flag")
    strategy, taken_out = as_flags_say(launch.strategy, config)
    if taken_out is not None:
        _print_on_rank_0(taken_out)
    check_optional(config)
    check_adapters(config)
    check_adapter_base(config, spec)
    return _Request(config=config, spec=spec, launch=dataclasses.replace(launch, strategy=strategy))


@dataclass(frozen=True)
class _ClaimedFolder:
    """The run's folder, locked by rank 0 if it exists, and the facts that make up the run's name."""

    run_dir: Path
    run_name: str
    identity: str
    asked: dict[str, Any]
    versions: dict[str, str]
    gpu: str | None
    gpu_before: GpuBefore
    machines: Machines
    is_ended: bool
    "True if the folder contains this run's record with all steps done"


def _claim_folder(request: _Request, machines: Machines) -> _ClaimedFolder:
    """Meet the other machines, name the run and lock its folder against other trainings.

    Raises ValueError if the run can't use the folder. Exits if --resume_from_checkpoint is auto and the run
    has already ended.
    """
    config, launch = request.config, request.launch
    if num_machines() > 1:
        machines.meet(shared_launch_facts(launch.command, launch.strategy))
    gpu = None
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    gpu_before = look_at_gpu(local_rank)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)  # without this, all ranks would open GPU 0
        gpu = torch.cuda.get_device_name()
    asked, versions = everything_asked(config, launch.strategy, launch.num_processes), installed_versions()
    identity = identity_of(asked, versions, gpu)
    local_name = config.run_name or run_name_of(request.spec, launch.strategy, identity)
    run_name = machines.of_rank_0("run_name", local_name)
    run_dir = Path(os.path.realpath(config.output_dir), run_name)
    is_ended = claim(run_dir, config, request.spec, identity)
    if _is_rank_0() and config.rehearse is None:
        for folder in launch.strategy.swap_folders:
            hold_swap_folder(Path(folder))
    if config.save_steps or config.resume_from_checkpoint:
        flag = f"--save_steps {config.save_steps}" if config.save_steps else "--resume_from_checkpoint"
        machines.check_shared(run_dir.parent, flag=flag)
    return _ClaimedFolder(
        run_dir=run_dir,
        run_name=run_name,
        identity=identity,
        asked=asked,
        versions=versions,
        gpu=gpu,
        gpu_before=gpu_before,
        machines=machines,
        is_ended=is_ended,
    )


@dataclass(frozen=True)
class _Start:
    """The connected ranks and the point from which the run starts."""

    config: RunConfig
    "with this attempt's batch size and learning rate"
    accelerator: Accelerator
    control_group: ProcessGroup | None
    checkpoint: Checkpoint | None
    description: dict[str, Any]
    "like Job.description, but without the data"
    launch_description: dict[str, Any]
    sequences_per_step: int
    batch_described: str


def _choose_start(request: _Request, folder: _ClaimedFolder) -> _Start:
    """Connect the ranks and choose the checkpoint to resume from, if any.

    Raises ValueError if the checkpoint does not exist, or if the run would replace another run's files.
    """
    launch, run_dir = request.launch, folder.run_dir
    per_step = sequences_per_step(request.config, launch.strategy, launch.num_processes)
    config = request.config.with_steps(per_step)
    description = run_description(config, per_step)
    resume = noted_checkpoint() or config.resume_from_checkpoint
    candidates = find_start(run_dir, config, description, resume, is_ended=folder.is_ended)
    if all(candidate.is_foreign for candidate in candidates):
        check_tokenizer(config, request.spec)
    if _is_rank_0():
        check_writable(run_dir)
    name_groups_anew()
    with folder.machines.connecting():
        accelerator = start_accelerator(launch, config, project_dir=str(run_dir))
        group = control_group(accelerator)
    checkpoint = choose(candidates, accelerator)
    return _Start(
        config=config,
        accelerator=accelerator,
        control_group=group,
        checkpoint=checkpoint,
        description=description,
        launch_description=launch_description(config, launch.strategy, launch.num_processes),
        sequences_per_step=per_step,
        batch_described=describe_batch(config, per_step, launch),  # shows the unscaled learning rate, too
    )


@dataclass(frozen=True)
class _Built:
    """Data and model, and the origin of weights and tokenizer."""

    data: Data | None
    model: PreTrainedModel
    weights: str
    tokenizer: str
    description: dict[str, Any]
    "see Job.description"


def _build(request: _Request, start: _Start, run_dir: Path) -> _Built:
    """Load the data and build the model; if the run resumes, load the checkpoint's weights."""
    config, spec, checkpoint = start.config, request.spec, start.checkpoint
    is_main = start.accelerator.is_main_process
    weights, tokenizer = _origins(config, spec)
    _print_on_rank_0(f"weights: {weights}; tokenizer: {tokenizer}")
    if has_weights(spec) and config.seq_len > spec.max_position_embeddings:
        trained_for = f"the {spec.max_position_embeddings} positions that {spec.name} was trained for"
        _print_on_rank_0(f"note: --seq_len {config.seq_len} is longer than {trained_for}")
    data, description = None, start.description
    if not is_fake(config):
        num_sequences = (config.steps_asked or 0) * start.sequences_per_step
        sizes = {"num_sequences": num_sequences, "num_held_out": num_held_out(checkpoint)}
        with starting(run_dir, f"reading data: {config.dataset}", is_main=is_main):
            data = rank_0_first(lambda: load_data(config, spec, **sizes))
        if checkpoint is not None:
            check_data(checkpoint, data.contents)
        description = {**description, DATA: data.contents}
    stage = f"{'loading' if has_weights(spec) else 'building'} {spec.name}"
    with starting(run_dir, stage, is_main=is_main), tensors_of(config):
        apart = data is not None and data.documents_apart
        model = build_model(spec, config, documents_apart=apart)
    if is_fake(config):
        start.accelerator.device_placement = False
        stay_in_place(model)
    if checkpoint is not None:
        load_weights(model, checkpoint)
    return _Built(data=data, model=model, weights=weights, tokenizer=tokenizer, description=description)


def _record_at_start(
    job: Job,
    folder: _ClaimedFolder,
    built: _Built,
    arguments: list[str],
    started: float,
) -> RunRecord:
    """Return the record before step 1."""
    typed = ("python", "-m", "slm_toolkit.train", *without_secrets(arguments))
    has_own_weights = job.checkpoint is None and job.config.rehearse is None
    params = without_padding(job.model, job.model.named_parameters())
    return RunRecord(
        run_name=folder.run_name,
        identity=folder.identity,
        status="failed",  # becomes "ok" at the end
        strategy=job.launch.strategy.name,
        asked=folder.asked,
        model=model_facts(job.spec),
        weights=built.weights,
        tokenizer=built.tokenizer,
        versions={**folder.versions, **driver_version()},  # the run's name does not depend on the driver
        started_at=datetime.fromtimestamp(started, UTC).isoformat(timespec="seconds"),
        command=shlex.join(job.launch.command or typed),
        gpu=folder.gpu,
        weights_fingerprint=fingerprint(params) if has_own_weights else None,
        first_step=job.checkpoint.manifest.step if job.checkpoint else 0,
        resumed_from=described(job.checkpoint, job.launch_description) if job.checkpoint else None,
    )


def _is_rank_0() -> bool:
    """Return True if the launcher made this process rank 0; works before the ranks are connected."""
    return os.environ.get("RANK", "0") == "0"


def _print_on_rank_0(line: str) -> None:
    """Print a line of the start. A log on a full disk ends the run later, when a record can say why."""
    if _is_rank_0():
        with suppress(OSError):
            print(line, file=sys.stderr)


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


def prepare(job: Job, record: RunRecord) -> tuple[Prepared, RunRecord]:
    """Hand everything to the engine. Exits with an error if the running engine is not the YAML's."""
    config, accelerator = job.config, job.accelerator
    trace = None
    if config.profile == "memory" or is_fake(config):
        trace = AllocationTrace(fake=is_fake(config), device_type=accelerator.device.type)
        trace.adopt(job.model.parameters(), "parameters")
    loss_recorder = RecordedLoss(job.model, of_tokens=job.data is not None and len(job.data.names) > 1)
    optimizer = build_optimizer(job.model, config, job.launch.strategy)
    set_seed(config.seed)
    loader = None
    with trace or nullcontext(), without_unused_imports(job.launch.strategy):
        if job.data is not None:
            loader = accelerator.prepare_data_loader(make_loader(job.data.train, config, train=True))
        model, optimizer = accelerator.prepare(job.model, optimizer)
    let_collectives_wait()
    if config.numerics == "fp16":
        scale_losses(accelerator, model, optimizer)
    set_reduction(model, config)
    held_out = job.data.held_out if job.data is not None else {}
    num_ranks = accelerator.num_processes
    eval_loaders = {
        name: accelerator.prepare_data_loader(
            make_loader(sequences, config, train=False, num_ranks=num_ranks)
        )
        for name, sequences in held_out.items()
    }
    with user_errors():
        running = probe_engine(model)
        check_engine(running, job.launch)
        num_micro_steps = accelerator.gradient_accumulation_steps
        num_steps = NUM_TRACED_STEPS if loader is None else count_steps(config, loader, num_micro_steps)
        if job.checkpoint is not None:
            check_steps_left(job.checkpoint, num_steps, config.resume_from_checkpoint, job.run_dir)
            load_state(job.checkpoint, model, optimizer, accelerator)
    per_step = sequences_per_step(config, job.launch.strategy, job.launch.num_processes)
    record = dataclasses.replace(
        record,
        world_size=running.world_size,
        num_machines=None if config.rehearse else num_machines(),
        engine=running.engine,
        zero_stage=running.zero_stage,
        reshard_after_forward=running.reshard_after_forward,
        attn_implementation=config.attn_implementation,
        num_trainable_params=num_trainable(model) if config.peft != "none" else None,
        tokens_per_step=per_step * config.seq_len,
        deepspeed_estimate=None
        if config.peft != "none"  # DeepSpeed's estimate ignores frozen parameters
        else deepspeed_estimate_of(
            padded_spec(job.spec) if config.pad_widths else job.spec,
            zero_stage=running.zero_stage,
            world_size=running.world_size,
            local=local_world_size(),
        ),
    )
    writer = None
    if config.save_steps is not None:
        writer = CheckpointWriter(
            accelerator,
            model,
            optimizer,
            job.run_dir,
            run=job.description,
            written_by=job.launch_description,
            frozen=job.fingerprint_of_frozen,
            keep=config.save_total_limit,
        )
    prepared = Prepared(
        model=model,
        optimizer=optimizer,
        loader=loader,
        eval_loaders=eval_loaders,
        loss_recorder=loss_recorder,
        num_steps=num_steps,
        num_micro_steps=num_micro_steps,
        checkpoint_writer=writer,
        forward=CheckedForward(config, accelerator, model, loss_recorder),
        trace=trace,
    )
    return prepared, record


def local_world_size() -> int:
    """Return the number of this launch's processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
