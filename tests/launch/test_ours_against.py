"""Other trainers really train beside ours, on the same batches, with the same losses."""

import importlib.util
import json
import shlex
import sys
from pathlib import Path

import pytest
import torch
from conftest import quiet_copy, run, slm
from safetensors.torch import save_file

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.rivals.launch import SCRIPT
from slm_toolkit.rivals.work import write_work

LITGPT = importlib.util.find_spec("litgpt") is not None
SMALL = ("--strategy", "ddp", "--model", "slm-1m", "--seq_len", "32", "--numerics", "fp32")


def rows_of(folder: Path, *more: str) -> tuple[dict[str, dict], str]:
    """The rows by strategy, and what was printed on stderr."""
    done = slm("compare", *SMALL, "--json", "--output_dir", str(folder), *more, timeout=600)
    assert done.out, done.err
    return {row["strategy"]: row for row in json.loads(done.out)}, done.err


@pytest.mark.quick
def test_hugging_faces_trainer_is_a_row_of_its_own_with_our_losses(tmp_path: Path) -> None:
    words = ("--max_steps", "13", "--timing_warmup_steps", "3", "--ours_against", "trainer")
    rows, _ = rows_of(tmp_path / "runs", *words)
    ours, theirs = rows["ddp"], rows["Hugging Face Trainer, ddp"]
    assert (theirs["status"], theirs["engine"], theirs["world_size"]) == ("ok", "ddp", 2)
    assert theirs["losses"] == pytest.approx(ours["losses"], abs=1e-5)
    assert len(set(ours["losses"])) == 13
    assert (theirs["parity_reference"], theirs["parity_holds"]) == ("ddp", True)
    assert (theirs["num_timed_steps"], ours["num_timed_steps"]) == (10, 10)
    assert theirs["tokens_per_step"] == ours["tokens_per_step"] == theirs["tokens_counted"]["drawn"] / 13
    assert theirs["state_bytes_per_rank"] is None  # unknown, not zero
    assert not (Path(theirs["record"]).parent / "work").exists()

    _, said = rows_of(tmp_path / "runs", *words)
    assert "2/2  Hugging Face Trainer, ddp  ok  kept from" in said
    again = json.loads(slm("report", str(quiet_copy(tmp_path / "runs", tmp_path / "quiet")), "--json").out)
    assert {row["strategy"]: row["rank"] for row in again} == {"ddp": 1, "Hugging Face Trainer, ddp": 1}


@pytest.mark.slow
def test_a_dataset_micro_steps_and_a_schedule_change_no_loss(tmp_path: Path, texts: Path) -> None:
    # 32 sequences a step: the epoch of some 350 is over after eleven steps, and the next has another order
    words = ("--dataset", str(texts / "licence.txt"), "--per_device_train_batch_size", "8")
    words += ("--gradient_accumulation_steps", "2", "--lr_scheduler_type", "linear", "--max_steps", "24")
    words += (
        "--warmup_steps",
        "3",
        "--gradient_checkpointing",
        "full",
        "--ours_against",
        "trainer",
        "--max_grad_norm",
        "0.5",
    )
    rows, _ = rows_of(tmp_path, *words)
    assert rows["Hugging Face Trainer, ddp"]["losses"] == pytest.approx(rows["ddp"]["losses"], abs=1e-4)


@pytest.mark.skipif(LITGPT, reason="LitGPT is installed")
def test_a_trainer_that_is_not_installed_is_a_row_that_says_how(tmp_path: Path) -> None:
    rows, said = rows_of(tmp_path, "--max_steps", "2", "--ours_against", "litgpt")
    assert rows["ddp"]["status"] == "ok"
    row = rows["LitGPT, ddp"]
    assert row["status"] == "failed"
    assert row["reason"].startswith(
        "LitGPT needs litgpt, which is not installed: pip install --no-deps litgpt"
    )
    assert row["reason"] in said


@pytest.mark.skipif(not LITGPT, reason="LitGPT is not installed")
def test_litgpt_is_a_row_of_its_own_with_our_losses(tmp_path: Path) -> None:
    words = ("--gradient_accumulation_steps", "2", "--max_steps", "13", "--ours_against", "litgpt")
    rows, _ = rows_of(tmp_path, *words)
    assert rows["LitGPT, ddp"]["losses"] == pytest.approx(rows["ddp"]["losses"], abs=1e-5)


@pytest.mark.quick
def test_data_with_labels_is_refused_in_the_row(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    line = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]}
    chats.write_text((json.dumps(line) + "\n") * 64)
    words = ("--dataset", str(chats), "--max_steps", "2", "--ours_against", "trainer")
    rows, _ = rows_of(tmp_path / "runs", *words)
    assert rows["Hugging Face Trainer, ddp"]["status"] == "failed"
    assert "--ours_against with chats" in rows["Hugging Face Trainer, ddp"]["reason"]


@pytest.mark.quick
def test_a_rank_that_runs_out_of_memory_says_so(tmp_path: Path) -> None:
    tokens = torch.zeros(600_000, 16, dtype=torch.int64)
    save_file({"tokens": tokens}, tmp_path / "many.safetensors")
    config = RunConfig(model="slm-1m", seq_len=16, max_steps=1, numerics="fp32", max_grad_norm=1.0)
    # 600,000 x 16 embeddings of 128 x 4 bytes: 4.6 GiB, more than the limit of 4 GiB
    many = {"batch_size": len(tokens), "tokens": str(tmp_path / "many.safetensors")}
    write_work(tmp_path / "work", config, num_processes=1, **many)
    command = shlex.join([sys.executable, str(SCRIPT), "bare", str(tmp_path / "work" / "work.json")])
    done = run("bash", "-c", f"ulimit -v {4 * 2**20}; {command}", cold=True)
    assert done.code != 0
    assert "can't allocate memory" in json.loads((tmp_path / "work/rank0.json").read_text())["out_of_memory"]
