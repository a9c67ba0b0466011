"""Sentences about what slowed a run down or disturbed its measurement, for the run's end and for reports."""

from typing import Any

from slm_toolkit.record.run_record import RunRecord

OTHER_CORES = 0.25
"warn if other programs kept more CPU cores busy during a run on CPU processes"
_USED_BYTES = 2**30
"warn if more bytes of a GPU were in use before the run opened it"
PADDING_SHARE = 0.1
"warn if a larger share of the tokens was padding"
SWAPPED_BYTES = 2**26
"warn if more bytes were written to swap while the steps ran"
DATA_SHARE = 0.05
"warn if waiting for data took a larger share of the steps' time"


def warnings_of(record: RunRecord) -> list[str]:
    """Return the warnings of one run that ended ok; empty if there are none."""
    start, warnings = record.num_warmup_steps, []
    timed = sum(record.slowest_rank_seconds[start:])
    waited = max((sum(phases.get("data", [])[start:]) for phases in record.phase_seconds), default=0)
    if waited > DATA_SHARE * timed:
        warnings.append(
            f"waited for data {waited / timed:.0%} of the time: more --dataloader_num_workers read ahead"
        )
    if (share := padding_share(record)) > PADDING_SHARE:
        helps = "--packing multipack or a longer --seq_len helps"
        warnings.append(f"{share:.0%} of the tokens were padding: {helps}")
    if (record.fp32_pass or {}).get("status") == "failed":
        warnings.append(f"the fp32 steps failed: {record.fp32_pass['reason']}")
    if record.plain_kernels:
        warnings.append(record.plain_kernels)
    if (swapped := (record.host_ram or {}).get("swapped_out_bytes", 0)) > SWAPPED_BYTES:
        warnings.append(f"the machine swapped {swapped / 2**30:.1f} GiB out while the steps ran")
    if compiled := [step for step, num in enumerate(record.num_graphs_compiled[start:], start + 1) if num]:
        warnings.append(f"compiled again in timed step {', '.join(map(str, compiled[:5]))}")
    if not record.gpu and (record.other_busy_cores or 0) > OTHER_CORES:
        warnings.append(f"other programs kept {record.other_busy_cores:.1f} CPU cores busy")
    if None in record.losses:
        warnings.append(f"the loss is not finite from step {record.losses.index(None) + 1} on")
    for rank, watch in enumerate(record.gpu_watch):
        warnings += [f"rank {rank}: {sentence}" for sentence in _gpu_warnings(watch)]
    return warnings


def padding_share(record: RunRecord) -> float:
    """Return the share of padding in the drawn tokens; 0 if it is unknown."""
    drawn = (record.tokens_counted or {}).get("drawn")
    return (record.num_padding_tokens or 0) / drawn if drawn else 0.0


def was_in_use(watch: dict[str, Any]) -> bool:
    """Return whether other processes used a GPU before the run opened it."""
    return (watch.get("used_bytes_before") or 0) > _USED_BYTES or bool(watch.get("num_processes_before"))


def rank_differences(check: dict[str, Any]) -> str | None:
    """Return the fault in an entry of weights_of_ranks; None if all ranks have the same weights."""
    if not check["num_different"]:
        return None
    return (
        f"ranks have different weights after step {check['step']}: {check['num_different']} of "
        f"{check['num_compared']} tensors, such as {', '.join(check['different'])}"
    )


def _gpu_warnings(watch: dict[str, Any]) -> list[str]:
    warnings = []
    if was_in_use(watch):
        used = (watch.get("used_bytes_before") or 0) / 2**30
        warnings.append(f"the GPU was in use before the run ({used:.1f} GiB)")
    if reasons := watch.get("throttle_reasons"):
        counts = ", ".join(f"{name} in {count} steps" for name, count in reasons.items())
        warnings.append(f"clocks throttled: {counts}")
    if retries := (watch.get("allocator") or {}).get("num_alloc_retries"):
        warnings.append(
            "the GPU was nearly full: the allocator waited, freed unused blocks and retried "
            f"{retries} times, which makes steps slower"
        )
    return warnings
