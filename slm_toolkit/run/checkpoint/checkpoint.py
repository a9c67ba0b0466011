"""Write a run's checkpoints, each rank its share of the training state; load them under any engine."""

import dataclasses
import hashlib
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from slm_toolkit.base.errors import DISK_FULL, RunEnded
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR, delete, finished, remove, sweep_checkpoints
from slm_toolkit.run.checkpoint.files import (
    DATA,
    NUM_HELD_OUT,
    Checkpoint,
    Manifest,
    damage,
    finish,
    step_name,
    unfinished,
    write_rank_file,
)
from slm_toolkit.run.checkpoint.start import is_of, plain, readable_manifests
from slm_toolkit.run.engine.training_state import (
    Stretch,
    initial_weights,
    num_elements,
    optimizer_steps,
    set_optimizer_steps,
    stretches,
    trained,
)
from slm_toolkit.run.peers.step_exchange import gather_to_all

RANDOM_CPU, RANDOM_CUDA = "random/cpu", "random/cuda"
"names of each rank's random states, which dropout uses"
_FINGERPRINT_ELEMENTS = 1024


class CheckpointWriter:
    """Writes `run_dir`/checkpoints/step_<k>; every rank writes its share, from a copy in the host's RAM."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: Any,
        run_dir: Path,
        *,
        run: dict[str, Any],
        written_by: dict[str, Any],
        frozen: str | None,
        keep: int,
    ) -> None:
        """Set up the writer.

        `run`, `written_by`: the descriptions above. `frozen`: the fingerprint of the frozen weights.
        `keep`: how many of the newest checkpoints to keep.
        """
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.folder, self.keep = run_dir / CHECKPOINTS_DIR, keep
        self.run, self.written_by, self.frozen = run, written_by, frozen

    def save(self, step: int) -> Path:
        """Write the state after `step` steps and return the checkpoint's folder. Every rank must call it.

        Raises RunEnded on all ranks if any rank fails.
        """
        accelerator = self.accelerator
        order, token = 0, uuid.uuid4().hex[:8]
        with self._all_ranks(self.folder):
            if accelerator.is_main_process:
                self.folder.mkdir(parents=True, exist_ok=True)
                sweep_checkpoints(self.folder)
                unfinished(self.folder, step, token).mkdir()
                order = 1 + max((m.order for m in readable_manifests(self.folder).values()), default=0)
        folder = unfinished(self.folder, step, gather_to_all(token)[0])
        share = {RANDOM_CPU: (0, torch.get_rng_state())}
        if torch.cuda.is_available():
            share[RANDOM_CUDA] = (0, torch.cuda.get_rng_state())
        for part in self._stretches():
            if part.is_mine and part.size:
                # copying to pinned memory is much faster; torch caches that memory for the next checkpoint
                pinned = part.tensor.is_cuda
                on_host = torch.empty(part.size, dtype=part.tensor.dtype, pin_memory=pinned)
                on_host.copy_(part.tensor, non_blocking=pinned)
                share[f"{part.kind}/{part.name}"] = (part.start, on_host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # otherwise the next step would change the state during the copies
        manifest = Manifest(
            step=step,
            optimizer_steps=optimizer_steps(self.model, self.optimizer),
            order=order,
            run=self.run,
            written_by=self.written_by,
            frozen=self.frozen,
            scaler=None if accelerator.scaler is None else accelerator.scaler.state_dict(),
            num_elements={name: num_elements(param) for name, param in trained(self.model)},
            files=(),
        )
        try:
            with self._all_ranks(folder):
                file = write_rank_file(folder, accelerator.process_index, share)
            files = tuple(gather_to_all(file))
            with self._all_ranks(folder):
                if accelerator.is_main_process:
                    finish(folder, dataclasses.replace(manifest, files=files))
                    self._rotate()
        except RunEnded:
            if accelerator.is_main_process:
                delete(folder)
            raise
        return self.folder / step_name(step)

    def _stretches(self) -> Any:
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        return stretches(self.model, self.optimizer, rank=rank, world_size=world_size)

    def _rotate(self) -> None:
        manifests = readable_manifests(self.folder)
        of_run = [path for path, manifest in manifests.items() if is_of(manifest, self.run)]
        for old in of_run[: -self.keep]:
            remove(old)

    @contextmanager
    def _all_ranks(self, place: Path) -> Iterator[None]:
        """Raise RunEnded on all ranks if the block raises OSError on any. Every rank must enter it."""
        problem = None
        try:
            yield
        except OSError as error:
            problem = error.errno, f"{error.strerror or error}: {error.filename or place}"
        by_rank = enumerate(gather_to_all(problem))
        problems = {rank: rank_problem for rank, rank_problem in by_rank if rank_problem}
        if problems:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, (_, reason) in problems.items())
            helps = f"check the folder {self.folder}"
            if any(number in DISK_FULL for number, _ in problems.values()):
                free_bytes = shutil.disk_usage(next(p for p in self.folder.parents if p.exists())).free
                reasons += f" ({free_bytes / 2**20:,.1f} MiB free)"
                helps = f"free space on the disk of {self.folder}"
            if finished(self.folder):
                helps += "; --resume_from_checkpoint latest resumes from the last checkpoint"
            raise RunEnded(f"the checkpoint could not be written: {reasons}\nhint: {helps}")


def fingerprint_of_frozen(model: torch.nn.Module) -> str | None:
    """Return a fingerprint of the frozen weights; None if there are none. Every rank must call it."""
    frozen = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]
    return fingerprint(frozen) if frozen else None


def fingerprint(params: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of each parameter's name and first elements, in bf16. It is the same under every engine.

    Every rank must call it, because a model that zero3_init_flag sharded is gathered tensor by tensor.
    """
    digest = hashlib.sha256()
    for name, param in params:
        with _whole(param):
            # in bf16, because zero3_init_flag may create the shards in bf16
            start = param.detach().reshape(-1)[:_FINGERPRINT_ELEMENTS].cpu().to(torch.bfloat16)
            digest.update(name.encode() + start.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _whole(param: torch.Tensor) -> AbstractContextManager[Any]:
    if not hasattr(param, "ds_tensor"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([param])


# Resume: choose an undamaged checkpoint, and load its state.


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
        **manifest.written_by,
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
