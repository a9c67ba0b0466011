"""Records to rows: every figure that a report shows, computed once, None where unknown."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_toolkit.flops import flops_per_token
from slm_toolkit.hardware import find_gpu, find_price
from slm_toolkit.models import ModelSpec
from slm_toolkit.predict.cost import usd_per_million_tokens
from slm_toolkit.record import RunRecord
from slm_toolkit.report.stats import throughput


@dataclass(frozen=True)
class Row:
    """One line of a report; the names are the keys of `--json`. Bytes are of the rank that holds most."""

    model: str
    strategy: str
    status: str
    reason: str | None
    evidence: str
    "measured: this comes from a run"
    engine: str | None
    zero_stage: int | None
    reshard_after_forward: bool | None
    world_size: int | None
    gpu: str | None
    numerics: str
    attn_implementation: str | None
    seq_len: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    gradient_checkpointing: bool
    torch_compile: bool
    optim: str
    seed: int
    learning_rate: float
    dataset: str
    max_steps: int | None
    "None: the default, three repeats of ten timed steps"
    losses: list[float | None]
    final_loss: float | None
    tokens_per_second: float | None
    "all ranks, median of the repeats"
    tokens_per_second_lowest: float | None
    tokens_per_second_highest: float | None
    tokens_per_second_per_gpu: float | None
    "per process where there is no GPU"
    mfu: float | None
    "0..1; None where the GPU's peak is not known"
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    peak_rss_bytes: int | None
    state_bytes_per_rank: dict[str, int] | None
    deepspeed_bytes: int | None
    "DeepSpeed's own estimate per GPU"
    usd_per_million_tokens: float | None
    price: str | None
    record: str
    "the record's file"


def row_of(record: RunRecord, path: Path, *, usd_per_gpu_hour: float | None = None) -> Row:
    """All figures of one record. An MFU over 100 % makes the row failed: a clock or a count is wrong."""
    config = record.asked["config"]
    rate = throughput(record)
    per_gpu = rate.tokens_per_second / record.world_size if rate else None
    gpu, price = find_gpu(record.gpu), find_price(record.gpu, usd_per_gpu_hour=usd_per_gpu_hour)
    spec = ModelSpec(**{f.name: record.model[f.name] for f in dataclasses.fields(ModelSpec)})
    status, reason, mfu = record.status, record.reason, None
    if gpu and per_gpu and config["numerics"] != "fp32":  # the peak we know is bf16's
        mfu = per_gpu * flops_per_token(spec, seq_len=config["seq_len"]) / gpu.dense_bf16_flops_per_second
        if mfu > 1:
            status = "failed"
            reason = (
                f"{per_gpu:,.0f} tokens/s are {mfu:.0%} of what a {gpu.name} can do: a wrong clock or count"
            )
    return Row(
        model=spec.name,
        strategy=record.strategy,
        status=status,
        reason=reason,
        evidence="measured",
        engine=record.engine,
        zero_stage=record.zero_stage,
        reshard_after_forward=record.reshard_after_forward,
        world_size=record.world_size,
        gpu=record.gpu,
        attn_implementation=record.attn_implementation,
        **{
            name: config[name]
            for name in (
                *("numerics", "seq_len", "per_device_train_batch_size", "gradient_accumulation_steps"),
                *("gradient_checkpointing", "torch_compile", "optim", "seed"),
                *("learning_rate", "dataset", "max_steps"),
            )
        },
        losses=record.losses,
        final_loss=record.losses[-1] if record.losses else None,
        tokens_per_second=rate.tokens_per_second if rate else None,
        tokens_per_second_lowest=rate.lowest if rate else None,
        tokens_per_second_highest=rate.highest if rate else None,
        tokens_per_second_per_gpu=per_gpu,
        mfu=mfu,
        peak_allocated_bytes=_largest(record.peak_allocated_bytes),
        peak_reserved_bytes=_largest(record.peak_reserved_bytes),
        peak_rss_bytes=_largest(record.peak_rss_bytes),
        state_bytes_per_rank=_largest_state(record.state_bytes),
        deepspeed_bytes=record.deepspeed_estimate["gpu_bytes"] if record.deepspeed_estimate else None,
        usd_per_million_tokens=usd_per_million_tokens(
            tokens_per_second=rate.tokens_per_second,
            usd_per_gpu_hour=price.usd_per_gpu_hour,
            num_gpus=record.world_size,
        )
        if rate and price
        else None,
        price=str(price) if price else None,
        record=str(path),
    )


def _largest(values: list[int] | None) -> int | None:
    return max(values) if values else None


def _largest_state(state_bytes: list[dict[str, int]]) -> dict[str, int] | None:
    return max(state_bytes, key=lambda parts: sum(parts.values())) if state_bytes else None


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]
