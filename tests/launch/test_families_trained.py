"""Each family of models trains under DDP, FSDP and ZeRO-3 on two processes with equal losses."""

import json
from pathlib import Path

import pytest
from conftest import ROOT, compare

MODELS = ROOT / "bench" / "data" / "models"
NAMES = (
    "qwen3-2m",
    "gemma2-2m",
    "gemma3-2m",
    "smollm3-2m",
    "olmo2-3m",
    "granite-2m",
    "phi3-2m",
    "falcon3-2m",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_trains_with_equal_losses_under_every_engine(name: str, tmp_path: Path) -> None:
    # the second loss comes after an optimizer step, so it depends on gradients, their reduction and AdamW
    flags = ("--max_steps", "2", "--seq_len", "96", "--per_device_train_batch_size", "2")
    if name == "gemma2-2m":
        flags += ("--attn_implementation", "eager")
    strategies = ("ddp", "fsdp_full_shard", "ds_zero3")
    done = compare("--model", str(MODELS / name), "--strategy", *strategies, *flags, folder=tmp_path)
    assert set(done.rows) == set(strategies), done.finished.err
    losses = [json.loads(path.read_text())["losses"] for path in tmp_path.glob("*/record.json")]
    assert len(losses) == 3
    for others in losses[1:]:
        assert others == pytest.approx(losses[0], abs=0.001)  # the limit of the parity check, in bf16
    assert losses[0][1] < losses[0][0]
