"""Between two steps: checkpoints are written, a request to stop is obeyed, a bad step is found out."""

import dataclasses
import json
import math
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.base.safe_files import write_new
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.measurement_warnings import rank_differences
from slm_toolkit.record.run_record import finite
from slm_toolkit.run.checkpoint.checkpoint import CheckpointWriter
from slm_toolkit.run.data.batches import place_in_data
from slm_toolkit.run.faults.find_batch_size import note_checkpoint
from slm_toolkit.run.observe.progress import TrainingProgress
from slm_toolkit.run.observe.same_weights import weights_of_ranks
from slm_toolkit.run.peers.step_exchange import Lookout, Seen, StopSignal, gather_to_all
from slm_toolkit.run.setup import Job, Prepared

_SHOWN_TOKENS = 64
"of each sequence, as text"


def describe_bad_step(job: Job, prepared: Prepared, seen: Seen, *, max_loss: float) -> tuple[str, Path]:
    """What was wrong on which rank, and the file that tells more, by rank 0. Every rank must call it."""
    bad_ranks = seen.bad_ranks(max_loss)
    loader, rank = prepared.loader, job.accelerator.process_index
    numbers = list(_sequence_numbers(loader, seen.step, prepared.num_micro_steps, job.accelerator))
    of_ranks = gather_to_all([{"number": number, **_start_of(job, loader, number)} for number in numbers])
    path = job.run_dir / f"bad-step-{seen.step + 1}.json"
    if rank == 0:
        told = {
            "step": seen.step + 1,
            "ranks": [
                {
                    "rank": of_rank,
                    "loss": finite(seen.losses[of_rank]),
                    "grad_norm": None if (norm := seen.grad_norms[of_rank]) is None else finite(norm),
                    "is_bad": of_rank in bad_ranks,
                    "sequences": sequences,
                }
                for of_rank, sequences in enumerate(of_ranks)
            ],
        }
        write_new(path, json.dumps(told, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
    losses = " and ".join(f"{seen.losses[rank]:.4g} on rank {rank}" for rank in bad_ranks)
    if seen.is_loss_bad(max_loss):
        return f"the loss is {losses}", path
    norm = seen.grad_norms[0]
    told = f"the norm of the gradients is {'unknown' if norm is None else f'{norm:.4g}'}, the loss {losses}"
    if job.config.on_bad_step == "skip":  # then it is the norm that tells
        told += f"; or the loss of a micro-step is above {max_loss:.4g} (--max_loss)"
    return told, path


def _sequence_numbers(loader: Any, step: int, num_micro_steps: int, accelerator: Any) -> Iterator[int]:
    """Of this rank in one step: where they stand in the data set, or in the stream."""
    epoch, skip = place_in_data(loader, step, num_micro_steps)
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        size, num_ranks = loader.total_batch_size // accelerator.num_processes, accelerator.num_processes
        for batch in range(skip, skip + num_micro_steps):
            first = (batch * num_ranks + accelerator.process_index) * size
            yield from range(first, first + size)
        return
    now = loader.iteration
    loader.set_epoch(epoch)
    for batch in islice(iter(loader.batch_sampler), skip, skip + num_micro_steps):
        yield from batch
    loader.set_epoch(now)


def _start_of(job: Job, loader: Any, number: int) -> dict[str, Any]:
    """The first tokens of a sequence, as text where there is a tokenizer."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return {}
    tokens = loader.dataset[number]["input_ids"][:_SHOWN_TOKENS].tolist()
    return {"text": job.data.tokenizer.decode(tokens)} if job.data.tokenizer else {"tokens": tokens}


MOST_SKIPPED = 10
"bad steps in a row, with --on_bad_step skip: then it is not the data"


def max_loss(config: RunConfig, vocab_size: int) -> float:
    """Above it, a loss has exploded: by default twice that of guessing each token, ln(vocabulary)."""
    return config.max_loss if config.max_loss is not None else 2 * math.log(vocab_size)


def _signals_obeyed(config: RunConfig) -> list[int]:
    """Signals after which a run ends between two steps. Others end it at once: SIGTERM without --save_steps,
    both in a rehearsal."""
    if config.rehearse is not None:
        return []
    return [signal.SIGINT] if config.save_steps is None else [signal.SIGINT, signal.SIGTERM]


class Guard:
    """Called by every rank after each step and at the end; raises RunEnded, on all ranks alike."""

    def __init__(self, job: Job, prepared: Prepared, progress: TrainingProgress | None) -> None:
        """`progress`: rank 0's, None on the others."""
        self.config, self.accelerator, self.run_dir = job.config, job.accelerator, job.run_dir
        self.job, self.prepared, self.progress = job, prepared, progress
        self.losses: list[float] = []
        "of each step, the mean over the ranks; complete after `end`, empty in a rehearsal"
        self.weights_of_ranks: list[dict[str, Any]] = []
        "whether all ranks held the same, at each checkpoint and at the end"
        self.grad_norms: list[float | None] = []
        "of each step, as this rank knows it"
        self.max_loss = max_loss(job.config, job.spec.vocab_size)
        self.skipped: list[int] = []
        "steps that changed nothing, since a loss or gradient was no number or too large"
        if job.config.on_bad_step == "skip":
            prepared.loss_recorder.limit = self.max_loss
        self._lookout = Lookout(job.accelerator, job.control_group)
        self._signal = StopSignal(*_signals_obeyed(job.config))
        self._writer = self._make_writer(job, prepared)
        self._begun_after = -1
        self._last_saved: Path | None = job.checkpoint.path if job.checkpoint else None

    @staticmethod
    def _make_writer(job: Job, prepared: Prepared) -> CheckpointWriter | None:
        if job.config.save_steps is None:
            return None
        return CheckpointWriter(
            *(job.accelerator, prepared.model, prepared.optimizer, job.run_dir),
            run=job.description,
            written_by=job.launch_description,
            frozen=job.fingerprint_of_frozen,
            keep=job.config.save_total_limit,
        )

    def after(self, step: int, loss: torch.Tensor, norm: Any) -> bool:
        """Whether a checkpoint was begun or finished, whose time is no part of a step.

        `loss`: this rank's mean; `norm`: of all gradients before clipping, None where nobody knows. The
        numbers of a step are read when the ranks have exchanged them: nothing of it stays on the device.
        """
        if self.config.rehearse is not None:  # no other rank is there, and losses mean nothing
            return False
        writer, config = self._writer, self.config
        is_writing = writer is not None and writer.is_writing
        seen = self._lookout.after(step, loss, norm, stop=self._signal.number, is_writing=is_writing)
        self._judge(seen, step)
        if writer is None:
            return False
        finishes = writer.is_unfinished and any(s.step > self._begun_after and not s.is_writing for s in seen)
        saves = (step + 1) % config.save_steps == 0
        if finishes:
            self._finish()
        if saves:
            self._save(step)
            if not config.async_save:
                self._finish()
        return finishes or saves

    def say(self, line: str) -> None:
        if self.progress is not None:
            self.progress.say(line)

    def end(self, num_steps: int) -> None:
        """After the last step, of `num_steps`."""
        self._signal.restore()
        if self.config.rehearse is not None:
            return
        self._judge(self._lookout.rest(), None)
        if self._writer is not None:
            self._finish()
        self.compare_weights(num_steps)

    def compare_weights(self, step: int) -> None:
        """Over all ranks, after `step` steps; every rank must call it."""
        if any(found["step"] == step for found in self.weights_of_ranks):  # a checkpoint at the end
            return
        found = weights_of_ranks(self.prepared.model, step=step)
        self.weights_of_ranks.append(found)
        if (sentence := rank_differences(found)) is not None:
            self.say(sentence)

    def _save(self, step: int) -> None:
        """Begin to write the state after `step`, which is counted from 0, unless that step went wrong."""
        self._judge(self._lookout.rest(), step)
        self._finish()
        self.compare_weights(step + 1)
        self._writer.begin(step + 1)
        self._begun_after = step

    def _finish(self) -> None:
        if (saved := self._writer.finish()) is not None:
            self._last_saved = saved
            note_checkpoint(saved)
            self.say(f"checkpoint: {saved}")

    def _judge(self, seen: list[Seen], step: int | None) -> None:
        """`step`: the one that has just ended, None after the last, when nobody needs to be stopped."""
        for of_step in seen:
            self.losses.append(sum(of_step.losses) / len(of_step.losses))
            self.grad_norms.append(of_step.grad_norms[self.accelerator.process_index])
            if (
                self.accelerator.mixed_precision == "fp16"
            ):  # its scaler tries scales until gradients are finite
                of_step = dataclasses.replace(of_step, grad_norms=(None,) * len(of_step.losses))
            self._look_at(of_step)
        if step is not None and (numbers := [s.stop_signal for s in seen if s.stop_signal]):
            self._stop(numbers[0], step)

    def _look_at(self, seen: Seen) -> None:
        if not seen.bad_ranks(self.max_loss):
            return
        told, path = describe_bad_step(self.job, self.prepared, seen, max_loss=self.max_loss)
        if self.config.on_bad_step == "skip":
            self.skipped.append(seen.step + 1)
            self.say(f"skipped step {seen.step + 1}: {told}; its sequences: {path}")
            in_a_row = list(range(seen.step + 2 - MOST_SKIPPED, seen.step + 2))
            if self.skipped[-MOST_SKIPPED:] != in_a_row:
                return
            told = f"{MOST_SKIPPED} steps in a row were bad: {told}"
        helps = "" if self.config.on_bad_step == "skip" else "; --on_bad_step skip leaves such steps out"
        self._end(
            f"step {seen.step + 1}: {told}; its sequences: {path}",
            f"a lower --learning_rate, other data{helps}",
        )

    def _stop(self, number: int, step: int) -> NoReturn:
        hints = []
        if self._writer is not None:
            self._save(step)
            self._finish()
        else:
            hints = ["nothing was saved; with --save_steps N a run that is stopped saves a checkpoint"]
        name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name
        # as shells and schedulers know a process that a signal ended
        message = f"{name} after step {step + 1} of {self.prepared.num_steps}"
        self._end(message, *hints, exit_code=128 + number)

    def _end(self, message: str, *hints: str, exit_code: int = 1) -> NoReturn:
        self._signal.ignore()  # the launcher terminates all ranks once one exits: rank 0 has yet to print
        if self.progress is not None:
            self.progress.stop()
        if self._last_saved is not None:
            saved = self._last_saved
            is_here = saved.is_relative_to(self.run_dir)
            helps = f"latest goes on from {saved}" if is_here else f"{saved} goes on from there"
            hints = (f"--resume_from_checkpoint {helps}", *hints)
        raise RunEnded("\n".join([message, f"hint: {'; '.join(hints)}"]), exit_code=exit_code)
