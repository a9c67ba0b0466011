"""Rates, MFU, dollars and the table, from records made by hand."""

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import made_record, slm_here
from rich.console import Console

from slm_toolkit.cli.main import main
from slm_toolkit.record.files import find_records, write_record
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.recorded_estimate import estimate_of
from slm_toolkit.report.rows import Row, rows_of
from slm_toolkit.report.tables.comparison import comparison_table


def row_from(one: RunRecord, **options: float) -> Row:
    return Row([(Path("r"), one)], **options)


def table(rows: list, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(comparison_table(rows, width=width), crop=False)
    return capture.get()


FP32 = {"asked": {"config": {**made_record().asked["config"], "numerics": "fp32"}}}


@pytest.mark.parametrize(
    ("changes", "mfu", "usd", "status"),
    [
        # test_flops: 715,593,216 FLOPs per token; 8192 tokens/s per GPU / 989e12 = 0.5927 %.
        # a million tokens at 16,384 a second on two GPUs at $3.60 an hour
        ({}, 8192 * 715_593_216 / 989e12, 1e6 / 16384 * 2 * 3.6 / 3600, "ok"),
        ({"step_seconds": [[0.001] * 33]}, None, None, "failed"),  # an MFU over 100 %
        (FP32, None, 1e6 / 16384 * 2 * 3.6 / 3600, "ok"),  # the peak is of bf16
        ({"gpu": "NVIDIA Imaginary 9000"}, None, None, "ok"),
    ],
)
def test_mfu_and_dollars_by_hand(changes: dict, mfu: float | None, usd: float | None, status: str) -> None:
    row = row_from(made_record(**changes), prices=None if "gpu" in changes else 3.6)
    assert row.status == status
    if status == "ok":
        assert (row.mfu, row.usd_per_million_tokens) == (pytest.approx(mfu), pytest.approx(usd))
    else:
        assert "impossible on a NVIDIA H100" in row.reason


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_no_figure_is_cut_at_any_width(width: int) -> None:
    rows = [row_from(made_record()), row_from(made_record(strategy="fsdp_shard_grad_op"))]
    text = table(rows, width)
    assert "16,384" in text
    assert "fsdp_shard_grad_op" in text
    assert "…" not in text
    assert "3.00" in text  # GiB allocated on the fuller rank
    assert ("columns that did not fit" in text) == (width <= 120)
    if width >= 60:
        assert max(len(line) for line in text.splitlines()) <= width


def test_a_record_is_read_back_equal_and_with_a_number_that_json_lacks_not_written(tmp_path: Path) -> None:
    made = made_record(losses=[1.0, None])
    path = write_record(made, tmp_path / "run")
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]
    assert find_records([tmp_path]) == ([(path, made)], [])
    with pytest.raises(ValueError, match="JSON compliant"):
        write_record(made_record(losses=[float("nan")]), tmp_path)
    assert not (tmp_path / "record.json").exists()


def test_batches_are_listed_by_size_not_by_their_first_digit(tmp_path: Path) -> None:
    for number, batch in enumerate((16, 4, 128, 8)):
        record = made_record()
        record.asked["config"]["per_device_train_batch_size"] = batch
        write_record(dataclasses.replace(record, identity=str(number)), tmp_path / str(number))
    rows = json.loads(slm_here("report", str(tmp_path), "--json").out)
    assert [row["per_device_train_batch_size"] for row in rows] == [4, 8, 16, 128]


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_record_that_no_run_wrote_or_a_report_can_not_compute_is_left_out(
    option: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails_for_odd(repeats: list, **options: object) -> Row:
        if repeats[0][1].run_name == "odd":
            raise ZeroDivisionError("a number that nobody thought of")
        return Row(repeats, **options)

    monkeypatch.setattr("slm_toolkit.report.rows.Row", fails_for_odd)
    write_record(made_record(run_name="good", identity="a"), tmp_path / "good")
    path = write_record(made_record(run_name="odd", identity="b"), tmp_path / "odd")
    (tmp_path / "null").mkdir()
    text = path.read_text().replace('"world_size": 2', '"world_size": null')
    (tmp_path / "null" / "record.json").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), *option])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert f"left out: {tmp_path}/null/record.json: invalid field: world_size (" in err
    assert f"left out: {path} can't be shown: ZeroDivisionError: a number that nobody thought of\n" in err
    assert "ddp" in out


def test_a_script_has_no_estimate_and_of_unknown_shapes_no_flops() -> None:
    base = made_record()
    asked = {**base.asked, "config": {"numerics": "stock", "lr": 1e-4}, "script": ["train.py"]}
    seen = {"num_sequences": 4, "seq_len": 512}
    record = dataclasses.replace(base, asked=asked, first_batch=seen)
    no_shape = dataclasses.replace(record, model={"name": "train.py", "num_params": 5})
    assert estimate_of(no_shape) is None
    row = row_from(no_shape)
    assert (row.mfu, row.flops_per_token, row.seq_len, row.seed) == (None, None, 512, None)


JUMP = {  # of slm-2b under DDP, results/h100-80gb
    "losses": [10.889, 10.2266, 13.8264, 11.8414, 10.9559],
    "grad_norms": [9.758, 69.166, 9.039, 39.547, 25.611],
}
LIKE_IT = [10.889, 10.2303, 13.8262, 11.8618, 11.0148]  # under FSDP
NORMS = [9.759, 69.356, 9.037, 39.377, 26.964]
SCRIPT = {"asked": {**made_record().asked, "script": ["train.py"]}, "weights_fingerprint": "a"}


@pytest.mark.parametrize(
    ("first", "second", "holds"),
    [
        (SCRIPT, SCRIPT, True),
        (SCRIPT, SCRIPT | {"weights_fingerprint": "b"}, "its weights before step 1"),
        # each step of a run whose losses jump multiplies rounding errors: here by four
        (JUMP, {"losses": LIKE_IT, "grad_norms": NORMS}, "both jump, to 13.8 in step 3"),
        (JUMP, {"losses": [10.9, *LIKE_IT[1:]], "grad_norms": NORMS}, False),  # before the jump
        (JUMP, {"losses": [*LIKE_IT[:2], 10.1, 9.9, 9.7], "grad_norms": NORMS}, False),  # only one of both
        (JUMP, {"losses": LIKE_IT, "grad_norms": NORMS, "numerics": {"clipping": 0.5}}, False),  # a fault
    ],
)
def test_losses_are_only_held_against_comparable_ones(first: dict, second: dict, holds: bool | str) -> None:
    """Losses of other weights agree by chance, those that jump amplify rounding: no verdict, a warning."""
    ddp = made_record(strategy="ddp", engine="ddp", identity="ddp", **first)
    fsdp = made_record(strategy="fsdp_full_shard", engine="fsdp2", identity="fsdp", **second)
    row = rows_of([("ddp/record.json", ddp), ("fsdp/record.json", fsdp)])[1]
    assert row.parity_holds is (None if isinstance(holds, str) else holds)
    said = [text for text in row.warnings if "losses not comparable" in text]
    assert holds in said[0] if isinstance(holds, str) else said == [], said
