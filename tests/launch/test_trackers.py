"""--report_to: what trackers really wrote."""

import json
import re
import sqlite3
from pathlib import Path

import pytest
from conftest import launch, record_under

from slm_toolkit.record.files import find_records
from slm_toolkit.report.rows import Row


def test_tensorboard_has_every_steps_loss_and_the_rate_of_the_report(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": "word " * (5 + i % 40)}) + "\n" for i in range(400)))
    flags = ("--model", "slm-1m", "--max_steps", "14", "--eval_steps", "7", "--run_name", "tracked")
    done = launch(
        *(*flags, "--dataset", str(text), "--packing", "none", "--seq_len", "128", "--logging_steps", "1"),
        *("--report_to", "tensorboard", "--output_dir", str(tmp_path)),
        config="accel_configs/single.yaml",
    )
    assert done.code == 0, done.err
    log = events.EventAccumulator(str(tmp_path / "tracked" / "slm_toolkit"))
    log.Reload()
    (found,), _ = find_records([tmp_path])
    row, record = Row([found]), found[1]
    losses, rates = log.Scalars("loss"), log.Scalars("tokens_per_second")
    assert [(event.step, event.value) for event in losses] == [
        (step, pytest.approx(loss)) for step, loss in enumerate(record.losses, start=1)
    ]
    assert [event.value for event in log.Scalars("eval_loss")] == pytest.approx(
        [found["loss"] for found in record.eval_losses]
    )
    # one process, so its clock is the slowest rank's; padding counts in neither
    assert row.padding > 0.2
    assert rates[-1].value == pytest.approx(row.tokens_per_second)
    lines = re.findall(r"step \d+/14  loss \S+  (.*)", done.err)
    assert (lines[0], lines[-1]) == ("warming up", f"{row.tokens_per_second:,.0f} tokens/s")


@pytest.mark.slow
def test_trackio_has_every_steps_loss(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    done = launch(
        *(
            "--model",
            "slm-1m",
            "--max_steps",
            "4",
            "--report_to",
            "trackio",
            "--output_dir",
            str(tmp_path / "runs"),
        ),
        config="accel_configs/ddp.yaml",
        env={"TRACKIO_DIR": str(tmp_path / "trackio")},
    )
    assert done.code == 0, done.err
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics").fetchall()
    losses = {step: json.loads(metrics).get("loss") for step, metrics in rows if b'"loss"' in metrics}
    assert losses == pytest.approx(dict(enumerate(record_under(tmp_path / "runs")["losses"], start=1)))
