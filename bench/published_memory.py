"""Estimates against other people's published peak memory, and against the paper's fits and OOMs.

    python bench/published_memory.py

bench/data/published_memory.csv holds torchtitan's, torchao's and atorch's rows without tensor, pipeline or
context parallelism, in bf16, with known checkpointing, and what their scripts hold beside a training step
(`extra_bytes_per_token`, with its reason). Allocated is compared with allocated, reserved with the middle of
our range. Rows that say `extra` are further ones, not in the medians. GiB."""

import csv
from pathlib import Path
from statistics import median
from typing import Any

from slm_toolkit.config.run_config import RunConfig, in_todays_names
from slm_toolkit.hardware.gpus import gpu_of_name
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.memory.machine import OUTSIDE_ERROR, allocator_slack, context_bytes, needed_bytes
from slm_toolkit.predict.memory.peak import peak
from slm_toolkit.predict.setup.setup import Setup
from slm_toolkit.strategy.strategy import find_strategy

TABLE = Path(__file__).parent / "data" / "published_memory.csv"
_SHAPE = (*("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size"),)

# Ashkboos et al., figures 1 to 4: number of the fact, model, strategies, batch, GPUs, GPU, attention, whether
# it fits. Where a figure plots the best of several strategies, one is enough; an OOM is one under all.
PAPER = (
    (1, "slm-2b", ("single",), 4, 1, "a100-40gb", "sdpa", True),
    (1, "slm-2b", ("single",), 16, 1, "a100-40gb", "sdpa", False),
    (2, "slm-2b", ("single",), 16, 1, "a100-80gb", "sdpa", True),
    (3, "slm-2b", ("ddp",), 16, 64, "a100-80gb", "sdpa", False),
    (3, "slm-2b", ("fsdp_full_shard",), 16, 64, "a100-80gb", "sdpa", True),
    (3, "slm-2b", ("fsdp_shard_grad_op",), 16, 64, "a100-80gb", "sdpa", True),
    (4, "slm-2b", ("fsdp_shard_grad_op",), 8, 16, "a100-40gb", "sdpa", True),
    (4, "slm-2b", ("fsdp_full_shard",), 8, 32, "a100-40gb", "sdpa", True),
    (4, "slm-2b", ("fsdp_full_shard",), 8, 64, "a100-40gb", "sdpa", True),
    *(
        (5, model, ("ddp", "fsdp_shard_grad_op", "fsdp_full_shard"), batch, 64, "a100-80gb", "eager", fits)
        for model, batch, fits in (
            *(("slm-1b", 16, False), ("slm-2b", 16, False), ("slm-100m", 16, True)),
            *(("slm-500m", 16, True), ("slm-1b", 8, True), ("slm-2b", 8, True)),
        )
    ),
    (6, "slm-100m", ("single", "ddp", "fsdp_full_shard"), 128, 64, "a100-80gb", "sdpa", False),
)


def main() -> None:
    errors: dict[str, list[float]] = {}
    for row in published():
        error, ours = compared(row)
        if row["counted"] == "yes":
            errors.setdefault(row["metric"], []).append(abs(error))
        settings = f"b{row['batch']} s{row['seq_len']} N{row['num_gpus']} {row['gradient_checkpointing']}"
        compiled = " compiled" if row["torch_compile"] == "true" else ""
        print(
            f"{row['source'][:44]:44} {row['model']} {settings + compiled:36} {row['metric']:9} "
            f"{float(row['published_gib']):7.2f}  ours {ours / 2**30:7.2f}  {error:+6.1%}  {row['counted']}"
        )
        if abs(error) > 0.1:
            print(f"    why: {row['remark']}")
    bare = [
        abs(compared({**row, "extra_bytes_per_token": 0})[0])
        for row in published()
        if row["counted"] == "yes" and row["metric"] == "allocated"
    ]
    print(f"\nallocated, without what the scripts hold beside a step: median error {median(bare):.1%}")
    for metric, found in errors.items():
        print(f"{metric}: {len(found)} rows, median error {median(found):.1%}, worst {max(found):.1%}")
    rows = published()
    inside = sum(is_in_range(row) for row in rows)
    print(f"in the printed range: {inside} of {len(rows)} rows, extra ones included")
    wrong = [case for case in PAPER if fits(case) != case[-1]]
    print(f"the paper's fits and OOMs: {len(PAPER) - len(wrong)} of {len(PAPER)} right")
    for case in wrong:
        print(f"    wrong: {case}")


def published() -> list[dict[str, Any]]:
    with TABLE.open(newline="") as file:
        return list(csv.DictReader(file))


def compared(row: dict[str, Any]) -> tuple[float, float]:
    """The estimate's error as a fraction of the published figure, and its bytes."""
    spec = ModelSpec(row["model"], *(int(row[name]) for name in _SHAPE))
    config = RunConfig(
        model=row["model"],
        seq_len=int(row["seq_len"]),
        per_device_train_batch_size=int(row["batch"]),
        numerics="stock",
        gradient_checkpointing=row["gradient_checkpointing"],
        **in_todays_names(
            {"torch_compile": row["torch_compile"] == "true", "loss_kernel": row["loss_kernel"]}
        ),
        optim=row["optim"],
    ).with_defaults(has_gpu=True)
    strategy = find_strategy("fsdp_full_shard")
    setup = Setup(spec, strategy, config, num_gpus=int(row["num_gpus"]))
    ours = estimated_bytes(setup, row)
    return ours / (float(row["published_gib"]) * 2**30) - 1, ours


def estimated_bytes(setup: Setup, row: dict[str, Any]) -> float:
    """Return what the row's metric counts: allocated, reserved, or used (reserved with CUDA's context)."""
    memory = peak(setup)
    ours = memory.peak_bytes + int(row["extra_bytes_per_token"]) * setup.num_tokens
    if row["metric"] in ("reserved", "used"):
        ours += allocator_slack(setup, memory, allocated=ours)
    return ours + (context_bytes(num_gpus=setup.num_gpus) if row["metric"] == "used" else 0)


def fits(case: tuple[Any, ...]) -> bool:
    """Whether one of the strategies fits, in pure bf16 with PyTorch's default (foreach) AdamW."""
    _, model, strategies, batch, num_gpus, gpu, attention, _ = case
    config = RunConfig(
        model=model,
        seq_len=1024,
        per_device_train_batch_size=batch,
        attn_implementation=attention,
        numerics="pure_bf16",
        optim="adamw_torch",
    ).with_defaults(has_gpu=True)
    usable = gpu_of_name(gpu).memory_bytes - context_bytes(num_gpus=num_gpus)
    setups = [
        Setup(
            find_model(model),
            find_strategy(strategy),
            config,
            num_gpus=1 if strategy == "single" else num_gpus,
        )
        for strategy in strategies
    ]
    return min(map(_needed, setups)) <= usable


def _needed(setup: Setup) -> int:
    memory = peak(setup)
    slack = allocator_slack(setup, memory, allocated=memory.peak_bytes)
    return needed_bytes(memory.peak_bytes, slack)


def is_in_range(row: dict[str, Any]) -> bool:
    """Whether the published bytes lie in the range that an estimate prints."""
    estimated = compared(row)[1]
    return abs(float(row["published_gib"]) * 2**30 - estimated) <= OUTSIDE_ERROR * estimated


if __name__ == "__main__":
    main()
