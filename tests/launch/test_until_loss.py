"""--until_loss: every rank ends after the same step, once the mean loss of ten steps is low enough."""

import json
from pathlib import Path

from conftest import compare, launch, record_under

from slm_toolkit.record.files import read_record
from slm_toolkit.record.time_to_loss import time_to_loss

FLAGS = ("--model", "slm-1m", "--seq_len", "32", "--learning_rate", "3e-3", "--max_steps", "120")


def test_strategies_end_at_the_same_step_and_the_table_says_when(tmp_path: Path) -> None:
    strategies = ("ddp", "ds_zero3")
    done = compare(*FLAGS, "--until_loss", "4.4", "--strategy", *strategies, "--json", folder=tmp_path)
    assert {row["status"] for row in done.rows.values()} == {"ok"}
    steps = {row["steps_to_loss"] for row in done.rows.values()}
    assert len(steps) == 1
    (num_steps,) = steps
    assert 10 <= num_steps < 120
    for row in done.rows.values():
        assert len(row["losses"]) in (num_steps + 1, num_steps + 2)  # known one step later
        assert sum(row["losses"][num_steps - 10 : num_steps]) / 10 <= 4.4
        assert sum(row["losses"][num_steps - 11 : num_steps - 1]) / 10 > 4.4
        assert row["seconds_to_loss"] > 0


def test_a_run_that_is_there_evaluates_saves_its_model_and_can_be_resumed(tmp_path: Path) -> None:
    more = ("--output_dir", str(tmp_path), "--run_name", "run", "--eval_steps", "1000", "--save_steps", "5")
    more += ("--save_final_model", "true")
    done = launch(*FLAGS, *more, "--until_loss", "4.4", config="accel_configs/ddp.yaml")
    assert done.code == 0, done.err
    assert "loss 4.4 reached after step " in done.err
    record = record_under(tmp_path)
    num_steps = len(record["losses"])
    assert num_steps < 120
    assert [each["step"] for each in record["eval_losses"]] == [num_steps]
    assert Path(record["model_dir"], "model.safetensors").exists()
    (path,) = tmp_path.glob("*/record.json")
    assert num_steps - 2 <= time_to_loss(read_record(path), 4.4).num_steps <= num_steps
    resumed = launch(
        *(*FLAGS[:-1], str(num_steps + 20), *more, "--resume_from_checkpoint", "latest"),
        config="accel_configs/ddp.yaml",
    )
    assert resumed.code == 0, resumed.err
    after = json.loads(path.read_text())
    assert after["first_step"] == num_steps // 5 * 5
    assert len(after["losses"]) == num_steps + 20 - after["first_step"]
