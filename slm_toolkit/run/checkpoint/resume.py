"""Resume a run: find the checkpoint, check it, and load its state under any engine."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from slm_toolkit.base.user_files import typed_path
from slm_toolkit.config.run_config import rule_of
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR, finished, saved_model
from slm_toolkit.run.checkpoint.checkpoint import (
    RANDOM_CPU,
    RANDOM_CUDA,
    by_order,
    fingerprint_of_frozen,
    is_of,
    plain,
    readable_manifests,
)
from slm_toolkit.run.checkpoint.files import (
    DATA,
    MANIFEST_FILE,
    NUM_HELD_OUT,
    WRITTEN_BY,
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

if TYPE_CHECKING:
    from slm_toolkit.run.checkpoint.foreign import ForeignReader


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a run may resume from."""

    path: Path
    manifest: Manifest
    reader: "Reader | ForeignReader"
    "of the tensors"

    @property
    def is_foreign(self) -> bool:
        """True if another program wrote it: data, flags and random states are then unknown."""
        return not isinstance(self.reader, Reader)


def find_checkpoints(
    resume: str, run_dir: Path, run: dict[str, Any], *, num_steps: int | None
) -> list[Checkpoint]:
    """Return the checkpoints that `resume` (the value of --resume_from_checkpoint) may mean, best first.

    `choose` then takes the first undamaged checkpoint. `latest` and `auto` mean this run's newest; `auto`
    prefers checkpoints before `num_steps`, the run's last step. The folder of a run means that run's newest
    checkpoint, and any other folder means itself.

    Returns [] for `auto` without checkpoints. Otherwise raises ValueError if there is no checkpoint that this
    run can resume from.
    """
    folder = Path(os.path.realpath(typed_path(resume)))
    if resume == "latest":
        return _newest(run_dir, run, can_be_none=False)
    if resume == "auto":
        newest = _newest(run_dir, run, can_be_none=True)
        # a run killed between its last checkpoint and its record repeats its last steps
        return sorted(newest, key=lambda c: num_steps is not None and c.manifest.step >= num_steps)
    of_run = folder.parent if folder.name == CHECKPOINTS_DIR else folder
    if (of_run / CHECKPOINTS_DIR).is_dir():
        return _newest(of_run, run, can_be_none=False)
    if not folder.is_dir():
        raise ValueError(
            f"no such checkpoint: {resume}\n"
            "hint: give a folder like runs/<run>/checkpoints/step_<k>, or latest"
        )
    if (foreign := _foreign(folder, run)) is not None:
        if (rule := rule_of(run["optim"])) != "adamw":
            raise ValueError(
                f"{folder} has AdamW's moments, which --optim {rule} can't continue\n"
                "hint: resume with --optim adamw_torch_fused, or convert it --to hf_model and start from that"
            )
        return [foreign]
    manifest = _manifest_of(folder)
    _check_settings(folder, manifest, run)
    return [Checkpoint(folder, manifest, Reader(folder, manifest))]


