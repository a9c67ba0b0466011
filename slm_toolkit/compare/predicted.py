"""Estimates before the launch whether a run fits in GPU memory."""

from datetime import UTC, datetime

from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.outcome import planned_record
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.estimate import estimate
from slm_toolkit.predict.setup.setup import Setup, placement_of, unknown_to_estimates
from slm_toolkit.record.run_record import RunRecord


def setup_of(run: PlannedRun) -> Setup | None:
    """Return the setup of a planned run; None if no closed form covers its GPU, flags or strategy."""
    gpu = find_gpu(run.gpu)
    if gpu is None or unknown_to_estimates(run.config, gpu=gpu, spec=run.spec):
        return None
    try:
        placement_of(run.strategy)
    except ValueError:  # ZeRO-0, tensor parallelism, ...
        return None
    num_gpus = run.asked["num_processes"]
    return Setup(
        run.spec,
        run.strategy,
        run.config,
        num_gpus=num_gpus,
        gpus_per_node=REHEARSED_RANKS_PER_NODE
        if run.config.rehearse
        else max(1, num_gpus // run.strategy.num_machines),
        gpu=gpu,
    ).launched


def check_skippable(runs: list[PlannedRun]) -> None:
    """Raise ValueError if --skip_oom can't estimate the memory of the runs."""
    gpu = runs[0].gpu
    if gpu is None:
        raise ValueError(
            "--skip_oom needs a GPU: the estimate does not cover host RAM\n"
            "hint: `slm estimate --gpu NAME` estimates which runs fit on a GPU"
        )
    known = find_gpu(gpu)
    if unknown := [
        problem for run in runs for problem in unknown_to_estimates(run.config, gpu=known, spec=run.spec)
    ]:
        raise ValueError(f"--skip_oom: {unknown[0]}\nhint: leave --skip_oom out")
    if known is None:
        raise ValueError(f"--skip_oom: the memory of {gpu} is unknown\nhint: leave --skip_oom out")


def skipped_record(run: PlannedRun) -> RunRecord | None:
    """Return a record for a run whose verdict is does not fit; None for others, and without an estimate.

    Fields such as the engine stay unknown, because nothing was launched.
    """
    setup = setup_of(run)
    estimated = estimate(setup) if setup else None
    if estimated is None or estimated.verdict != "does not fit":
        return None
    usable_bytes = estimated.headroom_bytes + estimated.needed_bytes
    return planned_record(
        run,
        status="skipped",
        started_at=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=f"not launched: the predicted need of {estimated.needed_bytes / 2**30:.2f} GiB is "
        f"more than {usable_bytes / 2**30:.2f} GiB (--skip_oom)",
        seconds_total=0.0,
        gpu=run.gpu,
        predicted_peak_bytes=estimated.needed_bytes,
    )
