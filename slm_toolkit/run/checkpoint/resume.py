"""Resume a run: choose an undamaged checkpoint, and load its state under any engine."""

import sys
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from slm_toolkit.run.checkpoint.checkpoint import (
    RANDOM_CPU,
    RANDOM_CUDA,
    fingerprint_of_frozen,
)
from slm_toolkit.run.checkpoint.files import (
    DATA,
    NUM_HELD_OUT,
    WRITTEN_BY,
    Checkpoint,
    Manifest,
    damage,
)
from slm_toolkit.run.checkpoint.start import plain
from slm_toolkit.run.engine.training_state import (
    Stretch,
    initial_weights,
    num_elements,
    set_optimizer_steps,
    stretches,
    trained,
)
from slm_toolkit.run.peers.step_exchange import gather_to_all


def num_held_out(checkpoint: Checkpoint | None) -> int | None:
    """Return the number of sequences that the earlier run held out of each stream; None without streams."""
    datasets = checkpoint.manifest.run[DATA] if checkpoint else []
    return max((content[NUM_HELD_OUT] for content in datasets if NUM_HELD_OUT in content), default=None)


def check_data(checkpoint: Checkpoint, contents: list[dict[str, Any]]) -> None:
    """Raise ValueError if the data has changed since the checkpoint was written."""
    before = checkpoint.manifest.run[DATA]
    if before != plain({DATA: contents})[DATA]:
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

    On another number of processes nothing is restored: the random numbers start from the seed again.
    """
    if checkpoint.manifest.written_by["num_processes"] != accelerator.num_processes:
        return
    rank = accelerator.process_index
    setters = {RANDOM_CPU: torch.set_rng_state}
    if torch.cuda.is_available():
        setters[RANDOM_CUDA] = torch.cuda.set_rng_state
    for name, set_state in setters.items():
        state = checkpoint.of_rank(rank, name)
        if state is None and name == RANDOM_CUDA:  # written on a CPU
            continue
        set_state(state)


def described(checkpoint: Checkpoint, here: dict[str, Any]) -> dict[str, Any]:
    """Return the record's resumed_from: the checkpoint from which the run resumes."""
    manifest = checkpoint.manifest
    return {
        "path": str(checkpoint.path),
        "step": manifest.step,
        **{name: manifest.written_by[name] for name in WRITTEN_BY},
        "conversion": _conversion(manifest, here),
    }


def _conversion(manifest: Manifest, here: dict[str, Any]) -> str | None:
    """Return a sentence about a changed strategy, batch or number of processes; None if nothing changes."""
    before = manifest.written_by
    then, now = (f"{launch['strategy']} x {launch['num_processes']}" for launch in (before, here))
    changes = [f"written under {then}, resumed under {now}"] if then != now else []
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if before[name] != here[name]:
            changes.append(f"{name} {before[name]} -> {here[name]}")
    return "; ".join(changes) or None


def _read(checkpoint: Checkpoint, part: Stretch) -> torch.Tensor:
    return checkpoint.read(f"{part.kind}/{part.name}", part.start, part.size)
