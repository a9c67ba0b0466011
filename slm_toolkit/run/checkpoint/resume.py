"""Resumes a run: finds the checkpoint, checks it, and loads its state under any engine."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from slm_toolkit.base.user_files import typed_path
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR, finished, saved_model
from slm_toolkit.run.checkpoint.checkpoint import (
    RANDOM_CPU,
    RANDOM_CUDA,
    fingerprint_of_frozen,
    is_of,
    plain,
    readable_manifests,
)
from slm_toolkit.run.checkpoint.files import (
    DATA,
    NUM_HELD_OUT,
    Manifest,
    Reader,
    damage,
    file_of_rank,
    read_manifest,
)
from slm_toolkit.run.engine.training_state import (
    Stretch,
    initial_weights,
    num_elements,
    set_optimizer_steps,
    stretches,
    trained,
)
from slm_toolkit.run.peers.step_exchange import gather_to_all


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a run may go on from."""

    path: Path
    manifest: Manifest


def find_checkpoints(
    resume: str, run_dir: Path, run: dict[str, Any], *, num_steps: int | None
) -> list[Checkpoint]:
    """The checkpoints that `resume`, of --resume_from_checkpoint, may mean, the best first; `choose` takes
    the first undamaged one.

    `latest` and `auto` mean this run's newest, `auto` first those before `num_steps`, its last step; a run's
    folder means that run's newest, any other folder means itself. Empty for `auto` if there is none.
    Raises ValueError if there is none otherwise, or none that this run can go on from.
    """
    folder = Path(os.path.realpath(typed_path(resume)))
    if resume == "latest":
        return _newest(run_dir, run, can_be_none=False)
    if resume == "auto":
        newest = _newest(run_dir, run, can_be_none=True)
        # a run killed after its last checkpoint, before its record, does its last steps again
        return sorted(newest, key=lambda one: num_steps is not None and one.manifest.step >= num_steps)
    of_run = folder.parent if folder.name == CHECKPOINTS_DIR else folder
    if (of_run / CHECKPOINTS_DIR).is_dir():
        return _newest(of_run, run, can_be_none=False)
    if not folder.is_dir():
        raise ValueError(
            f"no such checkpoint: {resume}\nhint: they are runs/<run>/checkpoints/step_<k>, or say latest"
        )
    manifest = read_manifest(folder)
    _check_alike(folder, manifest, run)
    return [Checkpoint(folder, manifest)]


def _newest(run_dir: Path, run: dict[str, Any], *, can_be_none: bool) -> list[Checkpoint]:
    folder = run_dir / CHECKPOINTS_DIR
    manifests = readable_manifests(folder, warn=True)
    of_run = [(m.order, path) for path, m in manifests.items() if is_of(m, run)]
    if of_run:
        return [Checkpoint(path, manifests[path]) for _, path in sorted(of_run, reverse=True)]
    if manifests:
        newest = max(manifests, key=lambda path: manifests[path].order)
        _check_alike(newest, manifests[newest], run)
    elif there := finished(folder):
        raise ValueError(
            f"of {len(there)} checkpoints under {folder} none can be read\nhint: see above; what wrote them "
            "reads them, or start again with another --run_name"
        )
    if can_be_none:
        return []
    raise ValueError(
        f"no checkpoint under {folder}\nhint: --save_steps writes them, --run_name names the folder; auto "
        "starts anew where there is none"
    )


