"""Between two steps: checkpoints are written, stop signals obeyed, bad steps and unequal ranks detected."""

import dataclasses
import json
import math
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, IterableDataset

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.base.safe_files import write_new
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.measurement_warnings import rank_differences
from slm_toolkit.record.run_record import finite
from slm_toolkit.run.checkpoint.checkpoint import CheckpointWriter
from slm_toolkit.run.data.batches import place_in_data
from slm_toolkit.run.faults.find_batch_size import note_checkpoint
from slm_toolkit.run.observe.progress import NoProgress, TrainingProgress
from slm_toolkit.run.peers.failure import seconds_since_start
from slm_toolkit.run.peers.step_exchange import Seen, StepExchange, StopSignal, gather_to_all

MOST_SKIPPED = 10
"bad steps in a row, with --on_bad_step skip: after that many, the data is not the cause"
_TIME_IS_OVER = 1
"exchanged like the number of a signal; this one is SIGHUP's, which is not obeyed"
_MOST_TOKENS_IN_REPORT = 64
"of each sequence of a bad step"
_MOST_NAMES = 5
"of unequal tensors in a record: a fault in the exchange of gradients moves every tensor"


def largest_loss(config: RunConfig, vocab_size: int) -> float:
    """The loss above which a step is bad; by default twice that of guessing each token, ln(vocabulary)."""
    return config.max_loss if config.max_loss is not None else 2 * math.log(vocab_size)