def opened(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder, ours or another program's; of a run's folder, the newest.

    Raises ValueError if there is none, or if it is damaged.
    """
    if (foreign := _foreign(folder, {})) is not None:
        return foreign
    of_run = folder.parent if folder.name == CHECKPOINTS_DIR else folder
    if newest := by_order(of_run / CHECKPOINTS_DIR):
        folder = newest[-1]
    manifest = _manifest_of(folder)
    if problem := damage(folder, manifest.files):
        raise ValueError(f"{problem}\nhint: convert another checkpoint")
    return Checkpoint(folder, manifest, Reader(folder, manifest))


def _manifest_of(folder: Path) -> Manifest:
    if not (folder / MANIFEST_FILE).exists():
        raise ValueError(
            f"{folder} contains no checkpoint of ours, of accelerate's FSDP or of DeepSpeed\n"
            "hint: give a folder like runs/<run>/checkpoints/step_<k>, or one that Accelerator.save_state "
            "wrote under FSDP or DeepSpeed; under DDP it names no parameters"
        )
    return read_manifest(folder)


def _foreign(folder: Path, run: dict[str, Any]) -> Checkpoint | None:
    """Return a checkpoint of accelerate or DeepSpeed, which says nothing of flags and data; else None."""
    from slm_toolkit.run.checkpoint.foreign import is_foreign, open_foreign

    if not is_foreign(folder):
        return None
    reader = open_foreign(folder)
    manifest = Manifest(
        step=reader.num_steps,
        optimizer_steps=reader.num_optimizer_steps,
        order=0,
        run={**run, DATA: []},
        written_by={
            **dict.fromkeys(WRITTEN_BY),
            "strategy": reader.program,
            "num_processes": reader.num_processes,
        },
        frozen=None,
        scaler=None,
        num_elements=reader.num_elements,
        files=(),
    )
    return Checkpoint(folder, manifest, reader)


def _newest(run_dir: Path, run: dict[str, Any], *, can_be_none: bool) -> list[Checkpoint]:
    folder = run_dir / CHECKPOINTS_DIR
    manifests = readable_manifests(folder, warn=True)
    of_run = [(m.order, path) for path, m in manifests.items() if is_of(m, run)]
    if of_run:
        paths = [path for _, path in sorted(of_run, reverse=True)]
        return [Checkpoint(path, manifests[path], Reader(path, manifests[path])) for path in paths]
    if manifests:
        newest = max(manifests, key=lambda path: manifests[path].order)
        _check_settings(newest, manifests[newest], run)
    elif unreadable := finished(folder):
        raise ValueError(
            f"none of the {len(unreadable)} checkpoints under {folder} can be read\n"
            "hint: see the warnings above; use the version that wrote them, or start with another --run_name"
        )
    if can_be_none:
        return []
    raise ValueError(
        f"no checkpoint under {folder}\n"
        "hint: check --run_name; --save_steps writes checkpoints; auto instead of latest starts without one"
    )


def check_place(run_dir: Path, run: dict[str, Any], *, starts: bool, has_ended: bool) -> None:
    """Raise ValueError if the run would replace another run's checkpoints.

    If it `starts` from the beginning, also raise it if the run would replace its own checkpoints or the model
    in its folder. has_ended: True if the folder contains the record of this very run, with all steps done.
    """
    replaces = "; --overwrite_output_dir deletes {} and starts from the beginning" if starts else ""
    manifests = readable_manifests(run_dir / CHECKPOINTS_DIR)
    for path, manifest in manifests.items():
        if not is_of(manifest, run):
            differences = _differences(manifest, run) or "the number of sequences in a step differs"
            raise ValueError(
                f"{path} belongs to another run, and this run's checkpoints would replace it: {differences}\n"
                "hint: use another --run_name or --output_dir, or the flags that it was written with"
                + replaces.format("it")
            )
    if not starts:
        return
    if manifests:
        newest = max(manifests, key=lambda path: manifests[path].order)
        ended = ", which has ended" if has_ended else ""
        resumes = " and a larger --max_steps resume" if has_ended else " resumes"
        raise ValueError(
            f"{run_dir} contains checkpoints of this run{ended}, and a new start would replace them\n"
            f"hint: --resume_from_checkpoint latest{resumes} from {newest.name}{replaces.format('them')}"
        )
    if unreadable := finished(run_dir / CHECKPOINTS_DIR):
        raise ValueError(
            f"{unreadable[-1]} can't be read, and a new start would replace it\n"
            f"hint: use another --run_name to keep it{replaces.format('it')}"
        )
    if (model := saved_model(run_dir)) is not None:
        raise ValueError(
            f"{model} is the model of an earlier run, and a new start would replace it\n"
            f"hint: use another --run_name to keep it{replaces.format('it')}"
        )


def num_held_out(checkpoint: Checkpoint | None) -> int | None:
    """Return the number of sequences that the earlier run held out of each stream; None without streams."""
    datasets = checkpoint.manifest.run[DATA] if checkpoint else []
    return max((content[NUM_HELD_OUT] for content in datasets if NUM_HELD_OUT in content), default=None)


def check_data(checkpoint: Checkpoint, contents: list[dict[str, Any]]) -> None:
    """Raise ValueError if the data has changed since the checkpoint was written."""
    before = checkpoint.manifest.run[DATA]
    if not checkpoint.is_foreign and before != plain({DATA: contents})[DATA]:
        sizes = [[content.get("num_sequences") for content in datasets] for datasets in (before, contents)]
        counts = f": {sizes[0]} sequences then, {sizes[1]} now" if sizes[0] != sizes[1] else ""
        raise ValueError(
            f"the data has changed since {checkpoint.path} was written{counts}\n"
            "hint: resume with the data that the run began with; for other data, start from its saved model"
        )


def choose(candidates: list[Checkpoint], accelerator: Accelerator) -> Checkpoint | None:
    """Return the first undamaged candidate; None without candidates. Damaged ones are named on stderr.

    All ranks check the files together, so each rank must call it. Raises ValueError if all candidates are
    damaged, or if ranks see different candidates.
    """
    paths_by_rank = gather_to_all([str(candidate.path) for candidate in candidates])
    if differing := [rank for rank, paths in enumerate(paths_by_rank) if paths != paths_by_rank[0]]:
        raise ValueError(
            f"rank {differing[0]} sees other checkpoints than rank 0: "
            f"{paths_by_rank[differing[0]]}, {paths_by_rank[0]}\n"
            "hint: put --output_dir on a file system that all machines share, or try again in a minute"
        )
    for checkpoint in candidates:
        share = checkpoint.manifest.files[accelerator.process_index :: accelerator.num_processes]
        problems = [problem for problem in gather_to_all(damage(checkpoint.path, share)) if problem]
        if not problems:
            if checkpoint.is_foreign and accelerator.is_main_process:
                program, step = checkpoint.manifest.written_by["strategy"], checkpoint.manifest.step
                line = (
                    f"note: {checkpoint.path} is of {program}, after {step} steps. It does not say its data "
                    "and flags: give those it was trained with"
                )
                print(line, file=sys.stderr)
            return checkpoint
        if accelerator.is_main_process:
            line = f"warning: skipped the damaged checkpoint {checkpoint.path}: {problems[0]}"
            print(line, file=sys.stderr)
    if candidates:
        raise ValueError(
            f"every checkpoint under {candidates[0].path.parent} is damaged\n"
            "hint: start from the beginning, without --resume_from_checkpoint"
        )
    return None


def load_weights(model: PreTrainedModel, checkpoint: Checkpoint) -> None:
    """Load the weights, in the dtype of the computation, into a model that no engine has prepared yet.

    Raises ValueError if the model's parameters or frozen weights differ from those of the checkpoint.
    """
    expected = checkpoint.manifest.num_elements
    sizes = {name: num_elements(param) for name, param in trained(model)}
    if sizes != expected:
        differing = sorted(name for name in {*sizes, *expected} if sizes.get(name) != expected.get(name))
        raise ValueError(
            f"{checkpoint.path} belongs to another model; these parameters differ: {', '.join(differing[:3])}"
            f"{f' and {len(differing) - 3} more' if len(differing) > 3 else ''}\n"
            "hint: give the --model that wrote it"
        )
    if fingerprint_of_frozen(model) != checkpoint.manifest.frozen:
        raise ValueError(
            f"{checkpoint.path} contains an adapter for other frozen weights\n"
            "hint: give the --model that wrote it"
        )
    for part in initial_weights(model):
        if part.size:
            part.tensor.copy_(_read(checkpoint, part))


def load_state(
    checkpoint: Checkpoint, model: torch.nn.Module, optimizer: Any, accelerator: Accelerator
) -> None:
    """Load master weights and moments into the prepared model and optimizer; every rank reads its share."""
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    for part in stretches(model, optimizer, **ranks):
        if part.size:
            part.tensor.copy_(_read(checkpoint, part))
    set_optimizer_steps(model, optimizer, checkpoint.manifest.optimizer_steps)
    if accelerator.scaler is not None and checkpoint.manifest.scaler is not None:
        accelerator.scaler.load_state_dict(checkpoint.manifest.scaler)


def load_random_states(checkpoint: Checkpoint, accelerator: Accelerator) -> None:
    """Restore this rank's random states, so that dropout continues where it was.

    On another number of processes, or from another program's checkpoint, nothing is restored: the random
    numbers start from the seed again.
    Raises ValueError if torch refuses this rank's state.
    """
    is_same_launch = checkpoint.manifest.written_by["num_processes"] == accelerator.num_processes
    if checkpoint.is_foreign or not is_same_launch:
        return
    rank = accelerator.process_index
    setters = {RANDOM_CPU: torch.set_rng_state}
    if torch.cuda.is_available():
        setters[RANDOM_CUDA] = torch.cuda.set_rng_state
    for name, set_state in setters.items():
        state = checkpoint.reader.of_rank(rank, name)
        if state is None and name == RANDOM_CUDA:  # written on a CPU
            continue
        try:
            set_state(state)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"{checkpoint.path / file_of_rank(rank)}: {name} is not a state of torch's random numbers: "
                f"{str(error).splitlines()[0]}\nhint: resume from another checkpoint"
            ) from None


def described(checkpoint: Checkpoint, here: dict[str, Any]) -> dict[str, Any]:
    """Return the record's resumed_from: the checkpoint from which the run resumes."""
    manifest = checkpoint.manifest
    conversion = _conversion(manifest, here)
    return {
        "path": str(checkpoint.path),
        "step": manifest.step,
        **{name: value for name, value in manifest.written_by.items() if value is not None},
        "conversion": conversion,
    }


def _conversion(manifest: Manifest, here: dict[str, Any]) -> str | None:
    """Return a sentence about a changed strategy, batch or number of processes; None if nothing changes."""
    before = manifest.written_by
    changes = []
    if any(before[key] != here[key] for key in ("strategy", "num_processes")):
        then, now = (f"{launch['strategy']} x {launch['num_processes']}" for launch in (before, here))
        changes.append(
            f"written under {then}, resumed under {now}: weights and AdamW's moments of "
            f"{len(manifest.num_elements)} tensors are sharded again"
        )
    batch = ("per_device_train_batch_size", "gradient_accumulation_steps")
    if before["per_device_train_batch_size"] is not None and any(before[key] != here[key] for key in batch):
        then, now = (" x ".join(str(launch[key]) for key in batch) for launch in (before, here))
        changes.append(
            f"of a step's {manifest.run['sequences_per_step']} sequences, each process has {now}, not {then}"
        )
    return "; ".join(changes) or None


def _read(checkpoint: Checkpoint, part: Stretch) -> torch.Tensor:
    return checkpoint.reader.read(f"{part.kind}/{part.name}", part.start, part.size)


def _check_settings(checkpoint: Path, manifest: Manifest, run: dict[str, Any]) -> None:
    """Raise ValueError if a run with these settings can't resume from the checkpoint."""
    if differences := _differences(manifest, run):
        raise ValueError(
            f"{checkpoint} belongs to another run: {differences}\n"
            "hint: give the flags that it was written with; "
            "strategy, number of processes, length and learning rate may change"
        )
    before = manifest.run
    if before.get("sequences_per_step") != run["sequences_per_step"]:
        raise ValueError(
            f"{checkpoint}: a step had {before.get('sequences_per_step')} sequences, but now has "
            f"{run['sequences_per_step']}\nhint: keep the product --per_device_train_batch_size x "
            "--gradient_accumulation_steps x processes / --sp_size"
        )


def _differences(manifest: Manifest, run: dict[str, Any]) -> str:
    """List the settings, except sequences_per_step, that differ between the checkpoint's run and `run`."""
    return "; ".join(
        f"{name} {manifest.run.get(name)!r} in the checkpoint, {value!r} now"
        for name, value in plain(run).items()
        if manifest.run.get(name) != value and name != "sequences_per_step"
    )