def check_place(run_dir: Path, run: dict[str, Any], *, starts: bool, has_ended: bool) -> None:
    """Raises ValueError if the run would replace another run's checkpoints or, if it `starts` from the
    beginning, its own checkpoints or the model in its folder.

    has_ended: whether the folder holds the record of this very run, with all its steps done.
    """
    replaces = "; --overwrite_output_dir deletes {} and starts from the beginning" if starts else ""
    manifests = readable_manifests(run_dir / CHECKPOINTS_DIR)
    for path, manifest in manifests.items():
        if not is_of(manifest, run):
            differences = _differences(manifest, run) or "a step has other numbers of sequences"
            raise ValueError(
                f"{path} is of another run, and this one's checkpoints would take its place: {differences}\n"
                "hint: another --run_name or --output_dir; or the flags that it was written with"
                + replaces.format("it")
            )
    if not starts:
        return
    if manifests:
        newest = max(manifests, key=lambda path: manifests[path].order)
        ended = ", which has ended" if has_ended else ""
        more = " and a larger --max_steps go on" if has_ended else " goes on"
        raise ValueError(
            f"{run_dir} holds the checkpoints of this run{ended}, and a new start would replace them\n"
            f"hint: --resume_from_checkpoint latest{more} from {newest.name}{replaces.format('them')}"
        )
    if unreadable := finished(run_dir / CHECKPOINTS_DIR):
        raise ValueError(
            f"{unreadable[-1]} can't be read, and a new start would replace it\n"
            f"hint: another --run_name keeps it{replaces.format('it')}"
        )
    if (model := saved_model(run_dir)) is not None:
        raise ValueError(
            f"{model} is the model of an earlier run, and a new start would replace it\n"
            f"hint: another --run_name keeps it{replaces.format('it')}"
        )


def num_held_out(checkpoint: Checkpoint | None) -> int | None:
    """How many sequences the earlier run held out of each stream; None if it had no stream."""
    of_data = checkpoint.manifest.run[DATA] if checkpoint else []
    return max((content[NUM_HELD_OUT] for content in of_data if NUM_HELD_OUT in content), default=None)


def check_data(checkpoint: Checkpoint, contents: list[dict[str, Any]]) -> None:
    """Raises ValueError if the data has changed since the checkpoint was written."""
    before = checkpoint.manifest.run[DATA]
    if before != plain({DATA: contents})[DATA]:
        sizes = [[content.get("num_sequences") for content in of_run] for of_run in (before, contents)]
        counts = f": {sizes[0]} sequences then, {sizes[1]} now" if sizes[0] != sizes[1] else ""
        raise ValueError(
            f"the data has changed since {checkpoint.path} was written{counts}\n"
            "hint: a run goes on with the data that it began with; for other data start from its saved model"
        )


def choose(candidates: list[Checkpoint], accelerator: Accelerator) -> Checkpoint | None:
    """The first undamaged candidate, which all ranks check together; damaged ones are named on stderr.

    None without candidates. Raises ValueError if all are damaged, or if ranks see different ones.
    """
    seen = gather_to_all([str(candidate.path) for candidate in candidates])
    if odd := [rank for rank, paths in enumerate(seen) if paths != seen[0]]:
        raise ValueError(
            f"rank {odd[0]} sees other checkpoints than rank 0: {seen[odd[0]]}, {seen[0]}\n"
            "hint: --output_dir on a file system that all machines share; or again in a minute"
        )
    for checkpoint in candidates:
        share = checkpoint.manifest.files[accelerator.process_index :: accelerator.num_processes]
        problems = [problem for problem in gather_to_all(damage(checkpoint.path, share)) if problem]
        if not problems:
            return checkpoint
        if accelerator.is_main_process:
            print(f"warning: {checkpoint.path} is damaged and skipped: {problems[0]}", file=sys.stderr)
    if candidates:
        raise ValueError(
            f"every checkpoint under {candidates[0].path.parent} is damaged\nhint: start again without "
            "--resume_from_checkpoint"
        )
    return None


