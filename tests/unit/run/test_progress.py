"""The progress of a training: its stages before the first step, and a GPU that is nearly full."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from slm_toolkit.compare.local import last_step_of, progress_of
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.run import display
from slm_toolkit.run.observe import progress


def shown_in(folder: Path) -> display.TrainingProgress:
    """The progress of 10 steps, each of which is shown."""
    run = SimpleNamespace(
        run_dir=folder,
        accelerator=Accelerator(cpu=True),
        config=RunConfig(logging_steps=1),
        record=SimpleNamespace(first_step=0),
        num_steps=10,
    )
    return display.TrainingProgress(run, watch=None)


def test_the_first_retry_of_the_allocator_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    counts = iter((0, 2, 5))
    retries = {"num_ooms": 0}
    monkeypatch.setattr(
        display, "allocator_retries", lambda device: retries | {"num_alloc_retries": next(counts)}
    )
    shown = shown_in(tmp_path)
    printed = []
    for step in (1, 2, 3):
        shown.show(step, loss=2.0, tokens_per_second=100.0)
        printed.append("nearly full" in capsys.readouterr().err)
    assert printed == [False, True, False]
    assert shown.num_retries == 5


def test_a_stage_is_read_by_the_comparison_and_is_no_step(tmp_path: Path) -> None:
    with progress.starting(tmp_path, "setting up ddp"):
        assert progress_of(tmp_path) == {"stage": "setting up ddp"}
        assert last_step_of(tmp_path) is None
    shown = shown_in(tmp_path)
    assert progress_of(tmp_path) == {"stage": "first step"}
    shown.show(1, 2.0, None)
    assert last_step_of(tmp_path) == {"step": 1, "num_steps": 10, "loss": 2.0, "tokens_per_second": None}


def test_a_stage_makes_no_folder(tmp_path: Path) -> None:
    with progress.starting(tmp_path / "run", "setting up ddp"):
        assert list(tmp_path.iterdir()) == []


def test_a_start_that_fails_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    with pytest.raises(SystemExit), progress.starting(tmp_path, "reading data: x"):
        raise SystemExit(2)
    assert list(tmp_path.iterdir()) == []