class AfterStep:
    """Called by every rank after each step and at the end; raises RunEnded, on all ranks alike."""

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        model: torch.nn.Module,
        progress: TrainingProgress | NoProgress,
        *,
        run_dir: Path,
        num_steps: int,
        max_loss: float,
        exchange: StepExchange,
        bad_steps: "BadStepFiles",
        writer: CheckpointWriter | None,
        resumed_from: Path | None,
    ) -> None:
        """`num_steps`: of the whole run; `writer`: None without --save_steps; `resumed_from`: its path."""
        self._config, self._accelerator, self._model, self._progress = config, accelerator, model, progress
        self._run_dir, self._num_steps, self._max_loss = run_dir, num_steps, max_loss
        self._exchange, self._bad_steps, self._writer = exchange, bad_steps, writer
        self.losses: list[float] = []
        "of each step, the mean over the ranks; complete after `end`, empty in a rehearsal"
        self._grad_norms: list[float | None] = []
        "of each step, as this rank knows it"
        self._skipped: list[int] = []
        "steps that changed nothing, since a loss or gradient was not finite or too large"
        self._weights_of_ranks: list[dict[str, Any]] = []
        "see weights_of_ranks: one entry for each checkpoint, one for the end"
        self._signal = StopSignal(*_signals_obeyed(config))
        self._begun_after = -1
        "the step after which the last checkpoint was begun"
        self._last_saved = resumed_from

    def run(self, step: int, loss: torch.Tensor, norm: Any) -> bool:
        """Whether a checkpoint was begun or finished, whose time is no part of a step.

        `loss`: this rank's mean; `norm`: of all gradients before clipping, None if the engine has none. The
        numbers of a step are read when the ranks have exchanged them: nothing of it stays on the device.
        """
        if self._config.rehearse is not None:  # no other rank is there, and losses mean nothing
            return False
        writer, config = self._writer, self._config
        is_writing = writer is not None and writer.is_writing
        stop = self._signal.number
        if not stop and config.max_seconds is not None and seconds_since_start() >= config.max_seconds:
            stop = _TIME_IS_OVER
        seen = self._exchange.after(step, loss, norm, stop=stop, is_writing=is_writing)
        self._judge(seen, step)
        if writer is None:
            return False
        finishes = writer.is_unfinished and any(s.step > self._begun_after and not s.is_writing for s in seen)
        saves = (step + 1) % config.save_steps == 0
        if finishes:
            self._finish_checkpoint()
        if saves:
            self._begin_checkpoint(step)
            if not config.async_save:
                self._finish_checkpoint()
        return finishes or saves

    def end(self, num_steps: int) -> None:
        """After the last step, of `num_steps`."""
        self._signal.restore()
        if self._config.rehearse is not None:
            return
        self._judge(self._exchange.rest(), None)
        if self._writer is not None:
            self._finish_checkpoint()
        self._compare_weights(num_steps)

    def observed(self) -> dict[str, Any]:
        """Fields of the record; the lists are empty in a rehearsal, where no other rank sends gradients."""
        return {
            "losses": [finite(loss) for loss in self.losses],
            "grad_norms": [None if norm is None else finite(norm) for norm in self._grad_norms],
            "skipped_steps": self._skipped,
            "weights_of_ranks": self._weights_of_ranks,
        }

    def _compare_weights(self, step: int) -> None:
        """Over all ranks, after `step` steps; every rank must call it."""
        if any(compared["step"] == step for compared in self._weights_of_ranks):  # a checkpoint at the end
            return
        compared = weights_of_ranks(self._model, step=step)
        self._weights_of_ranks.append(compared)
        if (sentence := rank_differences(compared)) is not None:
            self._progress.say(sentence)

    def _begin_checkpoint(self, step: int) -> None:
        """Begin to write the state after `step`, which is counted from 0, unless that step went wrong."""
        self._judge(self._exchange.rest(), step)
        self._finish_checkpoint()
        self._compare_weights(step + 1)
        self._writer.begin(step + 1)
        self._begun_after = step

    def _finish_checkpoint(self) -> None:
        if (saved := self._writer.finish()) is not None:
            self._last_saved = saved
            note_checkpoint(saved)
            self._progress.say(f"checkpoint: {saved}")

    def _judge(self, seen: list[Seen], step: int | None) -> None:
        """Keep the numbers of steps that the ranks have exchanged, and end the run if one says so.

        `step`: the one that has just ended; None after the last, when a stop signal changes nothing.
        """
        for of_step in seen:
            self.losses.append(sum(of_step.losses) / len(of_step.losses))
            self._grad_norms.append(of_step.grad_norms[self._accelerator.process_index])
            if self._accelerator.mixed_precision == "fp16":
                # its scaler tries scales until the gradients are finite: a norm that is not is no fault
                of_step = dataclasses.replace(of_step, grad_norms=(None,) * len(of_step.losses))
            if of_step.bad_ranks(self._max_loss):
                self._skip_or_end(of_step)
        if step is not None and (numbers := [s.stop_signal for s in seen if s.stop_signal]):
            self._stop(numbers[0], step)

    def _skip_or_end(self, seen: Seen) -> None:
        """Skip a bad step, if --on_bad_step says so and there are not too many in a row; else end the run."""
        path = self._bad_steps.write(seen, seen.bad_ranks(self._max_loss))
        reason = self._describe_bad(seen)
        if self._config.on_bad_step == "skip":
            self._skipped.append(seen.step + 1)
            self._progress.say(f"skipped step {seen.step + 1}: {reason}; its sequences: {path}")
            in_a_row = list(range(seen.step + 2 - MOST_SKIPPED, seen.step + 2))
            if self._skipped[-MOST_SKIPPED:] != in_a_row:
                return
            reason = f"{MOST_SKIPPED} steps in a row were bad: {reason}"
        helps = "" if self._config.on_bad_step == "skip" else "; --on_bad_step skip leaves such steps out"
        self._end(
            f"step {seen.step + 1}: {reason}; its sequences: {path}",
            f"a lower --learning_rate, other data{helps}",
        )

    def _describe_bad(self, seen: Seen) -> str:
        bad_ranks = seen.bad_ranks(self._max_loss)
        losses = " and ".join(f"{seen.losses[rank]:.4g} on rank {rank}" for rank in bad_ranks)
        if seen.is_loss_bad(self._max_loss):
            return f"the loss is {losses}"
        norm = seen.grad_norms[0]
        known = "unknown" if norm is None else f"{norm:.4g}"
        reason = f"the norm of the gradients is {known}, the loss {losses}"
        if self._config.on_bad_step == "skip":  # a loss above the limit makes the gradients NaN
            reason += f"; or the loss of a micro-step is above {self._max_loss:.4g} (--max_loss)"
        return reason

    def _stop(self, number: int, step: int) -> NoReturn:
        """End the run after `step`, since a rank got signal `number`; with --save_steps, save it first."""
        hints = []
        if self._writer is not None:
            self._begin_checkpoint(step)
            self._finish_checkpoint()
        else:
            hints = ["nothing was saved; with --save_steps N a run that is stopped saves a checkpoint"]
        if number == _TIME_IS_OVER:
            message = f"--max_time {self._config.max_time} is over after step {step + 1} of {self._num_steps}"
            self._end(message, exit_code=0, status="timeout")
        name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name
        # shells and schedulers expect this exit code of a process that a signal ended
        message = f"{name} after step {step + 1} of {self._num_steps}"
        self._end(message, *hints, exit_code=128 + number)

    def _end(self, message: str, *hints: str, exit_code: int = 1, status: str = "failed") -> NoReturn:
        self._signal.ignore()  # the launcher terminates all ranks once one exits: rank 0 has yet to print
        self._progress.stop()
        if self._last_saved is not None:
            saved = self._last_saved
            is_here = saved.is_relative_to(self._run_dir)
            helps = f"latest goes on from {saved}" if is_here else f"{saved} goes on from there"
            hints = (f"--resume_from_checkpoint {helps}", *hints)
        text = "\n".join([message, f"hint: {'; '.join(hints)}"])
        raise RunEnded(text, exit_code=exit_code, status=status)


