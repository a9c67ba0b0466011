"""What may have disturbed a measurement, as sentences under the table."""

from slm_toolkit.record import RunRecord
from slm_toolkit.report.stats import OTHER_CORES, USED_BYTES

DATA_SHARE = 0.05
"of a step's time waited for data, above which it is said"


def warnings_of(record: RunRecord) -> list[str]:
    """Of one run that ended ok; empty where nothing was seen."""
    start, slowest = record.num_warmup_steps, record.slowest_rank_seconds
    found = []
    waited = [sum(phases.get("data", [])[start:]) for phases in record.phase_seconds]
    if waited and max(waited) > DATA_SHARE * sum(slowest[start:]):
        found.append(f"waited for data {max(waited) / sum(slowest[start:]):.0%} of the time")
    compiled = [
        step + 1 for step, graphs in enumerate(record.num_graphs_compiled) if graphs and step >= start
    ]
    if compiled:
        found.append(f"compiled again in timed step {', '.join(map(str, compiled[:5]))}")
    if not record.gpu and (record.other_busy_cores or 0) > OTHER_CORES:
        found.append(f"other programs kept {record.other_busy_cores:.1f} CPU cores busy")
    if (step := next((step for step, loss in enumerate(record.losses, 1) if loss is None), None)) is not None:
        found.append(f"the loss is not a number from step {step} on")
    for rank, watch in enumerate(record.gpu_watch):
        found += [f"rank {rank}: {sentence}" for sentence in _of_gpu(watch)]
    return found


def _of_gpu(watch: dict) -> list[str]:
    found = []
    if (watch.get("used_bytes_before") or 0) > USED_BYTES or (watch.get("num_processes_before") or 0) > 0:
        used = (watch.get("used_bytes_before") or 0) / 2**30
        found.append(f"the GPU was in use before the run ({used:.1f} GiB)")
    if reasons := watch.get("throttle_reasons"):
        shown = ", ".join(f"{name} in {count} steps" for name, count in reasons.items())
        found.append(f"clocks throttled: {shown}")
    if retries := (watch.get("allocator") or {}).get("num_alloc_retries"):
        found.append(f"the allocator ran out and retried {retries} times: the peak was near the limit")
    return found
