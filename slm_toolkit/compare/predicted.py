"""What is known before a launch: whether it fits, by the estimate, and the largest batch, by short trials."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from slm_toolkit.compare.grid import PlannedRun, with_batch
from slm_toolkit.compare.outcome import planned_record
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.estimate import LARGEST_BATCH_TRIED, estimate, largest_batch
from slm_toolkit.predict.flag_checks import fixed_batch_problems
from slm_toolkit.predict.setup.setup import Setup, config_as_launched, placement_of, unknown_to_estimates
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.strategy.strategy import Strategy


def setup_of(run: PlannedRun) -> Setup | None:
    """The setup of a planned run; None where no closed form covers its GPU, flags or strategy."""
    gpu = find_gpu(run.gpu)
    if gpu is None or unknown_to_estimates(run.config):
        return None
    try:
        placement_of(run.strategy)
    except ValueError:  # ZeRO-0, tensor parallelism, ...
        return None
    num_gpus = run.asked["num_processes"]
    return Setup(
        run.spec,
        run.strategy,
        config_as_launched(run.config, run.strategy),
        num_gpus=num_gpus,
        gpus_per_node=REHEARSED_RANKS_PER_NODE
        if run.config.rehearse
        else max(1, num_gpus // run.strategy.num_machines),
        gpu=gpu,
    )


def check_skippable(runs: list[PlannedRun]) -> None:
    """Raises ValueError where --skip_oom has nothing to go by."""
    gpu = runs[0].gpu
    known = find_gpu(gpu)
    if gpu is None:
        raise ValueError(
            "--skip_oom without a GPU, where runs take what RAM there is\n"
            "hint: `slm estimate --gpu NAME` says which runs fit where"
        )
    if unknown := [problem for run in runs for problem in unknown_to_estimates(run.config)]:
        raise ValueError(f"--skip_oom: {unknown[0]}\nhint: leave --skip_oom out")
    if known is None:
        raise ValueError(f"--skip_oom: no estimate knows the memory of {gpu}\nhint: leave it out")


def skipped_record(run: PlannedRun) -> RunRecord | None:
    """In the place of a launch that would not fit; None where it may fit, or nobody can say.

    A strategy that nobody has launched names no engine: all that was not observed stays unknown.
    """
    setup = setup_of(run)
    found = estimate(setup) if setup else None
    if found is None or found.fits is not False:
        return None
    usable_bytes = found.headroom_bytes + found.peak_allocated_bytes
    return planned_record(
        run,
        status="skipped",
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=f"not launched: out of memory, predicted: {found.peak_allocated_bytes / 2**30:.2f} GiB "
        f"at the peak, of {usable_bytes / 2**30:.2f} GiB (--skip_oom)",
        seconds_total=0.0,
        gpu=run.gpu,
        predicted_peak_bytes=found.peak_allocated_bytes,
    )


# The largest per-device batch that really runs, found by trials: short runs in processes of their own.

TRIAL_STEPS = 3
"the first makes the optimizer's states, the second is what all later ones are like"
_FIRST_STRIDE = 1 / 16  # of where the search starts: the estimate is seldom farther off


@dataclass(frozen=True)
class BatchSearch:
    """What trials found."""

    largest_ok: int | None
    "0: not even 1 runs; None: a trial failed otherwise, and nothing is known"
    smallest_oom: int | None
    "None: none ran out of memory up to the most that was allowed"


def search(runs: Callable[[int], str], *, start: int, most: int) -> BatchSearch:
    """Find the largest batch up to `most` for which `runs` says "ok"; larger ones say "oom".

    From `start` by strides that double until both answers are known, then by halves. No batch is tried
    twice; any other answer ends the search.
    """
    ok, oom = 0, most + 1
    batch = min(max(1, start), most)
    stride = max(1, int(batch * _FIRST_STRIDE))
    while ok + 1 < oom:
        answer = runs(batch)
        if answer == "ok":
            ok = batch
        elif answer == "oom":
            oom = batch
        else:
            return BatchSearch(None, oom if oom <= most else None)
        if oom > most:  # nothing was too large yet
            batch = min(ok + stride, most)
        elif ok == 0:
            batch = max(oom - stride, 1)
        else:
            batch = (ok + oom) // 2
        stride *= 2
    return BatchSearch(ok, oom if oom <= most else None)


def find_largest_batch(
    run: PlannedRun, execute: Callable[[PlannedRun], RunRecord], *, most: int | None
) -> tuple[BatchSearch, PlannedRun, RunRecord]:
    """Search for one planned run, from the estimate for its GPU (else from 1); `execute` does a trial.

    Returns the trial to show, too: the largest that ran, else batch 1, else the one that failed.
    """
    trials: dict[int, tuple[PlannedRun, RunRecord]] = {}

    def runs(batch: int) -> str:
        trial = with_batch(run, batch)
        trials[batch] = trial, execute(trial)
        return trials[batch][1].status

    found = search(runs, start=estimated_batch(run) or 1, most=most or LARGEST_BATCH_TRIED)
    shown = list(trials)[-1] if found.largest_ok is None else max(1, found.largest_ok)
    return found, *trials[shown]


def estimated_batch(run: PlannedRun) -> int | None:
    """The largest batch that fits on this machine's GPU, says the estimate; None where it can't say."""
    setup = setup_of(run)
    return largest_batch(setup).per_device_train_batch_size if setup else None


def flags_of_trials(
    given: dict[str, Any],
    strategies: list[Strategy],
    *,
    max_batch: int | None,
    has_gpu: bool,
) -> dict[str, Any]:
    """The flags of a search's runs. Raises one ValueError with all that can't be asked of a search."""
    problems = fixed_batch_problems(strategies)
    if not has_gpu and max_batch is None:
        problems.append(
            "--largest_batch without a GPU, where nothing but the machine ends it: add --max_batch"
        )
    if problems:
        raise ValueError(
            "\n".join(problems) + "\nhint: `slm estimate --largest_batch --gpu NAME` runs nothing"
        )
    trial = {"per_device_train_batch_size": 1}
    if "num_train_epochs" not in given:
        trial["max_steps"] = given.get("max_steps", TRIAL_STEPS)
    return {**given, **trial}
