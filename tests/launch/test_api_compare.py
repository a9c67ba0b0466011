"""`api.compare` launches real runs, keeps their records, and says what it can't run."""

import json
import os
from pathlib import Path
from unittest.mock import patch

import pytest
from conftest import ROOT, WARM, slm

from slm_toolkit import api


def test_two_strategies_are_compared_and_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def compared() -> api.Report:
        with patch.dict(os.environ, WARM.env()):
            return api.compare(
                model="slm-1m", strategy=["ddp", "fsdp_full_shard"], max_steps=4, output_dir=tmp_path / "runs"
            )

    report = compared()
    assert [(row.strategy, row.status) for row in report] == [("ddp", "ok"), ("fsdp_full_shard", "ok")]
    assert [len(record.losses) for record in report.records] == [4, 4]
    assert all(path.is_file() for path, _ in report.records.pairs)
    shown = capfd.readouterr()
    assert (shown.out, "2/2  fsdp_full_shard  ok" in shown.err) == ("", True)

    again = compared()
    assert "kept from" in capfd.readouterr().err
    assert again.to_dicts() == report.to_dicts()
    shown_again = slm("report", str(tmp_path / "runs"), "--json").out
    assert json.loads(json.dumps(report.to_dicts())) == json.loads(shown_again)


@pytest.mark.slow
def test_a_users_own_script_is_compared_with_a_grid_of_its_arguments(tmp_path: Path) -> None:
    with patch.dict(os.environ, WARM.env()):
        report = api.compare(
            script=ROOT / "tests" / "scripts" / "loop.py",
            arguments=["--batch", "2,4"],
            strategy="ddp",
            output_dir=tmp_path,
        )
    assert {(row.status, row.tokens_per_step) for row in report} == {("ok", 2 * 2 * 32), ("ok", 2 * 4 * 32)}
    assert len(report) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"script": "train.py", "arguments": "--batch 2"}, "arguments must be a list of words"),
        ({"script": ROOT / "tests" / "scripts" / "loop.py", "parity": 4}, "--script with --parity"),
        ({"arguments": ["--batch", "2"]}, "your own script's arguments need --script"),
        ({"parity": 4, "max_steps": 4}, "--max_steps with --parity"),
    ],
)
def test_what_cannot_be_run_has_the_message_of_the_command_line(
    flags: dict, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=said):
        api.compare(output_dir=tmp_path, **flags)
    assert list(tmp_path.iterdir()) == []
