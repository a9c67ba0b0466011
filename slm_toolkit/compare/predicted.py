"""Whether a run fits, by the estimate, before it is launched."""

from datetime import UTC, datetime

from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.outcome import planned_record
from slm_toolkit.config.run_config import REHEARSED_RANKS_PER_NODE
from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.predict.estimate import estimate
from slm_toolkit.predict.setup.setup import Setup, config_as_launched, placement_of, unknown_to_estimates
from slm_toolkit.record.run_record import RunRecord


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
