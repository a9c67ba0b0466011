"""Finds the largest per-device batch that fits, by short trial runs in separate processes."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from slm_toolkit.compare.grid import PlannedRun, with_batch
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.estimate import largest_batch
from slm_toolkit.predict.flag_checks import fixed_batch_problems
from slm_toolkit.predict.setup.setup import Setup, unknown_to_estimates
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.strategy.strategy import Strategy

LARGEST_ON_CPU = 16
"a CPU rarely runs out of memory, so the search ends there"
TRIAL_STEPS = 3
"the first step creates the optimizer's state; the second is like all later steps"
_FIRST_STRIDE = 1 / 16  # fraction of the start batch: the estimate's error is rarely larger


@dataclass(frozen=True)
class BatchSearch:
    """The result of trials."""

    largest_ok: int | None
    "0: batch 1 does not fit either; None: unknown, because a trial failed for another reason"
    smallest_oom: int | None
    "None: no allowed batch ran out of memory"


def search(runs: Callable[[int], str], *, start: int, most: int) -> BatchSearch:
    """Find the largest batch up to `most` for which `runs` returns "ok"; larger batches return "oom".

    Goes from `start` in strides that double until there is an "ok" and an "oom", then bisects. No batch is
    tried twice. Any other result ends the search.
    """
    ok, oom = 0, most + 1
    batch = min(max(1, start), most)
    stride = max(1, int(batch * _FIRST_STRIDE))
    while ok + 1 < oom:
        status = runs(batch)
        if status == "ok":
            ok = batch
        elif status == "oom":
            oom = batch
        else:
            return BatchSearch(None, oom if oom <= most else None)
        if oom > most:  # no batch was too large yet
            batch = min(ok + stride, most)
        elif ok == 0:
            batch = max(oom - stride, 1)
        else:
            batch = (ok + oom) // 2
        stride *= 2
    return BatchSearch(ok, oom if oom <= most else None)


def find_largest_batch(
    run: PlannedRun, execute: Callable[[PlannedRun], RunRecord], *, most: int
) -> tuple[BatchSearch, PlannedRun, RunRecord]:
    """Search for one planned run's largest batch; `execute` runs a trial.

    Starts at the estimate for the GPU, or at 1. Also returns the trial to show: the largest batch that ran;
    if none ran, batch 1; if a trial failed for another reason, that trial.
    """
    trials: dict[int, tuple[PlannedRun, RunRecord]] = {}

    def runs(batch: int) -> str:
        trial = with_batch(run, batch)
        trials[batch] = trial, execute(trial)
        return trials[batch][1].status

    result = search(runs, start=estimated_batch(run) or 1, most=most)
    batch = list(trials)[-1] if result.largest_ok is None else max(1, result.largest_ok)
    return result, *trials[batch]


def estimated_batch(run: PlannedRun) -> int | None:
    """Return the estimate for this machine's GPU; None if no closed form covers the run."""
    gpu = find_gpu(run.gpu)
    if gpu is None or unknown_to_estimates(run.config, gpu=gpu, spec=run.spec):
        return None
    per_node = max(1, run.num_ranks // run.strategy.num_machines)
    if run.config.rehearse:
        per_node = REHEARSED_RANKS_PER_NODE
    sizes = {"num_gpus": run.num_ranks, "gpus_per_node": per_node, "gpu": gpu}
    with suppress(ValueError):  # ZeRO-0, tensor parallelism, ...
        setup = Setup(run.spec, run.strategy, run.config, **sizes)
        return largest_batch(setup.launched).per_device_train_batch_size
    return None


def flags_of_trials(given: dict[str, Any], strategies: list[Strategy]) -> dict[str, Any]:
    """Return the flags of a search's trial runs. Raises one ValueError with all problems."""
    if problems := fixed_batch_problems(strategies):
        raise ValueError("\n".join(problems) + '\nhint: write "auto" there')
    trial = {"per_device_train_batch_size": 1}
    if not {"num_train_epochs", "max_tokens"} & given.keys():
        trial["max_steps"] = given.get("max_steps", TRIAL_STEPS)
    return {**given, **trial}
