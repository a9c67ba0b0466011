"""--max_time: the run saves a checkpoint, ends with exit code 0, and can be resumed."""

from pathlib import Path

import pytest
from conftest import launch, record_under

from slm_toolkit.config.run_config import RunConfig


@pytest.mark.quick
def test_a_time_is_read_in_its_forms_and_needs_checkpoints() -> None:
    # 2 x 60 + 30; 3600 + 5; 2 x 86400 + 3 x 3600 + 4 x 60 + 5
    for text, seconds in {"90": 90.0, "02:30": 150.0, "01:00:05": 3605.0, "2:03:04:05": 183845.0}.items():
        assert RunConfig(max_time=text).max_seconds == seconds
    for text in ("", "0", "00:00", "1h", "-5", "1:2:3:4:5", "1.5"):
        (problem,) = RunConfig(max_time=text, save_steps=5).problems()
        assert problem == f"--max_time is {text!r}: use DD:HH:MM:SS, HH:MM:SS or seconds"
    assert RunConfig(max_time="90").problems() == ["--max_time without --save_steps"]


@pytest.mark.parametrize("strategy", ["ddp", "ds_zero2"])
def test_a_run_whose_time_is_over_saves_and_is_resumed(strategy: str, tmp_path: Path) -> None:
    """A process takes over a second to its first step, so this time is over after the first steps."""
    flags = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "30", "--save_steps", "25")
    flags += ("--output_dir", str(tmp_path), "--run_name", "timed")
    done = launch(*flags, "--max_time", "1", config=f"accel_configs/{strategy}.yaml")
    assert done.code == 0, done.err
    record = record_under(tmp_path)
    assert record["status"] == "timeout"
    stopped_after = int(record["reason"].split("after step ")[1].split()[0])
    assert record["reason"] == f"--max_time 1 is over after step {stopped_after} of 30"
    assert stopped_after < 25
    assert f"note: {record['reason']}\nhint: --resume_from_checkpoint latest resumes from " in done.err
    again = launch(*flags, "--resume_from_checkpoint", "latest", config=f"accel_configs/{strategy}.yaml")
    assert again.code == 0, again.err
    record = record_under(tmp_path)
    assert (record["status"], record["first_step"]) == ("ok", stopped_after)