def _signals_obeyed(config: RunConfig) -> list[int]:
    """The signals after which a run ends between two steps.

    Without --save_steps, SIGTERM ends it at once; in a rehearsal, SIGINT does so, too.
    """
    if config.rehearse is not None:
        return []
    return [signal.SIGINT] if config.save_steps is None else [signal.SIGINT, signal.SIGTERM]


class BadStepFiles:
    """Writes bad-step-N.json: losses, gradient norms and sequences of every rank in a bad step."""

    def __init__(
        self,
        accelerator: Accelerator,
        run_dir: Path,
        loader: DataLoader,
        num_micro_steps: int,
        tokenizer: Any,
    ) -> None:
        """`tokenizer`: None for synthetic tokens, which stay numbers."""
        self._accelerator, self._run_dir, self._loader = accelerator, run_dir, loader
        self._num_micro_steps, self._tokenizer = num_micro_steps, tokenizer

    def write(self, seen: Seen, bad_ranks: list[int]) -> Path:
        """The file of one step, which rank 0 writes. Every rank must call it."""
        numbers = self._sequence_numbers(seen.step)
        sequences_of_ranks = gather_to_all([{"number": n, **self._start_of(n)} for n in numbers])
        path = self._run_dir / f"bad-step-{seen.step + 1}.json"
        if self._accelerator.is_main_process:
            content = {
                "step": seen.step + 1,
                "ranks": [
                    {
                        "rank": rank,
                        "loss": finite(seen.losses[rank]),
                        "grad_norm": None if (norm := seen.grad_norms[rank]) is None else finite(norm),
                        "is_bad": rank in bad_ranks,
                        "sequences": sequences,
                    }
                    for rank, sequences in enumerate(sequences_of_ranks)
                ],
            }
            write_new(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
        return path

    def _sequence_numbers(self, step: int) -> Iterator[int]:
        """The places in the data set, or in the stream, of this rank's sequences in one step."""
        loader, num_micro_steps = self._loader, self._num_micro_steps
        epoch, skip = place_in_data(loader, step, num_micro_steps)
        if isinstance(loader.dataset, IterableDataset):
            num_ranks = self._accelerator.num_processes
            size = loader.total_batch_size // num_ranks
            for batch in range(skip, skip + num_micro_steps):
                first = (batch * num_ranks + self._accelerator.process_index) * size
                yield from range(first, first + size)
            return
        epoch_before = loader.iteration
        loader.set_epoch(epoch)
        for batch in islice(iter(loader.batch_sampler), skip, skip + num_micro_steps):
            yield from batch
        loader.set_epoch(epoch_before)

    def _start_of(self, number: int) -> dict[str, Any]:
        """The first tokens of a sequence, as text where there is a tokenizer; empty for a stream."""
        if isinstance(self._loader.dataset, IterableDataset):
            return {}
        tokens = self._loader.dataset[number]["input_ids"][:_MOST_TOKENS_IN_REPORT].tolist()
        return {"text": self._tokenizer.decode(tokens)} if self._tokenizer else {"tokens": tokens}


def weights_of_ranks(model: torch.nn.Module, *, step: int) -> dict[str, Any]:
    """Whether all ranks hold the same weights after `step`. Every rank must call it, all get the same answer.

    num_compared: tensors that several ranks hold, parameters and buffers. num_different: those of them that
    are not equal, bit by bit, on all ranks; different: the names of the first. A shard that only one rank
    holds can't differ from anything; under hybrid sharding, the copies of a shard are compared.
    """
    checksums: dict[tuple[str, Any], list[int]] = {}
    for of_rank in gather_to_all(_checksums(model)):
        for key, checksum in of_rank.items():
            checksums.setdefault(key, []).append(checksum)
    shared = {key: values for key, values in checksums.items() if len(values) > 1}
    different = list(dict.fromkeys(name for (name, _), values in shared.items() if len(set(values)) > 1))
    return {
        "step": step,
        "num_compared": len(shared),
        "num_different": len(different),
        "different": different[:_MOST_NAMES],
    }


@torch.no_grad()
def _checksums(model: torch.nn.Module) -> dict[tuple[str, Any], int]:
    """For each tensor that this rank holds, by name and shard, the sum of its bits, read as integers."""
    keys, sums = [], []
    flat = isinstance(model, FullyShardedDataParallel)  # FSDP1's parameters are shards without a mesh
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shard: Any = rank if flat else None
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            shard = tuple(
                coordinate[dim] for dim, placed in enumerate(tensor.placements) if not placed.is_replicate()
            )
            tensor = tensor.to_local()
        if tensor.numel():  # ZeRO-3's own parameters are empty: their pieces lie elsewhere
            keys.append((name.removeprefix("module."), shard))
            sums.append(_sum_of_bits(tensor))
    return dict(zip(keys, torch.stack(sums).tolist() if sums else [], strict=True))


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(kinds[tensor.element_size()]).sum(dtype=torch.int64)
