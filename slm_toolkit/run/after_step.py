"""The work between two steps: write checkpoints, obey stop signals, detect bad steps and unequal ranks."""

import json
import math
import signal
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from slm_toolkit.base.errors import RunEnded
from slm_toolkit.base.safe_files import write_new
from slm_toolkit.record.measurement_warnings import rank_differences
from slm_toolkit.record.run_record import finite
from slm_toolkit.run.display import TrainingProgress
from slm_toolkit.run.observe.progress import Observer, say
from slm_toolkit.run.observe.watch import RunWatch
from slm_toolkit.run.peers.failure import seconds_since_start
from slm_toolkit.run.peers.peer_store import note_checkpoint
from slm_toolkit.run.peers.step_exchange import Seen, StepExchange, StopSignal, gather_to_all
from slm_toolkit.run.run import Run

MOST_SKIPPED = 10
"with --on_bad_step skip, the run stops after this many bad steps in a row: bad data alone is unlikely then"
MOST_OVERFLOWS = 20
"in a row: 16 halvings bring the loss scale from 65536 to 1, its lowest value"
_TIME_IS_OVER = 1
"exchanged like the number of a signal; this one is SIGHUP's, which is not obeyed"
_MOST_TOKENS_IN_REPORT = 64
"how many tokens of each sequence a bad step's file shows"
_MOST_NAMES = 5
"how many unequal tensors a record names: a fault in the gradient all-reduce changes every tensor"


