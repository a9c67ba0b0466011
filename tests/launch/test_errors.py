"""A rehearsal by the real trainer is close to its estimate."""

import json
from pathlib import Path

import pytest
from conftest import slm

from slm_toolkit.record.files import find_records
from slm_toolkit.report.recorded_estimate import estimate_of


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """slm-1m as rank 0 of 2, every allocation traced, by the trainer itself."""
    folder = tmp_path_factory.mktemp("rehearsed")
    done = slm(
        *("compare", "--model", "slm-1m", "--strategy", "ddp", "fsdp_full_shard", "--rehearse", "2"),
        *("--output_dir", str(folder), "--json"),
    )
    assert done.code == 0, done.err
    rows = json.loads(done.out)
    assert all(row["estimated_peak_bytes"] for row in rows)
    return folder


@pytest.mark.quick
def test_a_rehearsal_by_the_real_trainer_is_within_5_percent_of_the_estimate(rehearsed: Path) -> None:
    records, problems = find_records([rehearsed])
    assert (len(records), problems) == (2, [])
    for _, record in records:
        estimate, peak = estimate_of(record), record.memory_at_peak
        assert (record.is_rehearsal, record.world_size, record.gpu) == (True, 2, None)
        assert estimate.peak_allocated_bytes == pytest.approx(peak["num_bytes"], rel=0.05)
        at_peak = (estimate.peak_instant, peak["phase"], peak["module"])
        assert at_peak in (
            ("backward: norm", "backward", "norm"),
            ("forward: the loss", "forward", "lm_head"),
        )
        assert sum(peak["parts"].values()) == peak["num_bytes"]
