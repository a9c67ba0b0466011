"""The Python API: the same rows as the verbs, the same errors, and tables for consoles and notebooks."""

import builtins
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


def as_json(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tuples become lists, as they do in what a verb prints."""
    return json.loads(json.dumps(rows))


def error_of(verb: str, *words: str) -> str:
    """What the command line prints, without `error: ` and without its reference to --help."""
    done = slm_here(verb, *words)
    assert done.code == 2
    return done.err.removeprefix("error: ").removesuffix("\n")


def test_estimates_are_those_of_the_verb() -> None:
    made = slm.estimate(
        model=["slm-500m", "slm-1b"],
        strategy=["ddp", "ds_zero3"],
        gpu="a100-40gb",
        num_gpus=[8, 16],
        per_device_train_batch_size=2,
        prices=2.0,
        gradient_checkpointing=["none", "full"],
        seq_len=2048,
    )
    words = ("--model", "slm-500m", "slm-1b", "--strategy", "ddp", "ds_zero3", "--gpu", "a100-40gb")
    words += ("--num_gpus", "8", "16", "--per_device_train_batch_size", "2", "--prices", "2")
    words += ("--gradient_checkpointing", "none", "full", "--seq_len", "2048")
    assert len(made) == 16  # two models, two strategies, two counts, with and without checkpointing
    assert isinstance(made[0], Estimate)
    assert as_json(made.to_dicts()) == printed_json("estimate", *words)


def test_a_path_a_count_in_the_gpu_and_a_switch_are_taken() -> None:
    (row,) = slm.estimate(
        strategy=ROOT / "accel_configs" / "ddp.yaml", gpu="h200:16", gradient_checkpointing="true"
    )
    assert (row.strategy, row.num_gpus, row.gradient_checkpointing) == ("ddp", 16, "full")
    (row,) = slm.estimate(strategy="ddp", gradient_checkpointing=True)
    assert (row.gpu, row.gradient_checkpointing) == (None, "full")


def test_notes_say_what_an_estimate_does_not_follow(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("distributed_type: MULTI_GPU\nmixed_precision: 'no'\n")
    assert slm.estimate(strategy=mine).notes == [
        f"{mine}: mixed_precision no: --numerics aligned is estimated for bf16"
    ]
    assert slm.estimate(strategy="ddp").notes == []


def test_the_largest_batch_is_that_of_the_verb() -> None:
    made = slm.estimate(model="slm-1b", strategy="ddp", gpu="l4", largest_batch=True)
    words = ("--model", "slm-1b", "--strategy", "ddp", "--gpu", "l4", "--largest_batch")
    assert as_json(made.to_dicts()) == printed_json("estimate", *words)
    assert "batch with" in str(made)


def test_recommendations_are_those_of_the_verb(tmp_path: Path) -> None:
    made = slm.recommend(model="slm-1b", gpu="a100-40gb:8@2.5", tokens=2e9, strategy=["ddp", "ds_zero1"])
    words = ("--model", "slm-1b", "--gpu", "a100-40gb:8@2.5", "--tokens", "2B", "--strategy", "ddp")
    assert isinstance(made[0], Plan)
    assert as_json(made.to_dicts()) == printed_json("recommend", *words, "ds_zero1")
    names = {path.name for path in made.write(tmp_path / "plan")}
    assert "launch.sh" in names
    assert names <= {path.name for path in (tmp_path / "plan").iterdir()}


def test_without_a_plan_the_table_says_what_comes_nearest() -> None:
    made = slm.recommend(model="slm-1b", gpu="a100-40gb:8", tokens=2e9, strategy="ddp", budget_usd=1)
    assert len(made) == 0
    assert str(made).startswith("nothing is within $1.00\nthe fastest: 8 x a100-40gb, ddp")
    with pytest.raises(ValueError, match="there is no plan to write"):
        made.write("nowhere")


def test_a_gpu_without_a_price_is_named() -> None:
    made = slm.recommend(gpu="rtx-5090:8", tokens=1e9, strategy="ddp")
    priced = slm.recommend(gpu="rtx-5090:8@1", tokens=1e9, strategy="ddp")
    assert (priced.unpriced, priced[0].usd is None) == ([], False)
    assert (made.unpriced == ["rtx-5090"]) is (made[0].usd is None)


def test_a_report_has_the_rows_of_the_verb() -> None:
    records = slm.read_records(CPU)
    report = slm.report(records)
    assert len(records) == len(report.records) > 0
    assert records[0].status == "ok"
    assert isinstance(report[0], Row)
    assert (records.problems, report.problems) == ([], [])
    here = json.loads(slm_here("report", str(CPU), "--json").out)  # in the order of the records
    assert sorted(json.loads(json.dumps(report.to_dicts())), key=here.index) == here


def test_the_exports_of_a_report_are_those_of_the_verb(tmp_path: Path) -> None:
    report = slm.report(CPU)
    page = report.to_html(tmp_path / "new" / "report.html")
    assert (tmp_path / "new" / "report.html").read_text() == page
    texts = {"md": report.to_markdown(), "html": page}
    exports = [word for ending in texts for word in ("--export", str(tmp_path / f"verb.{ending}"))]
    slm_here("report", str(CPU), *exports)
    assert {ending: (tmp_path / f"verb.{ending}").read_text() for ending in texts} == texts


def test_damaged_records_are_named_and_the_others_are_shown(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "record.json").write_text("{}")
    report = slm.report([CPU, tmp_path])
    assert len(report) == len(slm.report(CPU))
    (problem,) = report.problems
    assert problem.startswith(f"{tmp_path}/bad/record.json: ")


def test_a_table_prints_and_shows_in_consoles_and_notebooks() -> None:
    for result in (slm.estimate(strategy="ddp"), slm.report(CPU)):
        console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(result)
        lines = console.export_text().splitlines()
        assert max(map(len, lines)) <= 120
        assert "ddp" in str(result)
        assert "ddp" in result._repr_html_()
        assert result._repr_html_().startswith("<pre ")
        assert not re.search(r"<script|style>", result._repr_html_())
    assert repr(slm.estimate(strategy="ddp")) == "<Estimates: 1 rows>"
    assert str(slm.report(CPU)).splitlines()[0] == slm_here("report", str(CPU)).out.splitlines()[0]


def test_text_of_a_record_stays_text_in_a_notebook(tmp_path: Path) -> None:
    found = next(CPU.rglob("record.json"))
    record = json.loads(found.read_text())
    (tmp_path / "record.json").write_text(
        json.dumps({**record, "strategy": "<script>alert(1)</script>[red]"})
    )
    shown = slm.report(tmp_path)._repr_html_()
    assert "<script" not in shown
    assert "&lt;script&gt;" in shown


def test_pandas_has_a_line_for_each_row() -> None:
    pandas = pytest.importorskip("pandas")
    frame = slm.report(CPU).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.strategy) == [row.strategy for row in slm.report(CPU)]
    assert slm.estimate(strategy=["ddp", "ds_zero2"]).to_pandas().peak_allocated_bytes.is_monotonic_decreasing


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_pandas(name: str, *rest: Any, **more: Any) -> Any:
        if name == "pandas":
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ValueError, match=r"to_pandas\(\) needs pandas\nhint: pip install pandas"):
        slm.report(CPU).to_pandas()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "slm1m"}, ("--model", "slm1m")),
        ({"gpu": "nope"}, ("--gpu", "nope")),
        ({"num_gpus": 13}, ("--num_gpus", "13")),
        ({"strategy": "ddpp"}, ("--strategy", "ddpp")),
        ({"seq_len": [0, 7]}, ("--seq_len", "0", "7")),
        ({"largest_batch": True}, ("--largest_batch",)),
    ],
    ids=lambda value: str(value),
)
def test_a_mistake_has_the_message_of_the_command_line(
    arguments: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - compared whole
        slm.estimate(**arguments)
    assert str(raised.value) == error_of("estimate", *words)


def test_a_folder_without_records_has_the_message_of_the_command_line(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - compared whole
            slm.read_records(folder)
        assert str(raised.value) == error_of("report", str(folder))


def test_an_unknown_flag_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011 - compared whole
        slm.estimate(seqlen=8, gradient_checkpoint="full", json=True)
    assert str(raised.value) == (
        "unknown seqlen, gradient_checkpoint, json\n"
        "hint: did you mean --seq_len?; did you mean --gradient_checkpointing?"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lr": 1e-3, "learning_rate": 1e-3}, "learning_rate given twice"),
        ({"seq_len": []}, "seq_len is []\nhint: it takes a list of values"),
        ({"learning_rate": "fast"}, "argument --learning_rate: invalid float value: 'fast'"),
        ({"pad_widths": 2}, "argument --pad_widths: '2' is not true or false"),
        ({"seed": 8.0}, "argument --seed: invalid int value: '8.0'"),
        ({"weight_decay": [0.1, 0.2]}, "weight_decay is [0.1, 0.2]\nhint: it takes one value"),
        ({"output_dir": "runs"}, "unknown output_dir"),
        ({"like": "none"}, "argument --like: invalid choice: 'none' (choose from "),
        ({"prices": 0}, "argument --prices: 0 is not a price per GPU-hour"),
        ({"num_gpus": 8.5}, "argument --num_gpus: invalid int value: '8.5'"),
        ({"largest_batch": 1}, "largest_batch is 1\nhint: it takes true or false"),
    ],
    ids=lambda value: str(value),
)
def test_a_flag_that_is_unknown_or_of_a_wrong_kind_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        slm.estimate(gpu="h200", **flags)
