"""The progress of a training: its stages before the first step, and its steps."""

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


def test_a_stage_is_read_by_the_comparison_and_is_no_step(tmp_path: Path) -> None:
    with progress.starting(tmp_path, "setting up ddp"):
        assert progress_of(tmp_path) == {"stage": "setting up ddp"}
        assert last_step_of(tmp_path) is None
    shown = shown_in(tmp_path)
    assert progress_of(tmp_path) == {"stage": "first step"}
    shown.show(1, 2.0, None)
    assert last_step_of(tmp_path) == {"step": 1, "num_steps": 10, "loss": 2.0, "tokens_per_second": None}


def test_a_start_that_fails_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "run"):
        with pytest.raises(SystemExit), progress.starting(folder, "reading data: x"):
            raise SystemExit(2)
    assert list(tmp_path.iterdir()) == []