def load_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Load the weights into a model that no engine has prepared yet, in the dtype it computes with.

    Raises ValueError if the model has other parameters, or other frozen weights than before.
    """
    reader, expected = Reader(checkpoint.path, checkpoint.manifest), checkpoint.manifest.num_elements
    here = {name: num_elements(param) for name, param in trained(model)}
    if here != expected:
        unlike = sorted(name for name in {*here, *expected} if here.get(name) != expected.get(name))
        raise ValueError(
            f"{checkpoint.path} is of another model: {', '.join(unlike[:3])}"
            f"{f' and {len(unlike) - 3} more' if len(unlike) > 3 else ''}\nhint: give the --model it was of"
        )
    if fingerprint_of_frozen(model) != checkpoint.manifest.frozen:
        raise ValueError(
            f"{checkpoint.path} is of an adapter of other frozen weights\nhint: give the --model it was of"
        )
    for part in initial_weights(model):
        if part.size:
            part.tensor.copy_(_read(reader, part))


def load_state(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: Any, accelerator: Accelerator
) -> None:
    """Load master weights and moments into the prepared model and optimizer; every rank reads its share."""
    reader = Reader(checkpoint.path, checkpoint.manifest)
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    for part in stretches(model, optimizer, **ranks):
        if part.size:
            part.tensor.copy_(_read(reader, part))
    set_optimizer_steps(model, optimizer, checkpoint.manifest.optimizer_steps)
    if accelerator.scaler is not None and checkpoint.manifest.scaler is not None:
        accelerator.scaler.load_state_dict(checkpoint.manifest.scaler)


def load_random_states(checkpoint: Checkpoint, accelerator: Accelerator) -> None:
    """Let dropout continue its random numbers; on another number of processes they start from the seed again.

    Raises ValueError if torch refuses this rank's state.
    """
    if checkpoint.manifest.written_by["num_processes"] != accelerator.num_processes:
        return
    reader = Reader(checkpoint.path, checkpoint.manifest)
    rank = accelerator.process_index
    setters = {RANDOM_CPU: torch.set_rng_state}
    if torch.cuda.is_available():
        setters[RANDOM_CUDA] = torch.cuda.set_rng_state
    for name, set_state in setters.items():
        state = reader.of_rank(rank, name)
        if state is None and name == RANDOM_CUDA:  # written on a CPU
            continue
        try:
            set_state(state)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"{checkpoint.path / file_of_rank(rank)}: {name} is no state of torch's random numbers: "
                f"{str(error).splitlines()[0]}\nhint: resume from another checkpoint"
            ) from None


def described(checkpoint: Checkpoint, here: dict[str, Any]) -> dict[str, Any]:
    """The record's resumed_from: the checkpoint that the run goes on from."""
    manifest = checkpoint.manifest
    conversion = _conversion(manifest, here)
    return {
        "path": str(checkpoint.path),
        "step": manifest.step,
        **manifest.written_by,
        "conversion": conversion,
    }


def _conversion(manifest: Manifest, here: dict[str, Any]) -> str | None:
    """A sentence on what changes if the run goes on under another strategy, batch or number of processes."""
    before = manifest.written_by
    changes = []
    if any(before[key] != here[key] for key in ("strategy", "num_processes")):
        then, now = (f"{side['strategy']} x {side['num_processes']}" for side in (before, here))
        changes.append(
            f"written under {then}, goes on under {now}: weights and AdamW's moments of "
            f"{len(manifest.num_elements)} tensors are dealt out anew"
        )
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if any(before[key] != here[key] for key in batch):
        then, now = (" x ".join(str(side[key]) for key in batch) for side in (before, here))
        changes.append(
            f"a step's {manifest.run['sequences_per_step']} sequences are {now} on a process, not {then}"
        )
    return "; ".join(changes) or None


def _read(reader: Reader, part: Stretch) -> torch.Tensor:
    return reader.read(f"{part.kind}/{part.name}", part.start, part.size)


def _check_alike(checkpoint: Path, manifest: Manifest, run: dict[str, Any]) -> None:
    """Raises ValueError if a run with these settings can't continue the run that wrote the checkpoint."""
    if differences := _differences(manifest, run):
        raise ValueError(
            f"{checkpoint} is of another run: {differences}\n"
            "hint: give the flags it was written with; strategy, processes, length, learning rate may change"
        )
    before = manifest.run
    if before.get("sequences_per_step") != run["sequences_per_step"]:
        raise ValueError(
            f"{checkpoint}: a step had {before.get('sequences_per_step')} sequences, and has "
            f"{run['sequences_per_step']} now\nhint: --per_device_train_batch_size x "
            "--gradient_accumulation_steps x processes is to stay as it was"
        )


def _differences(manifest: Manifest, run: dict[str, Any]) -> str:
    """Settings in which the run that wrote a checkpoint differs from `run`, but for sequences_per_step."""
    return "; ".join(
        f"{name} {manifest.run.get(name)!r} in the checkpoint, {value!r} now"
        for name, value in plain(run).items()
        if manifest.run.get(name) != value and name != "sequences_per_step"
    )
