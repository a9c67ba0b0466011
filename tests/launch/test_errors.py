"""A rehearsal by the real trainer stands in `slm report --errors`, close to its estimate."""

import json
from pathlib import Path

import pytest
from conftest import Finished, slm

from slm_toolkit.record.files import find_records
from slm_toolkit.report.tables.ledger import ledger_of


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


@pytest.fixture(scope="module")
def printed(rehearsed: Path) -> Finished:
    return slm("report", str(rehearsed), "results/cpu", "--errors")


@pytest.mark.quick
def test_a_rehearsal_by_the_real_trainer_is_within_5_percent_of_the_estimate(rehearsed: Path) -> None:
    entries, left_out = ledger_of(find_records([rehearsed])[0])
    assert left_out == []
    peaks = {entry.strategy: entry for entry in entries if entry.what == "peak_allocated"}
    assert sorted(peaks) == ["ddp", "fsdp_full_shard"]
    for entry in peaks.values():
        assert (entry.evidence, entry.world_size, entry.gpu) == ("rehearsed", 2, None)
        assert abs(entry.error) < 0.05
        assert entry.predicted_instant == "backward: the loss"
        assert entry.observed_instant == "backward: loss"
        parts = [
            other for other in entries if other.record == entry.record and not other.what.startswith("peak_")
        ]
        assert sum(part.observed_bytes for part in parts) == entry.observed_bytes
        assert sum(part.predicted_bytes for part in parts) == entry.predicted_bytes


@pytest.mark.quick
def test_the_table_names_the_evidence_and_sums_up(printed: Finished) -> None:
    assert (printed.code, printed.err) == (0, "")
    assert "backward: the loss" in printed.out
    lines = [line for line in printed.out.splitlines() if line.startswith("│ all")]
    assert ["rehearsed" in line for line in lines] == [True, False]
    assert ["measured" in line for line in lines] == [False, True]
