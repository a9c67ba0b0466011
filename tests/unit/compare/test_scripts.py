"""Runs of a user's own script: the grid of its arguments, and what excludes it."""

from pathlib import Path

from slm_toolkit.compare.grid import Script, plan_scripts
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.record.run_record import settings_of
from slm_toolkit.strategy.strategy import find_strategy


def test_values_with_commas_make_a_grid_and_one_word_with_equals_does_not() -> None:
    script = Script(
        "train.py", ("--batch", "4,8", "--lr", "1e-4,1e-3", "--layers=q,v", "--name", "a,", "x,y")
    )
    tail = ("--layers=q,v", "--name", "a,", "x,y")
    assert script.grid == [
        ("--batch", batch, "--lr", rate, *tail) for batch in ("4", "8") for rate in ("1e-4", "1e-3")
    ]
    assert Script("train.py", ("--shift", "-1,2")).grid == [("--shift", "-1,2")]


def test_arguments_are_settings_by_name() -> None:
    words = ["--lr", "1e-4", "--batch=8", "--fast", "--seq_len", "64", "--warm-up", "2", "file.txt"]
    assert settings_of(words) == {
        "lr": 1e-4,
        "batch": 8,
        "fast": True,
        "script_seq_len": 64,  # --seq_len is a flag of ours, with another meaning
        "warm_up": 2,
    }


def test_each_strategy_gets_each_combination(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    script = Script.of(str(tmp_path / "train.py"), ["--batch", "4,8"])
    strategies = [find_strategy("single"), find_strategy("ds_zero2")]
    options = {"num_processes": None, "output_dir": str(tmp_path / "runs"), "repeats": 2}
    runs = plan_scripts(script, strategies, machine=Machine(0, None), **options)
    assert [(run.strategy.name, run.num_processes, run.details) for run in runs[:4]] == [
        (*each, batch) for batch in ("4", "8") for each in (("single", 1), ("ds_zero2", 2))
    ]
    assert [run.run_name for run in runs[4:]] == [f"{run.run_name}-r2" for run in runs[:4]]
    assert len({run.identity for run in runs}) == 4
    (tmp_path / "train.py").write_text("# another script")
    changed = plan_scripts(script, strategies, machine=Machine(0, None), **options)
    assert not {run.identity for run in changed} & {run.identity for run in runs}
