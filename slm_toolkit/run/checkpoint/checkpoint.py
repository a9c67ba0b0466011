"""Write a run's checkpoints in the background: every rank writes its share of the training state."""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from slm_toolkit.base.errors import DISK_FULL, RunEnded
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.record.saved_files import CHECKPOINTS_DIR, delete, finished, sweep_checkpoints
from slm_toolkit.run.checkpoint.files import (
    DATA,
    Manifest,
    RankFile,
    finish,
    read_manifest,
    remove,
    step_name,
    unfinished,
    write_rank_file,
)
from slm_toolkit.run.engine.training_state import num_elements, optimizer_steps, stretches, trained
from slm_toolkit.run.peers.step_exchange import gather_to_all
from slm_toolkit.strategy.strategy import Strategy

RANDOM_CPU, RANDOM_CUDA = "random/cpu", "random/cuda"
"names of each rank's random states, which dropout uses"
_FINGERPRINT_ELEMENTS = 1024


def run_description(config: RunConfig, sequences_per_step: int) -> dict[str, Any]:
    """Return the settings that a resuming run must share with the run that wrote the checkpoint.

    Strategy, number of processes and the split of a step's sequences over them may change. A checkpoint also
    describes its data, see `Data.contents`.
    """
    flags = {name: getattr(config, name) for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    evaluates = config.eval_steps is not None  # evaluation holds out some of the data
    return {**flags, "evaluates": evaluates, "sequences_per_step": sequences_per_step}


def is_of(manifest: Manifest, run: dict[str, Any]) -> bool:
    """Return True if a run with this description wrote the checkpoint. Ignores the data and removed flags."""
    return all(manifest.run.get(name) == value for name, value in plain(run).items() if name != DATA)


def launch_description(config: RunConfig, strategy: Strategy, num_processes: int) -> dict[str, Any]:
    """Return the settings that a resuming run may change."""
    return {
        "strategy": strategy.name,
        "num_processes": num_processes,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "base_batch_size": config.base_batch_size or config.per_device_train_batch_size,
    }


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
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[RankFile] | None = None
        self._manifest: Manifest | None = None
        self._unfinished: Path | None = None

    def begin(self, step: int) -> None:
        """Copy the state after `step` steps and start writing it. Every rank must call it.

        Raises RunEnded on all ranks if any rank fails to start, or failed to write the checkpoint before.
        """
        self.finish()
        accelerator = self.accelerator
        problem, order, token = None, 0, uuid.uuid4().hex[:8]
        if accelerator.is_main_process:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                sweep_checkpoints(self.folder)
                unfinished(self.folder, step, token).mkdir()
                order = 1 + max((m.order for m in readable_manifests(self.folder).values()), default=0)
            except OSError as error:
                problem = _problem(error, self.folder)
        self._raise(problem)
        self._unfinished = unfinished(self.folder, step, gather_to_all(token)[0])
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
        self._manifest = Manifest(
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
        rank = accelerator.process_index
        self._writing = self._thread.submit(write_rank_file, self._unfinished, rank, share)

    @property
    def is_writing(self) -> bool:
        """True if this rank's share is not on disk yet."""
        return self._writing is not None and not self._writing.done()

    @property
    def is_unfinished(self) -> bool:
        """True if a checkpoint was begun and does not exist yet. It has the same value on all ranks."""
        return self._writing is not None

    def finish(self) -> Path | None:
        """Wait until all ranks have written the checkpoint that `begin` started, and rename it into place.

        Returns None if no checkpoint was started. Raises RunEnded on all ranks if any rank failed to write.
        """
        if self._writing is None:
            return None
        file, problem = None, None
        try:
            file = self._writing.result()
        except OSError as error:
            problem = _problem(error, self._unfinished)
        manifest, self._writing = self._manifest, None
        try:
            self._raise(problem)
            files = tuple(gather_to_all(file))
            if self.accelerator.is_main_process:
                try:
                    finish(self._unfinished, dataclasses.replace(manifest, files=files))
                    self._rotate()
                except OSError as error:
                    problem = _problem(error, self._unfinished)
            self._raise(problem)
        except RunEnded:
            if self.accelerator.is_main_process:
                delete(self._unfinished)
            raise
        return self.folder / step_name(manifest.step)

    def _stretches(self) -> Any:
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        return stretches(self.model, self.optimizer, rank=rank, world_size=world_size)

    def _rotate(self) -> None:
        manifests = readable_manifests(self.folder).items()
        of_run = [(m.order, path) for path, m in manifests if is_of(m, self.run)]
        for _, old in sorted(of_run)[: -self.keep]:
            remove(old)

    def _raise(self, problem: tuple[int | None, str] | None) -> None:
        """Raise RunEnded on all ranks if any rank has a problem: an error number and its description."""
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


def _problem(error: OSError, place: Path) -> tuple[int | None, str]:
    return error.errno, f"{error.strerror or error}: {error.filename or place}"


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


def readable_manifests(folder: Path, *, warn: bool = False) -> dict[Path, Manifest]:
    """Return the readable manifests of a folder, by checkpoint. `warn`: name unreadable ones on stderr."""
    manifests = {}
    for path in finished(folder):
        try:
            manifests[path] = read_manifest(path)
        except ValueError as error:
            if warn and os.environ.get("RANK", "0") == "0":
                reason = str(error).splitlines()[0]
                print(f"warning: skipped the damaged checkpoint {path}: {reason}", file=sys.stderr)
    return manifests


def by_order(folder: Path) -> list[Path]:
    """Return the readable checkpoints of a folder, the newest last."""
    manifests = readable_manifests(folder)
    return sorted(manifests, key=lambda path: manifests[path].order)


def plain(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description as it is after a round trip through JSON."""
    return json.loads(json.dumps(description))
