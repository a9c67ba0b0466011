"""What held a run up, or may have disturbed its measurement: sentences for its end and under the table."""

from statistics import median
from typing import Any

from slm_toolkit.record.run_record import RunRecord

OTHER_CORES = 0.25
"CPU cores kept busy by other programs, above which a run on CPU processes was disturbed"
USED_BYTES = 2**30
"in use on a GPU before the run opened it, above which somebody else is on it"
PADDING_SHARE = 0.1
"of the tokens, above which it is said"
FREE_RAM_SHARE = 0.05
"of a machine's memory, below which it was short"
SWAPPED_BYTES = 2**26
"written to swap while a run's steps ran, above which it is said"
GPU_UTILIZATION = 80
"percent; a GPU below it waits for its host"
DATA_SHARE = 0.05
"of a step's time waited for data, above which it is said"
_READ_AHEAD = ": --dataloader_num_workers 1 or more reads ahead"


def warnings_of(record: RunRecord) -> list[str]:
    """Of one run that ended ok; empty where nothing was seen."""
    start, slowest = record.num_warmup_steps, record.slowest_rank_seconds
    found = []
    waited = [sum(phases.get("data", [])[start:]) for phases in record.phase_seconds]
    if waited and max(waited) > DATA_SHARE * sum(slowest[start:]):
        share = max(waited) / sum(slowest[start:])
        hint = "" if (record.asked["config"].get("dataloader_num_workers") or 0) else _READ_AHEAD
        found.append(f"waited for data {share:.0%} of the time{hint}")
    if (share := padding_share(record)) > PADDING_SHARE:
        packed = all(fact["packing"] == "multipack" for fact in record.datasets) and bool(record.datasets)
        helps = "a longer --seq_len leaves less" if packed else "--packing multipack puts documents together"
        found.append(f"{share:.0%} of the tokens were padding: {helps}")
    if (record.fp32_pass or {}).get("status") == "failed":
        found.append(f"the fp32 steps failed: {record.fp32_pass['reason']}")
    found += _of_ram(record.host_ram or {})
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
        found += [f"rank {rank}: {sentence}" for sentence in _of_gpu(watch, start)]
    return found


def padding_share(record: RunRecord) -> float:
    """Of the tokens that were drawn; 0 where that is not known."""
    drawn = (record.tokens_counted or {}).get("drawn")
    return (record.num_padding_tokens or 0) / drawn if drawn else 0.0


def rank_differences(found: dict[str, Any]) -> str | None:
    """Of an entry of weights_of_ranks, what is wrong; None where all ranks hold the same weights."""
    if not found["num_different"]:
        return None
    return (
        f"ranks hold different weights after step {found['step']}: {found['num_different']} of "
        f"{found['num_compared']} tensors, such as {', '.join(found['different'])}"
    )


def _of_ram(ram: dict[str, int]) -> list[str]:
    found = []
    if ram and ram["least_available_bytes"] < FREE_RAM_SHARE * ram["total_bytes"]:
        free, total = (ram[name] / 2**30 for name in ("least_available_bytes", "total_bytes"))
        found.append(
            f"host RAM was short: {free:.1f} of {total:.0f} GiB were left; --streaming true, fewer "
            "--dataloader_num_workers or less offload"
        )
    if ram.get("swapped_out_bytes", 0) > SWAPPED_BYTES:
        found.append(f"the machine swapped {ram['swapped_out_bytes'] / 2**30:.1f} GiB out while steps ran")
    return found


def _of_gpu(watch: dict[str, Any], start: int) -> list[str]:
    found = []
    if (timed := (watch.get("utilization") or [])[start:]) and median(timed) < GPU_UTILIZATION:
        found.append(
            f"the GPU was busy {median(timed):.0f}% of the time: larger batches or --torch_compile fill it"
        )
    if (watch.get("used_bytes_before") or 0) > USED_BYTES or (watch.get("num_processes_before") or 0) > 0:
        used = (watch.get("used_bytes_before") or 0) / 2**30
        found.append(f"the GPU was in use before the run ({used:.1f} GiB)")
    if reasons := watch.get("throttle_reasons"):
        shown = ", ".join(f"{name} in {count} steps" for name, count in reasons.items())
        found.append(f"clocks throttled: {shown}")
    if retries := (watch.get("allocator") or {}).get("num_alloc_retries"):
        found.append(f"the allocator ran out and retried {retries} times: the peak was near the limit")
    return found
