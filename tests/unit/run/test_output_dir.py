"""Folders that one training has for itself."""

from pathlib import Path

import pytest

from slm_toolkit.base.safe_files import hold
from slm_toolkit.run.checkpoint.output_dir import hold_run, hold_swap_folder
from slm_toolkit.strategy.strategy import find_strategy


@pytest.mark.parametrize(
    ("take", "says"), [(hold_run, "is training in"), (hold_swap_folder, "swaps its tensors to")]
)
def test_a_folder_that_another_training_has_is_refused(take: object, says: str, tmp_path: Path) -> None:
    with (
        hold(tmp_path / ".train.lock"),
        pytest.raises(ValueError, match=rf"^process \d+ on .* {says} {tmp_path}\nhint: wait until"),
    ):
        take(tmp_path)
    take(tmp_path)  # it has ended


def test_only_offload_to_nvme_swaps_to_a_folder() -> None:
    assert find_strategy("ds_zero3_nvme").swap_folders == {"/tmp/slm_toolkit_nvme"}
    for name in ("ddp", "ds_zero3", "ds_zero3_offload"):
        assert find_strategy(name).swap_folders == set()
