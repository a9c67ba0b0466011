"""What records say of configurations that `slm recommend` considers."""

from pathlib import Path
from statistics import median

from slm_toolkit.hardware.gpus import find_gpu
from slm_toolkit.recommend.plans import Observed, observation_key
from slm_toolkit.record.files import find_records
from slm_toolkit.record.run_record import RunRecord, spec_of
from slm_toolkit.report.recorded_estimate import config_that_ran, strategy_that_ran
from slm_toolkit.report.rows import row_of


def observations_of(folders: list[Path]) -> dict[tuple, Observed]:
    """By `observation_key`; a rehearsal without a GPU stands under the GPU None, for all GPUs.

    Raises ValueError for a folder without records.
    """
    if not folders:
        return {}
    records, problems = find_records(folders)
    if not records:
        nothing = f"no records under {folders[0]}\nhint: `slm compare` writes them"
        raise ValueError(problems[0] if problems else nothing)
    groups: dict[tuple, list[tuple[Path, RunRecord]]] = {}
    for path, record in records:
        if record.engine is None or record.world_size is None or record.is_parity_reference:
            continue
        gpu = find_gpu(record.gpu)
        if gpu is None and not (record.is_rehearsal and record.gpu is None):
            continue  # CPU processes, and GPUs we don't know
        name = gpu.name if gpu else None
        strategy, config = strategy_that_ran(record), config_that_ran(record)
        key = observation_key(spec_of(record), name, record.world_size, strategy, config)
        groups.setdefault(key, []).append((path, record))
    return {key: _observed(found) for key, found in groups.items()}


def _observed(found: list[tuple[Path, RunRecord]]) -> Observed:
    """Measured before rehearsed; of several launches the median rate and the largest peak."""
    rows = [row_of([each]) for each in found]
    ok = [row for row in rows if row.status == "ok"]
    measured = [row for row in ok if not row.is_rehearsed]
    rates = [row.tokens_per_second for row in measured if row.tokens_per_second is not None]
    peaked = [row for row in measured or ok if row.peak_allocated_bytes is not None]
    return Observed(
        tokens_per_second=median(rates) if rates else None,
        peak_allocated_bytes=max((row.peak_allocated_bytes for row in peaked), default=None),
        memory_evidence=peaked[0].evidence if peaked else None,
        is_out_of_memory=not ok and any(row.status == "oom" for row in rows),
    )
