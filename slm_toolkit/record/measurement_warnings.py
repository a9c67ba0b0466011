"""Sentences about what slowed a run down or disturbed its measurement, for the run's end and for reports."""

from statistics import median
from typing import Any

from slm_toolkit.record.run_record import RunRecord

OTHER_CORES = 0.25
"warn if other programs kept more CPU cores busy during a run on CPU processes"
_USED_BYTES = 2**30
"warn if more bytes of a GPU were in use before the run opened it"
PADDING_SHARE = 0.1
"warn if a larger share of the tokens was padding"
FREE_RAM_SHARE = 0.05
"warn if a smaller share of the machine's memory was free"
SWAPPED_BYTES = 2**26
"warn if more bytes were written to swap while the steps ran"
GPU_UTILIZATION = 80
"percent; warn below it, because the GPU then waits for its host"
DATA_SHARE = 0.05
"warn if waiting for data took a larger share of the steps' time"
_READ_AHEAD = ": --dataloader_num_workers 1 or more reads ahead"


def warnings_of(record: RunRecord) -> list[str]:
    """Return the warnings of one run that ended ok; empty if there are none."""
    start, slowest = record.num_warmup_steps, record.slowest_rank_seconds
    warnings = []
    waited = [sum(phases.get("data", [])[start:]) for phases in record.phase_seconds]
    if waited and max(waited) > DATA_SHARE * sum(slowest[start:]):
        share = max(waited) / sum(slowest[start:])
        reads_ahead = (record.asked["config"].get("dataloader_num_workers") or 0) or record.is_of_script
        hint = "" if reads_ahead else _READ_AHEAD
        warnings.append(f"waited for data {share:.0%} of the time{hint}")
    if (share := padding_share(record)) > PADDING_SHARE:
        packed = all(fact["packing"] == "multipack" for fact in record.datasets) and bool(record.datasets)
        helps = "; use a longer --seq_len" if packed else "; --packing multipack packs documents together"
        warnings.append(f"{share:.0%} of the tokens were padding{'' if record.is_of_script else helps}")
    if (record.fp32_pass or {}).get("status") == "failed":
        warnings.append(f"the fp32 steps failed: {record.fp32_pass['reason']}")
    if record.plain_kernels:
        warnings.append(record.plain_kernels)
    warnings += _ram_warnings(record.host_ram or {})
    compiled = [
        step + 1 for step, graphs in enumerate(record.num_graphs_compiled) if graphs and step >= start
    ]
    if compiled:
        warnings.append(f"compiled again in timed step {', '.join(map(str, compiled[:5]))}")
    if not record.gpu and (record.other_busy_cores or 0) > OTHER_CORES:
        warnings.append(f"other programs kept {record.other_busy_cores:.1f} CPU cores busy")
    if (step := next((step for step, loss in enumerate(record.losses, 1) if loss is None), None)) is not None:
        warnings.append(f"the loss is not finite from step {step} on")
    for rank, watch in enumerate(record.gpu_watch):
        warnings += [f"rank {rank}: {sentence}" for sentence in _gpu_warnings(watch, start)]
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


def _ram_warnings(ram: dict[str, int]) -> list[str]:
    warnings = []
    if ram and ram["least_available_bytes"] < FREE_RAM_SHARE * ram["total_bytes"]:
        free, total = (ram[name] / 2**30 for name in ("least_available_bytes", "total_bytes"))
        warnings.append(
            f"host RAM was short: only {free:.1f} of {total:.0f} GiB were free; use --streaming true, fewer "
            "--dataloader_num_workers or less offload"
        )
    if ram.get("swapped_out_bytes", 0) > SWAPPED_BYTES:
        warnings.append(
            f"the machine swapped {ram['swapped_out_bytes'] / 2**30:.1f} GiB out while the steps ran"
        )
    return warnings


def _gpu_warnings(watch: dict[str, Any], start: int) -> list[str]:
    warnings = []
    if (timed := (watch.get("utilization") or [])[start:]) and median(timed) < GPU_UTILIZATION:
        warnings.append(
            f"the GPU was busy only {median(timed):.0f}% of the time; larger batches or --kernels "
            "compiled use it better"
        )
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