class AfterStep(Observer):
    """Does the work between two steps. If it raises RunEnded, it does so on all ranks.

    Not for a rehearsal, which has no other ranks, and whose losses mean nothing.
    """

    def __init__(self, run: Run, watch: RunWatch, progress: TrainingProgress) -> None:
        config = run.config
        self._run, self._config, self._watch, self._progress = run, config, watch, progress
        self._max_loss = 2 * math.log(run.spec.vocab_size)  # twice the loss of guessing
        if config.on_bad_step == "skip":
            run.loss_recorder.limit = self._max_loss
        self._exchange = StepExchange(run.accelerator, run.control_group)
        self._losses: list[float] = []
        "each step's loss, the mean over the ranks"
        self._grad_norms: list[float | None] = []
        "each step's gradient norm, as this rank's engine reports it"
        self._skipped: list[int] = []
        "bad steps, which did not change the weights, and those whose gradients overflowed in fp16"
        self._has_loss_scale = "fp16" in (config.numerics, run.accelerator.mixed_precision)
        self._weights_of_ranks: list[dict[str, Any]] = []
        "results of weights_of_ranks: one per checkpoint, and one for the end"
        # without --save_steps, SIGTERM ends the run at once
        signals = [signal.SIGINT] if config.save_steps is None else [signal.SIGINT, signal.SIGTERM]
        self._signal = StopSignal(*signals)
        self._last_saved = run.checkpoint.path if run.checkpoint else None

    def after_step(self, step: int, loss: torch.Tensor, norm: Any) -> None:
        """Send loss and norm to all ranks, in the background; they are checked one step later."""
        config, stop = self._config, self._signal.number
        if not stop and config.max_seconds is not None and seconds_since_start() >= config.max_seconds:
            stop = _TIME_IS_OVER
        self._judge(self._exchange.after(step, loss, norm, stop=stop), step)
        if config.save_steps is not None and (step + 1) % config.save_steps == 0:
            self._save(step)
            self._watch.clock.pause()  # the time of a checkpoint is not time of a step

    def end(self, observed: dict[str, Any]) -> None:
        """Check the last steps."""
        self._signal.restore()
        self._judge(self._exchange.rest(), None)
        self._compare_weights(self._run.record.first_step + len(self._losses))
        observed |= {
            "losses": [finite(loss) for loss in self._losses],
            "grad_norms": [None if norm is None else finite(norm) for norm in self._grad_norms],
            "skipped_steps": self._skipped,
            "weights_of_ranks": self._weights_of_ranks,
        }

    def _compare_weights(self, step: int) -> None:
        """Compare the weights of all ranks after `step` steps. Every rank must call it."""
        if any(compared["step"] == step for compared in self._weights_of_ranks):  # done by a checkpoint
            return
        compared = weights_of_ranks(self._run.model, step=step)
        self._weights_of_ranks.append(compared)
        if (sentence := rank_differences(compared)) is not None:
            say(sentence)

    def _save(self, step: int) -> None:
        """Write the state after `step` (counted from 0). First end the run if that step was bad."""
        self._judge(self._exchange.rest(), step)
        self._compare_weights(step + 1)
        self._last_saved = saved = self._run.checkpoint_writer.save(step + 1)
        note_checkpoint(saved)
        say(f"checkpoint: {saved}")

    def _judge(self, seen: list[Seen], step: int | None) -> None:
        """Keep the exchanged losses and norms, and end the run after a bad step or a stop signal.

        `step`: the step that has just ended. None after the last step, when a stop signal changes nothing.
        """
        for of_step in seen:
            self._losses.append(sum(of_step.losses) / len(of_step.losses))
            self._grad_norms.append(of_step.grad_norms[self._run.accelerator.process_index])
            if bad_ranks := of_step.bad_ranks(self._max_loss):
                self._skipped.append(of_step.step + 1)
                if self._has_loss_scale and not of_step.is_loss_bad(self._max_loss):
                    self._limit_overflows(of_step.step)
                else:
                    self._skip_or_end(of_step, bad_ranks)
        if step is not None and (numbers := [s.stop_signal for s in seen if s.stop_signal]):
            self._stop(numbers[0], step)

    def _limit_overflows(self, step: int) -> None:
        """End the run if the gradients of too many steps in a row overflowed in fp16."""
        if _num_in_a_row(self._skipped) == MOST_OVERFLOWS:
            self._end(
                f"step {step + 1}: the gradients of {MOST_OVERFLOWS} steps in a row overflowed in fp16",
                "lower --learning_rate, or compute in bf16 or fp32: --numerics",
            )

    def _skip_or_end(self, seen: Seen, bad_ranks: list[int]) -> None:
        """Skip a bad step if --on_bad_step is skip, unless too many come in a row; else end the run."""
        path, reason = self._write_bad_step(seen, bad_ranks), self._describe_bad(seen, bad_ranks)
        hint = "lower --learning_rate or change the data"
        if self._config.on_bad_step == "skip":
            say(f"skipped step {seen.step + 1}: {reason}; its sequences: {path}")
            if _num_in_a_row(self._skipped) < MOST_SKIPPED:
                return
            reason = f"{MOST_SKIPPED} steps in a row were bad: {reason}"
        else:
            hint += "; --on_bad_step skip skips such steps"
        self._end(f"step {seen.step + 1}: {reason}; its sequences: {path}", hint)

    def _describe_bad(self, seen: Seen, bad_ranks: list[int]) -> str:
        losses = " and ".join(f"{seen.losses[rank]:.4g} on rank {rank}" for rank in bad_ranks)
        if seen.is_loss_bad(self._max_loss):
            return f"the loss is {losses}"
        reason = f"the norm of the gradients is {seen.grad_norms[0]:.4g}, the loss {losses}"
        if self._config.on_bad_step == "skip":  # a loss above the limit makes the gradients NaN
            reason += f"; or the loss of a micro-step is above {self._max_loss:.4g}"
        return reason

    def _write_bad_step(self, seen: Seen, bad_ranks: list[int]) -> Path:
        """Write bad-step-N.json on rank 0: losses, gradient norms and sequences of every rank.

        Return its path. Every rank must call it.
        """
        run, drawn = self._run, self._watch.drawn
        num_steps = run.record.first_step + len(self._watch.num_graphs_compiled)
        sequences = [
            tokens[:_MOST_TOKENS_IN_REPORT].tolist()
            for batch in drawn[seen.step - num_steps]
            for tokens in batch
        ]
        if (tokenizer := run.data.tokenizer) is not None:
            sequences = [tokenizer.decode(tokens) for tokens in sequences]
        path = run.run_dir / f"bad-step-{seen.step + 1}.json"
        ranks = [
            {
                "rank": rank,
                "loss": finite(seen.losses[rank]),
                "grad_norm": None if (norm := seen.grad_norms[rank]) is None else finite(norm),
                "is_bad": rank in bad_ranks,
                "sequences": of_rank,
            }
            for rank, of_rank in enumerate(gather_to_all(sequences))
        ]
        if run.accelerator.is_main_process:
            content = {"step": seen.step + 1, "ranks": ranks}
            write_new(path, json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False) + "\n")
        return path

    def _stop(self, number: int, step: int) -> NoReturn:
        """End the run after `step`, because a rank got signal `number`; with --save_steps, save first."""
        hints, place = [], f"after step {step + 1} of {self._run.num_steps}"
        if self._config.save_steps is not None:
            self._save(step)
        else:
            hints = ["nothing was saved; with --save_steps N, a stopped run saves a checkpoint"]
        if number == _TIME_IS_OVER:
            message = (
                f"--max_time {self._config.max_time} is over after step {step + 1} of {self._run.num_steps}"
            )
            self._end(message, exit_code=0, status="timeout")
        name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal.Signals(number).name
        # shells and schedulers expect this exit code from a process that a signal ended
        self._end(f"{name} {place}", *hints, exit_code=128 + number)

    def _end(self, message: str, *hints: str, exit_code: int = 1, status: str = "failed") -> NoReturn:
        self._signal.ignore()  # the launcher sends SIGTERM once a rank exits, but rank 0 must still print
        self._progress.stop()
        if self._last_saved is not None:
            saved = self._last_saved
            is_in_run_dir = saved.is_relative_to(self._run.run_dir)
            resume_hint = f"latest resumes from {saved}" if is_in_run_dir else f"{saved} resumes from there"
            hints = (f"--resume_from_checkpoint {resume_hint}", *hints)
        text = "\n".join([message, f"hint: {'; '.join(hints)}"])
        raise RunEnded(text, exit_code=exit_code, status=status)


def _num_in_a_row(steps: list[int]) -> int:
    """Return how many of the last steps follow each other."""
    return sum(1 for back, step in enumerate(reversed(steps)) if step == steps[-1] - back)


def weights_of_ranks(model: torch.nn.Module, *, step: int) -> dict[str, Any]:
    """Compare the weights of all ranks after `step`. Every rank must call it, and all get the same result.

    num_compared: the number of tensors (parameters and buffers) that several ranks have a copy of.
    num_different: how many of them are not bit-identical on all ranks. different: the first of their names.
    A shard that exists on one rank only is not compared; hybrid sharding's copies of a shard are.
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
    """Return a checksum of each tensor on this rank, by name and shard: the sum of its bits as integers."""
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
        if tensor.numel():  # under ZeRO-3 parameters are empty: their shards are in another tensor
            keys.append((name.removeprefix("module."), shard))
            sums.append(_sum_of_bits(tensor))
    return dict(zip(keys, torch.stack(sums).tolist() if sums else [], strict=True))


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(kinds[tensor.element_size()]).sum(dtype=torch.int64)
