"""Rates, MFU, dollars and the table, from records made by hand."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, made_record, slm_here
from rich.console import Console

from slm_toolkit.cli.main import main
from slm_toolkit.hardware.gpus import find_gpu, gpus
from slm_toolkit.predict.cost import usd_per_million_tokens
from slm_toolkit.record.files import find_records, read_record, write_record
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.recorded_estimate import estimate_of
from slm_toolkit.report.rows import Row, ranked, rows_of
from slm_toolkit.report.tables.comparison import comparison_table, heading


def row_from(one: RunRecord, **options: float) -> Row:
    return Row([(Path("r"), one)], **options)


def table(rows: list, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(comparison_table(rows, width=width), crop=False)
    return capture.get()


def test_mfu_by_hand() -> None:
    # test_flops: 715,593,216 FLOPs per token; 8192 tokens/s per GPU / 989e12 = 0.5927 %
    row = row_from(made_record())
    assert row.tokens_per_second_per_gpu == pytest.approx(8192)
    assert row.mfu == pytest.approx(8192 * 715_593_216 / 989e12)
    assert row.mfu == pytest.approx(0.005927, rel=1e-3)
    assert row.peak_allocated_bytes == 3 * 2**30


def test_an_mfu_over_100_percent_is_a_failed_row() -> None:
    row = row_from(made_record(step_seconds=[[0.001] * 33]))
    assert row.status == "failed"
    assert "impossible on a NVIDIA H100 80GB HBM3" in row.reason


def test_the_bf16_peak_says_nothing_of_an_fp32_run() -> None:
    asked = {"config": {**made_record().asked["config"], "numerics": "fp32"}}
    assert row_from(made_record(asked=asked)).mfu is None


def test_an_unknown_gpu_has_no_mfu_and_no_price() -> None:
    row = row_from(made_record(gpu="NVIDIA Imaginary 9000"))
    assert row.mfu is row.usd_per_million_tokens is None
    assert row.tokens_per_second is not None


def test_dollars_by_hand() -> None:
    # a million tokens at 10,000 a second take 100 s; two GPUs at $3.60 an hour cost $0.002 a second: $0.20
    assert usd_per_million_tokens(1e4, 3.6, 2) == pytest.approx(0.2)
    row = row_from(made_record(), prices=3.6)
    assert row.usd_per_million_tokens == pytest.approx(1e6 / 16384 * 2 * 3.6 / 3600)


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA L40", None),
        ("NVIDIA GB200", None),
        ("NVIDIA GB300", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", None),
        ("Tesla V100-SXM2-16GB", None),
        (None, None),
    ],
)
def test_a_drivers_name_means_a_gpu_of_the_table_or_none(driver: str | None, name: str | None) -> None:
    found = find_gpu(driver)
    assert (found.name if found else None) == name


def test_every_gpu_has_a_source() -> None:
    assert all(gpu.source for gpu in gpus())


def test_a_narrow_table_keeps_the_answer_longest() -> None:
    names = ("ddp", "fsdp_shard_grad_op")
    rows = ranked([row_from(made_record(strategy=name)) for name in names])
    heading = "".join(table(rows, 80).splitlines()[1:5])
    assert "rank" in heading
    assert "$ per 1M" in heading
    assert "DeepSpeed's" not in heading


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


def test_what_differs_is_a_column_and_what_does_not_stands_above() -> None:
    small = made_record()
    config = {**small.asked["config"], "per_device_train_batch_size": 16}
    rows = [row_from(small), row_from(dataclasses.replace(small, asked={"config": config}))]
    text = table(rows, 200)
    heading, *lines = [line for line in text.splitlines() if line.strip()]
    assert "slm-100m, 2 x NVIDIA H100 80GB HBM3" in heading
    assert "sequence 1024" in heading
    assert "batch" not in heading
    assert "batch" in text
    assert [line.split("│")[1].strip() for line in lines if line.startswith("│")] == ["4", "16"]


def test_an_oom_is_a_row_with_dashes_and_its_reason() -> None:
    broken = made_record(status="oom", reason="CUDA out of memory", step_seconds=[], losses=[])
    text = table([row_from(made_record()), row_from(broken)], 200)
    assert "oom" in text
    assert "ddp: oom: CUDA out of memory" in text


def test_a_record_is_written_whole_and_read_back_equal(tmp_path: Path) -> None:
    path = write_record(made_record(losses=[1.0, None]), tmp_path / "run")
    assert read_record(path) == made_record(losses=[1.0, None])
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]
    assert find_records([tmp_path]) == ([(path, made_record(losses=[1.0, None]))], [])


def test_a_record_with_a_number_that_json_lacks_is_not_written_at_all(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        write_record(made_record(losses=[float("nan")]), tmp_path)
    assert not (tmp_path / "record.json").exists()


def test_a_record_that_two_arguments_reach_was_launched_once() -> None:
    once, twice = (find_records([ROOT / "results" / "cpu"] * count)[0] for count in (1, 2))
    assert [path for path, _ in twice] == [path for path, _ in once]


def test_batches_are_listed_by_size_not_by_their_first_digit(tmp_path: Path) -> None:
    for number, batch in enumerate((16, 4, 128, 8)):
        record = made_record()
        record.asked["config"]["per_device_train_batch_size"] = batch
        write_record(dataclasses.replace(record, identity=str(number)), tmp_path / str(number))
    rows = json.loads(slm_here("report", str(tmp_path), "--json").out)
    assert [row["per_device_train_batch_size"] for row in rows] == [4, 8, 16, 128]


def test_the_machine_is_told_though_the_first_run_did_not_come_to_name_it() -> None:
    failed = Row([(Path("a"), made_record(status="failed", gpu=None))])
    text = heading([failed, Row([(Path("b"), made_record())])]).plain
    assert "2 x NVIDIA H100" in text


@pytest.mark.parametrize(
    ("named", "change"),
    [
        ("asked.config.packing", lambda record: record["asked"]["config"].update(packing="newer")),
        ("world_size", lambda record: record.update(world_size=None)),
        ("model.num_layers", lambda record: record["model"].update(num_layers=2**53)),
    ],
)
@pytest.mark.parametrize("option", ["", "--json"])
def test_a_record_that_no_run_wrote_is_left_out_and_named(
    named: str, change: Callable[[dict], None], option: str, tmp_path: Path
) -> None:
    """Each of them ended the whole report, or kept it for ever."""
    write_record(made_record(gpu="NVIDIA A100-SXM4-80GB"), tmp_path / "good")
    path = write_record(made_record(gpu="NVIDIA A100-SXM4-80GB"), tmp_path / "odd")
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    done = slm_here("report", str(tmp_path), *filter(None, [option]))
    assert done.code == 1
    assert done.err.startswith(f"left out: {path}: invalid field: {named} (")
    assert done.out


def test_a_record_that_a_report_can_not_compute_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails_for_odd(repeats: list, **options: object) -> Row:
        if repeats[0][1].run_name == "odd":
            raise ZeroDivisionError("a number that nobody thought of")
        return Row(repeats, **options)

    monkeypatch.setattr("slm_toolkit.report.rows.Row", fails_for_odd)
    write_record(made_record(run_name="good", identity="a"), tmp_path / "good")
    path = write_record(made_record(run_name="odd", identity="b"), tmp_path / "odd")
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path)])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert err == f"left out: {path} can't be shown: ZeroDivisionError: a number that nobody thought of\n"
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


@pytest.mark.parametrize(("fingerprints", "holds"), [(("a", "a"), True), (("a", "b"), None)])
def test_losses_of_a_script_that_began_with_other_weights_agree_only_by_chance(
    fingerprints: tuple[str, str], holds: bool | None
) -> None:
    script = {**made_record().asked, "script": ["train.py"]}
    records = [
        made_record(asked=script, strategy=name, engine=engine, identity=name, weights_fingerprint=of_weights)
        for (name, engine), of_weights in zip(
            (("ddp", "ddp"), ("fsdp_full_shard", "fsdp2")), fingerprints, strict=True
        )
    ]
    shown = rows_of([(f"{record.strategy}/record.json", record) for record in records])
    (row,) = (row for row in shown if row.strategy == "fsdp_full_shard")
    assert row.parity_holds is holds
    said = any("losses not comparable: its weights before step 1" in text for text in row.warnings)
    assert said == (holds is None)


JUMP = [10.889, 10.2266, 13.8264, 11.8414, 10.9559]  # of slm-2b under DDP, results/h100-80gb
NORMS = {
    "ddp": [9.758, 69.166, 9.039, 39.547, 25.611],
    "fsdp_full_shard": [9.759, 69.356, 9.037, 39.377, 26.964],
}
ALIKE_BEFORE = [10.889, 10.2303, 13.8262, 11.8618, 11.0148]  # under FSDP


@pytest.mark.parametrize(
    ("losses", "holds"),
    [
        (ALIKE_BEFORE, None),
        ([10.9, *ALIKE_BEFORE[1:]], False),  # step 1 is before the jump
        ([10.889, 10.2303, 10.1, 9.9, 9.7], False),  # only one of both jumps
    ],
)
def test_losses_are_not_comparable_once_they_jump(losses: list[float], holds: bool | None) -> None:
    """Each step of a run whose losses jump multiplies rounding errors: here by four."""
    strategies = (("ddp", "ddp", JUMP), ("fsdp_full_shard", "fsdp2", losses))
    records = [
        made_record(strategy=name, engine=engine, identity=name, losses=of_run, grad_norms=NORMS[name])
        for name, engine, of_run in strategies
    ]
    shown = rows_of([(f"{record.strategy}/record.json", record) for record in records])
    (row,) = (row for row in shown if row.strategy == "fsdp_full_shard")
    assert row.parity_holds is holds
    said = any("losses not comparable: both jump, to 13.8 in step 3" in text for text in row.warnings)
    assert said == (holds is None)


def test_a_fault_is_red_though_the_losses_jump() -> None:
    strategies = (("ddp", "ddp", JUMP), ("fsdp_full_shard", "fsdp2", ALIKE_BEFORE))
    first, second = (
        made_record(strategy=name, engine=engine, identity=name, losses=of_run, grad_norms=NORMS[name])
        for name, engine, of_run in strategies
    )
    second = dataclasses.replace(second, numerics={"clipping": 0.5})
    shown = rows_of([("a/record.json", first), ("b/record.json", second)])
    assert shown[1].parity_holds is False
    assert "clipping 0.5 (not 1)" in shown[1].parity
