"""The Python API: the same rows as the verbs, the same errors, and tables for consoles and notebooks."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, slm_here
from rich.console import Console

from slm_toolkit import api as slm
from slm_toolkit.predict.estimate import Estimate
from slm_toolkit.recommend.plans import Plan
from slm_toolkit.report.rows import Row

CPU = ROOT / "results" / "cpu"


def printed_json(*words: str) -> list[dict[str, Any]]:
    return json.loads(slm_here(*words, "--json").out)


def as_json(result: Any) -> list[dict[str, Any]]:
    """Tuples become lists, as they do in what a verb prints."""
    return json.loads(json.dumps(result.to_dicts()))


def test_estimates_are_those_of_the_verb() -> None:
    made = slm.estimate(
        model=["slm-500m", "slm-1b"],
        strategy=["ddp", "ds_zero3"],
        gpu="a100-40gb",
        num_gpus=[8, 16],
        per_device_train_batch_size=2,
        prices=2.0,
        gradient_checkpointing=["none", "full"],
    )
    words = ("--model", "slm-500m", "slm-1b", "--strategy", "ddp", "ds_zero3", "--gpu", "a100-40gb")
    words += ("--num_gpus", "8", "16", "--per_device_train_batch_size", "2", "--prices", "2")
    assert len(made) == 16  # two models, two strategies, two counts, with and without checkpointing
    assert isinstance(made[0], Estimate)
    assert as_json(made) == printed_json("estimate", *words, "--gradient_checkpointing", "none", "full")
    made = slm.estimate(model="slm-1b", strategy="ddp", gpu="l4", largest_batch=True)
    words = ("--model", "slm-1b", "--strategy", "ddp", "--gpu", "l4", "--largest_batch")
    assert as_json(made) == printed_json("estimate", *words)


def test_a_path_a_count_in_the_gpu_and_a_switch_are_taken() -> None:
    for flags, found in (
        ({"strategy": ROOT / "accel_configs" / "ddp.yaml", "gpu": "h200:16"}, ("ddp", 16, "none")),
        ({"strategy": "ddp", "gradient_checkpointing": True}, ("ddp", 8, "full")),
    ):
        (row,) = slm.estimate(**flags)
        assert (row.strategy, row.num_gpus, row.gradient_checkpointing) == found


def test_notes_say_what_an_estimate_does_not_follow(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("distributed_type: MULTI_GPU\nmixed_precision: 'no'\n")
    (note,) = slm.estimate(strategy=mine).notes
    assert "mixed_precision no" in note
    assert slm.estimate(strategy="ddp").notes == []


def test_recommendations_are_those_of_the_verb(tmp_path: Path) -> None:
    asked = {"model": "slm-1b", "gpu": "a100-40gb:8@2.5", "tokens": 2e9}
    made = slm.recommend(strategy=["ddp", "ds_zero1"], **asked)
    words = ("--model", "slm-1b", "--gpu", "a100-40gb:8@2.5", "--tokens", "2B", "--strategy", "ddp")
    assert isinstance(made[0], Plan)
    assert as_json(made) == printed_json("recommend", *words, "ds_zero1")
    written = made.write(tmp_path / "plan")
    assert "launch.sh" in {path.name for path in written}
    assert all(path.exists() for path in written)
    assert made.unpriced == []
    none = slm.recommend(strategy="ddp", budget_usd=1, **asked)
    assert len(none) == 0
    assert str(none).startswith("nothing is within $1.00\nthe fastest: 8 x a100-40gb, ddp")
    with pytest.raises(ValueError, match="there is no plan to write"):
        none.write("nowhere")


def test_a_report_has_the_rows_and_exports_of_the_verb(tmp_path: Path) -> None:
    records = slm.read_records(CPU)
    report = slm.report(records)
    assert len(records) == len(report.records) > 0
    assert records[0].status == "ok"
    assert isinstance(report[0], Row)
    assert (records.problems, report.problems) == ([], [])
    here = printed_json("report", str(CPU))  # in the order of the records
    assert sorted(as_json(report), key=here.index) == here
    report = slm.report(CPU)
    page = report.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page
    texts = {"md": report.to_markdown(), "html": page}
    exports = [word for ending in texts for word in ("--export", str(tmp_path / f"verb.{ending}"))]
    slm_here("report", str(CPU), *exports)
    assert {ending: (tmp_path / f"verb.{ending}").read_text() for ending in texts} == texts


def test_damaged_records_are_named_and_the_others_are_shown(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text("{}")
    report = slm.report([CPU, tmp_path])
    assert len(report) == len(slm.report(CPU))
    (problem,) = report.problems
    assert problem.startswith(f"{tmp_path}/record.json: ")


def test_a_table_prints_and_shows_in_consoles_and_notebooks(tmp_path: Path) -> None:
    for result in (slm.estimate(strategy="ddp"), slm.report(CPU)):
        console = Console(width=120, record=True, file=io.StringIO())
        console.print(result)
        assert max(map(len, console.export_text().splitlines())) <= 120
        assert "ddp" in str(result)
        assert "ddp" in result._repr_html_()
    assert repr(slm.estimate(strategy="ddp")) == "<Estimates: 1 rows>"
    record = json.loads(next(CPU.rglob("record.json")).read_text())
    evil = {**record, "strategy": "<script>alert(1)</script>[red]"}
    (tmp_path / "record.json").write_text(json.dumps(evil))
    shown = slm.report(tmp_path)._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown


def test_pandas_has_a_line_for_each_row() -> None:
    pandas = pytest.importorskip("pandas")
    frame = slm.report(CPU).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.strategy) == [row.strategy for row in slm.report(CPU)]


@pytest.mark.parametrize(
    ("verb", "flags", "words"),
    [
        ("estimate", {"gpu": "nope"}, ("--gpu", "nope")),
        ("estimate", {"seq_len": [0, 7]}, ("--seq_len", "0", "7")),
        ("estimate", {"largest_batch": True}, ("--largest_batch",)),
        ("report", {"records": str(ROOT / "recipes")}, (str(ROOT / "recipes"),)),
    ],
    ids=str,
)
def test_a_mistake_has_the_message_of_the_command_line(
    verb: str, flags: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - compared whole
        getattr(slm, verb)(**flags)
    done = slm_here(verb, *words)
    assert (done.code, done.err) == (2, f"error: {raised.value}\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"seqlen": 8, "json": True}, "unknown seqlen, json\nhint: did you mean --seq_len?"),
        ({"lr": 1e-3, "learning_rate": 1e-3}, "learning_rate given twice"),
        ({"seq_len": []}, "seq_len is []\nhint: it takes a list of values"),
        ({"learning_rate": "fast"}, "argument --learning_rate: invalid float value: 'fast'"),
        ({"weight_decay": [0.1, 0.2]}, "weight_decay is [0.1, 0.2]\nhint: it takes one value"),
        ({"prices": 0}, "argument --prices: 0 is not a price per GPU-hour"),
        ({"largest_batch": 1}, "largest_batch is 1\nhint: it takes true or false"),
    ],
    ids=str,
)
def test_a_flag_that_is_unknown_or_of_a_wrong_kind_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        slm.estimate(gpu="h200", **flags)
