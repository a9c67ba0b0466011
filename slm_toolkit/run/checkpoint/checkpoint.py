"""Writes a run's checkpoints, while it trains or waits: every rank writes its share of the training state."""

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
"the states of random numbers that dropout draws from, on each rank"
_FINGERPRINT_ELEMENTS = 1024


def run_description(config: RunConfig, sequences_per_step: int) -> dict[str, Any]:
    """The settings that a run which goes on from a checkpoint must share with the run that wrote it.

    Strategy, number of processes and the split of a step's sequences over them may change. A checkpoint also
    describes its data, see `Data.contents`.
    """
    flags = {name: getattr(config, name) for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    evaluates = config.eval_steps is not None  # then some is held out
    return {**flags, "evaluates": evaluates, "sequences_per_step": sequences_per_step}


def is_of(manifest: Manifest, run: dict[str, Any]) -> bool:
    """Whether a run of this description wrote the checkpoint, whatever its data was."""
    return {**manifest.run, DATA: None} == {**plain(run), DATA: None}


def launch_description(config: RunConfig, strategy: Strategy, num_processes: int) -> dict[str, Any]:
    """The settings that may change between the run that wrote a checkpoint and the one that goes on."""
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
        """`run`, `written_by`: the descriptions above; `frozen`: the fingerprint; the newest `keep` stay."""
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.folder, self.keep = run_dir / CHECKPOINTS_DIR, keep
        self.run, self.written_by, self.frozen = run, written_by, frozen
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[RankFile] | None = None
        self._manifest: Manifest | None = None
        self._unfinished: Path | None = None

    def begin(self, step: int) -> None:
        """Copy the state after `step` steps and start writing it. Every rank must call it.

        Raises RunEnded on all ranks if one can't, or could not write the checkpoint before.
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
        mine = {RANDOM_CPU: (0, torch.get_rng_state())}
        if torch.cuda.is_available():
            mine[RANDOM_CUDA] = (0, torch.cuda.get_rng_state())
        for part in self._stretches():
            if part.is_mine and part.size:
                # copying to pinned memory is much faster; torch keeps it for the next checkpoint
                pinned = part.tensor.is_cuda
                on_host = torch.empty(part.size, dtype=part.tensor.dtype, pin_memory=pinned)
                on_host.copy_(part.tensor, non_blocking=pinned)
                mine[f"{part.kind}/{part.name}"] = (part.start, on_host)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # or the next step would change the state during the copies
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
        self._writing = self._thread.submit(write_rank_file, self._unfinished, rank, mine)

    @property
    def is_writing(self) -> bool:
        """Whether this rank's share is not on disk yet."""
        return self._writing is not None and not self._writing.done()

    @property
    def is_unfinished(self) -> bool:
        """Whether a checkpoint was begun and does not exist yet; the same on all ranks."""
        return self._writing is not None

    def finish(self) -> Path | None:
        """Wait until all ranks have written what `begin` started, and rename it into place.

        None if nothing was started. Raises RunEnded on all ranks if one could not write.
        """
        if self._writing is None:
            return None
        file, problem = None, None
        try:
            file = self._writing.result()
        except OSError as error:
            problem = _problem(error, self._unfinished)
        writing, self._writing = self._manifest, None
        try:
            self._raise(problem)
            files = tuple(gather_to_all(file))
            if self.accelerator.is_main_process:
                try:
                    finish(self._unfinished, dataclasses.replace(writing, files=files))
                    self._rotate()
                except OSError as error:
                    problem = _problem(error, self._unfinished)
            self._raise(problem)
        except RunEnded:
            if self.accelerator.is_main_process:
                delete(self._unfinished)
            raise
        return self.folder / step_name(writing.step)

    def _stretches(self) -> Any:
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        return stretches(self.model, self.optimizer, rank=rank, world_size=world_size)

    def _rotate(self) -> None:
        manifests = readable_manifests(self.folder).items()
        of_run = [(m.order, path) for path, m in manifests if is_of(m, self.run)]
        for _, old in sorted(of_run)[: -self.keep]:
            remove(old)

    def _raise(self, problem: tuple[int | None, str] | None) -> None:
        """Raises RunEnded on all ranks if any has a problem: an error number and its description."""
        problems = {rank: of_rank for rank, of_rank in enumerate(gather_to_all(problem)) if of_rank}
        if problems:
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, (_, reason) in problems.items())
            helps = f"look at {self.folder}"
            if any(number in DISK_FULL for number, _ in problems.values()):
                free_bytes = shutil.disk_usage(next(p for p in self.folder.parents if p.exists())).free
                reasons += f" ({free_bytes / 2**20:,.1f} MiB free)"
                helps = f"make room in {self.folder}"
            if finished(self.folder):
                helps += "; --resume_from_checkpoint latest goes on from the last one"
            raise RunEnded(f"the checkpoint could not be written: {reasons}\nhint: {helps}")


def _problem(error: OSError, place: Path) -> tuple[int | None, str]:
    return error.errno, f"{error.strerror or error}: {error.filename or place}"


def fingerprint_of_frozen(model: torch.nn.Module) -> str | None:
    """A fingerprint of the frozen weights; None if there are none. Every rank must call it."""
    frozen = [(name, param) for name, param in model.named_parameters() if not param.requires_grad]
    return fingerprint(frozen) if frozen else None


def fingerprint(params: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A hash of names and first elements, rounded to bf16, of each parameter: the same under every engine.

    Every rank must call it: if zero3_init_flag made the model in pieces, each tensor is gathered.
    """
    digest = hashlib.sha256()
    for name, param in params:
        with _whole(param):
            # as bf16, since zero3_init_flag may make pieces in it
            start = param.detach().view(-1)[:_FINGERPRINT_ELEMENTS].cpu().to(torch.bfloat16)
            digest.update(name.encode() + start.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _whole(param: torch.Tensor) -> AbstractContextManager[Any]:
    if not hasattr(param, "ds_tensor"):
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([param])


def readable_manifests(folder: Path, *, warn: bool = False) -> dict[Path, Manifest]:
    """The manifests in a folder that can be read, by checkpoint; `warn`: name the others on stderr."""
    manifests = {}
    for path in finished(folder):
        try:
            manifests[path] = read_manifest(path)
        except ValueError as error:
            if warn and os.environ.get("RANK", "0") == "0":
                reason = str(error).splitlines()[0]
                print(f"warning: {path} is damaged and skipped: {reason}", file=sys.stderr)
    return manifests


def by_order(folder: Path) -> list[Path]:
    """The readable checkpoints of a folder, the newest last."""
    manifests = readable_manifests(folder)
    return sorted(manifests, key=lambda path: manifests[path].order)


def plain(description: dict[str, Any]) -> dict[str, Any]:
    """The description as it would come back from JSON."""
    return json.loads(json.dumps(description))
