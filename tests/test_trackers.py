"""--report_to: what trackers really wrote."""

import json
import sqlite3
from pathlib import Path

import pytest
from conftest import launch, record_under

QUICK = ("--model", "slm-1m", "--max_steps", "4", "--eval_steps", "2", "--run_name", "tracked")


def test_tensorboard_has_every_steps_loss(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    done = launch(
        *QUICK, "--report_to", "tensorboard", "--output_dir", str(tmp_path), config="accel_configs/ddp.yaml"
    )
    assert done.code == 0, done.err
    log = events.EventAccumulator(str(tmp_path / "tracked" / "slm_toolkit"))
    log.Reload()
    record = record_under(tmp_path)
    assert [event.value for event in log.Scalars("loss")] == pytest.approx(record["losses"])
    assert [event.step for event in log.Scalars("loss")] == [1, 2, 3, 4]
    assert [event.value for event in log.Scalars("eval_loss")] == pytest.approx(
        [found["loss"] for found in record["eval_losses"]]
    )


def test_trackio_has_every_steps_loss(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    done = launch(
        *(*QUICK, "--report_to", "trackio", "--output_dir", str(tmp_path / "runs")),
        config="accel_configs/ddp.yaml",
        env={"TRACKIO_DIR": str(tmp_path / "trackio")},
    )
    assert done.code == 0, done.err
    (database,) = (tmp_path / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics").fetchall()
    losses = {step: json.loads(metrics).get("loss") for step, metrics in rows if b'"loss"' in metrics}
    assert losses == pytest.approx(dict(enumerate(record_under(tmp_path / "runs")["losses"], start=1)))
