"""--report_to of `slm report`: what trackers wrote of a comparison, read back from their own files."""

import dataclasses
import json
import sqlite3
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import made_record, slm

from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.rows import row_of
from slm_toolkit.report.tables.export import TRACKERS, check_installed, track, tracked_run

LOSSES = [4.0 - step / 16 for step in range(33)]
"exact in fp32, which is what TensorBoard stores"
SECONDS = [9.0] * 3 + [0.5] * 30
"of the slower rank: conftest.made_record"


def record_of(strategy: str, **changes: Any) -> RunRecord:
    return made_record(strategy=strategy, identity=strategy, losses=LOSSES, **changes)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A run, and one that ran out of memory in its third step."""
    write_record(record_of("ddp"), tmp_path / "runs" / "ddp")
    oom = record_of("ds_zero2", status="oom", reason="no GiB left", step_seconds=[[2.0, 1.0]])
    write_record(dataclasses.replace(oom, losses=[3.0, None]), tmp_path / "runs" / "ds_zero2")
    return tmp_path / "runs"


def test_a_row_is_told_by_the_names_of_json() -> None:
    record = record_of("ddp", first_step=10)
    run = tracked_run("ddp", row_of([(Path("r"), record)]), record)
    assert run.results["tokens_per_second"] == 16384  # 2 x 4 x 1024 tokens in 0.5 s
    assert run.results["final_loss"] == 2.0  # 4 - 32 / 16
    assert run.results["state_bytes_per_rank/optimizer"] == 8
    assert run.settings["strategy"] == "ddp"
    assert run.settings["seq_len"] == 1024
    assert not run.results.keys() & run.settings.keys()
    assert run.steps[0] == (11, {"losses": 4.0, "step_seconds": 9.0})
    assert run.steps[-1] == (43, {"losses": 2.0, "step_seconds": 0.5})


def test_a_loss_that_is_no_number_is_left_out() -> None:
    record = made_record(losses=[3.0, None], step_seconds=[[2.0, 1.0]])
    run = tracked_run("ddp", row_of([(Path("r"), record)]), record)
    assert run.steps == [(1, {"losses": 3.0, "step_seconds": 2.0}), (2, {"step_seconds": 1.0})]


def test_tensorboard_has_a_run_for_each_row(runs: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    done = slm("report", str(runs), "--report_to", "tensorboard", "--json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)  # stdout is for results alone
    assert "2 runs in tensorboard: tensorboard --logdir " in done.err
    (comparison,) = (runs / "comparisons").iterdir()
    assert sorted(path.name for path in comparison.iterdir()) == ["ddp", "ds_zero2"]
    log = events.EventAccumulator(str(comparison / "ddp"))
    log.Reload()
    assert [event.value for event in log.Scalars("losses")] == LOSSES
    assert [event.value for event in log.Scalars("step_seconds")] == SECONDS
    assert [event.step for event in log.Scalars("losses")] == list(range(1, 34))
    (rate,) = log.Scalars("tokens_per_second")
    assert (rate.value, rate.step) == (16384, 33)
    # every number of the row is there, but for its settings
    curves = {"losses", "step_seconds"}
    numbers = {name for name, value in rows[0].items() if type(value) in (int, float)}
    missing = numbers - set(log.Tags()["scalars"]) - curves
    assert missing <= {*rows[0]["asked"], "world_size", "zero_stage"}
    (begun,) = [
        data.session_start_info
        for content in log.PluginTagToContent("hparams").values()
        if (data := HParamsPluginData.FromString(content)).HasField("session_start_info")
    ]
    assert begun.hparams["strategy"].string_value == "ddp"
    assert begun.hparams["world_size"].number_value == 2
    oom = events.EventAccumulator(str(comparison / "ds_zero2"))
    oom.Reload()
    assert [(event.step, event.value) for event in oom.Scalars("losses")] == [(1, 3.0)]
    assert [event.value for event in oom.Scalars("step_seconds")] == [2.0, 1.0]


def test_trackio_has_a_run_for_each_row(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    env = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    done = slm("report", str(runs), "--report_to", "trackio", "--json", env=env)
    assert done.code == 0, done.err
    assert len(json.loads(done.out)) == 2
    with sqlite3.connect(tmp_path / "trackio" / "slm_comparisons.db") as connection:
        logged = connection.execute("select run_name, step, metrics from metrics order by id").fetchall()
        settings = dict(connection.execute("select run_name, config from configs").fetchall())
    of_ddp = [(step, json.loads(metrics)) for name, step, metrics in logged if name == "ddp"]
    assert [values["losses"] for _, values in of_ddp if "losses" in values] == LOSSES
    assert [values["step_seconds"] for _, values in of_ddp if "losses" in values] == SECONDS
    step, results = of_ddp[-1]
    assert (step, results["tokens_per_second"], results["final_loss"]) == (33, 16384, 2.0)
    assert json.loads(settings["ds_zero2"])["status"] == "oom"


def test_wandb_is_told_of_each_run_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: dict[str, Any] = {"logged": [], "summary": {}, "finished": 0}

    def init(**options: Any) -> SimpleNamespace:
        told["init"] = options
        return SimpleNamespace(
            log=lambda values, step: told["logged"].append((step, values)),
            summary=told["summary"],
            finish=lambda: told.update(finished=told["finished"] + 1),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    record = record_of("ddp")
    run = tracked_run("ddp", row_of([(Path("r"), record)]), record)
    track([run], "wandb", folder=tmp_path / "made", group="tonight")
    assert {name: told["init"][name] for name in ("name", "group", "mode")} == {
        "name": "ddp",
        "group": "tonight",
        "mode": "offline",
    }
    assert told["logged"][0] == (1, {"losses": 4.0, "step_seconds": 9.0})
    assert told["summary"]["tokens_per_second"] == 16384
    assert told["finished"] == 1


def test_wandb_writes_its_offline_runs(runs: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: the test extra does without it")
    done = slm("report", str(runs), "--report_to", "wandb", "--json")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)) == 2
    assert len(list((runs / "comparisons" / "wandb").glob("offline-run-*/*.wandb"))) == 2


@pytest.mark.quick
@pytest.mark.parametrize("tracker", list(TRACKERS))
def test_a_tracker_that_is_not_installed_is_named(tracker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slm_toolkit.report.tables.export.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"{tracker} is not installed\nhint: pip install {tracker}"):
        check_installed(tracker)


def test_only_trackers_that_are_known_are_offered(runs: Path) -> None:
    done = slm("report", str(runs), "--report_to", "mlflow")
    assert done.code == 2
    assert "invalid choice: 'mlflow'" in done.err


@pytest.mark.slow
def test_a_comparison_ends_in_the_tracker_and_its_runs_are_not_trained_twice(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    words = ["compare", "--json", "--model", "slm-1m", "--max_steps", "3", "--seq_len", "32"]
    words += ["--strategy", "single", "--report_to", "tensorboard", "--output_dir", str(tmp_path)]
    first, again = slm(*words), slm(*words)
    for done in (first, again):
        assert done.code == 0, done.err
        assert "1 runs in tensorboard: " in done.err
        assert [row["strategy"] for row in json.loads(done.out)] == ["single"]
    assert ("kept from" in first.err, "kept from" in again.err) == (False, True)
    written = list(tmp_path.rglob("events.out.tfevents.*"))
    of_training = [path for path in written if (tmp_path / "comparisons") not in path.parents]
    assert of_training
    assert len(written) > len(of_training)
