"""The progress of a training on a GPU that is nearly full."""

from pathlib import Path

import pytest
import torch

from slm_toolkit.run.observe import progress


def test_the_first_retry_of_the_allocator_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    counts = iter((0, 2, 5))
    retries = {"num_ooms": 0}
    monkeypatch.setattr(
        progress, "allocator_retries", lambda device: retries | {"num_alloc_retries": next(counts)}
    )
    shown = progress.TrainingProgress(tmp_path, 0, 10, device=torch.device("cpu"), logging_steps=1)
    printed = []
    for step in (1, 2, 3):
        shown.show(step, loss=2.0, tokens_per_second=100.0)
        printed.append("nearly full" in capsys.readouterr().err)
    assert printed == [False, True, False]
    assert shown.num_retries == 5
