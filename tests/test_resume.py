"""Stop after step k, resume, and go on as if nothing had been."""

from pathlib import Path

import pytest
from conftest import launch, record_under

STEPS, STOP = 8, 5


def train(strategy: str, output_dir: Path, texts: Path, *more: str) -> dict:
    arguments = ("--model", "slm-1m", "--max_steps", str(STEPS), "--gradient_accumulation_steps", "2")
    data = ("--dataset", str(texts / "licence.txt"), "--seq_len", "64", "--save_final_model", "false")
    done = launch(
        *(*arguments, *data, "--run_name", "run", "--output_dir", str(output_dir), *more),
        config=f"accel_configs/{strategy}.yaml",
    )
    assert done.code == 0, done.err
    return record_under(output_dir)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp_full_shard", "ds_zero3"])
def test_losses_after_a_resume_equal_those_of_the_run_that_never_stopped(
    strategy: str, tmp_path: Path, texts: Path
) -> None:
    # the licence's 11 kB make 177 sequences of 64, 22 batches per rank: 8 steps of 2 stay in one epoch
    whole = train(strategy, tmp_path / "whole", texts, "--save_steps", str(STOP))
    checkpoint = tmp_path / "whole" / "run" / "checkpoints" / f"step_{STOP}"
    resumed = train(strategy, tmp_path / "resumed", texts, "--resume_from_checkpoint", str(checkpoint))
    assert resumed["first_step"] == STOP
    assert len(whole["losses"]) == STEPS
    assert resumed["losses"] == whole["losses"][STOP:]


@pytest.mark.slow
def test_a_resume_in_the_second_epoch_sees_the_batches_of_that_epoch(tmp_path: Path, texts: Path) -> None:
    small = tmp_path / "small.txt"
    small.write_text(
        (texts / "licence.txt").read_text()[:3000]
    )  # 46 sequences of 64: 5 batches of 4 per rank
    arguments = ("--model", "slm-1m", "--max_steps", "9", "--dataset", str(small), "--seq_len", "64")
    arguments += ("--save_final_model", "false", "--run_name", "run", "--save_steps", "7")
    whole = launch(*arguments, "--output_dir", str(tmp_path / "a"), config="accel_configs/ddp.yaml")
    assert whole.code == 0, whole.err
    resume = ("--resume_from_checkpoint", str(tmp_path / "a/run/checkpoints/step_7"))
    again = launch(*arguments, *resume, "--output_dir", str(tmp_path / "b"), config="accel_configs/ddp.yaml")
    assert again.code == 0, again.err
    assert record_under(tmp_path / "b")["losses"] == record_under(tmp_path / "a")["losses"][7:]


def test_a_stream_resumes_where_it_stopped(tmp_path: Path, texts: Path) -> None:
    arguments = (
        "--model",
        "slm-1m",
        "--max_steps",
        "6",
        "--dataset",
        str(texts),
        "--seq_len",
        "64",
        "--streaming",
    )
    arguments += ("--save_final_model", "false", "--run_name", "run", "--save_steps", "4")
    arguments += ("--eval_steps", "6", "--eval_batches", "1")
    whole = launch(*arguments, "--output_dir", str(tmp_path / "a"), config="accel_configs/ddp.yaml")
    assert whole.code == 0, whole.err
    resume = ("--resume_from_checkpoint", str(tmp_path / "a/run/checkpoints/step_4"))
    again = launch(*arguments, *resume, "--output_dir", str(tmp_path / "b"), config="accel_configs/ddp.yaml")
    assert again.code == 0, again.err
    of_whole, of_resumed = record_under(tmp_path / "a"), record_under(tmp_path / "b")
    assert of_resumed["losses"] == of_whole["losses"][4:]
    assert of_resumed["eval_losses"] == of_whole["eval_losses"]


def test_latest_is_the_newest_and_old_checkpoints_go(tmp_path: Path) -> None:
    arguments = ("--model", "slm-1m", "--max_steps", "8", "--save_steps", "2", "--output_dir", str(tmp_path))
    first = launch(*arguments, config="accel_configs/ddp.yaml")
    assert first.code == 0, first.err
    (folder,) = tmp_path.glob("*/checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == ["step_6", "step_8"]
    done = launch(*arguments, "--resume_from_checkpoint", "latest", config="accel_configs/ddp.yaml")
    assert done.code != 0
    assert "step_8 has all 8 steps done" in done.err

    other = ("--seed", "1", "--resume_from_checkpoint", str(folder / "step_8"), "--model", "slm-1m")
    done = launch(*other, "--output_dir", str(tmp_path / "new"), config="accel_configs/fsdp_full_shard.yaml")
    assert done.code != 0
    assert "seed 0 in the checkpoint, 1 now; engine 'ddp' in the checkpoint, 'fsdp2' now" in done.err
    assert not (tmp_path / "new").exists()

    # a shorter run in the same folder: its checkpoints stay, the other's are not rotated in their place
    again = ("--model", "slm-1m", "--max_steps", "2", "--save_steps", "1", "--seed", "7")
    here = ("--output_dir", str(tmp_path), "--run_name", folder.parent.name)
    done = launch(*again, *here, config="accel_configs/ddp.yaml")
    assert done.code == 0, done.err
    assert sorted(path.name for path in folder.iterdir()) == ["step_1", "step_2", "step_6", "step_8"]
