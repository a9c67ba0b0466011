"""The types of record.json: in its schema, in shipped records, in the errors for files that break them."""

import dataclasses
import json
from pathlib import Path

import pytest
from conftest import ROOT, made_record

from slm_toolkit.cli.main import main
from slm_toolkit.record.files import find_records, read_record, schema, write_record
from slm_toolkit.record.run_record import RECORD_FILE, SCHEMA_VERSION

SHIPPED = sorted((ROOT / "results").rglob("record.json"))
SCHEMA = schema()


def problems(content: object) -> list[str]:
    jsonschema = pytest.importorskip("jsonschema")
    return [error.message for error in jsonschema.Draft202012Validator(SCHEMA).iter_errors(content)]


def written(folder: Path, **changes: object) -> Path:
    """A record's file with other content; None takes a name out."""
    path = write_record(made_record(), folder)
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return path


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(ROOT / "results").parent))
def test_every_shipped_record_is_as_the_schema_says(path: Path) -> None:
    assert problems(json.loads(path.read_text())) == []
    assert read_record(path).schema_version == SCHEMA_VERSION


def test_flags_of_older_versions_are_read_with_their_new_names(tmp_path: Path) -> None:
    asked = made_record().asked
    del asked["config"]["parity"]
    old = {"parity_task": True, "fp32_steps": 5, "max_steps": 20, "timing_warmup_steps": 3}
    path = written(tmp_path, asked={**asked, "config": {**asked["config"], **old}}, timing_warmup_steps=3)
    record = read_record(path)
    assert (record.config.parity, record.num_warmup_steps) == (20, 3)
    assert "fp32_steps" not in record.asked["config"]  # a run and its references had other numbers
    path = written(tmp_path, asked={**asked, "config": {**asked["config"], "parity_task": False}})
    assert read_record(path).config.parity is None


def test_a_record_without_a_version_is_read_as_an_old_one(tmp_path: Path) -> None:
    path = written(tmp_path, schema_version=None, gpu_watch=None, num_probed_steps=None, took_turns=True)
    assert problems(json.loads(path.read_text())) == []
    record = read_record(path)
    assert record.schema_version == SCHEMA_VERSION
    assert record.gpu_watch == []
    assert record.losses == [10.0] * 33


@pytest.mark.parametrize(
    "content", ["[]", "{", "3", '{"schema_version": "1"}', '{"schema_version": -1}', "{}"]
)
def test_what_is_no_record_is_said_to_be_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"(?s)record\.json.*hint: "):
        read_record(path)


def test_report_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", "--schema"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    pytest.importorskip("jsonschema").Draft202012Validator.check_schema(SCHEMA)
    made = dataclasses.asdict(made_record(losses=[1.0, None]))
    assert problems(made) == []
    for change in ({"status": "fine"}, {"step_seconds": [[0.0]]}, {"losses": ["1"]}):
        assert len(problems({**made, **change})) == 1


ASKED, MODEL = made_record().asked, made_record().model


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("losses", None, "invalid field: losses (expected array, got null)"),
        ("losses", [1.0, "2"], "invalid field: losses[1] (expected float | null, got str)"),
        ("asked", {**ASKED, "config": {}}, "missing field: asked.config."),
        (
            "asked",
            {**ASKED, "config": {**ASKED["config"], "packing": "newer"}},
            "invalid field: asked.config.packing (",
        ),
        (
            "asked",
            {**ASKED, "config": {**ASKED["config"], "max_steps": -3}},
            "invalid field: asked.config.max_steps (expected int >= 0)",
        ),
        (
            "asked",
            {**ASKED, "deepspeed_config": {"zero_optimization": {"reduce_bucket_size": 0}}},
            "invalid field: asked.deepspeed_config.zero_optimization.reduce_bucket_size "
            "(expected float >= 1.0)",
        ),
        ("status", "fine", "invalid field: status (invalid enum value 'fine')"),
        ("model", {"name": "slm-1m"}, "missing field: model."),
        (
            "model",
            MODEL | {"num_layers": 2**53},
            "invalid field: model.num_layers (",
        ),  # kept a report for ever
        ("step_seconds", [[1.0, -1.0]], "invalid field: step_seconds[0][1] (expected float > 0.0)"),
        ("schema_version", SCHEMA_VERSION + 1, "invalid field: schema_version (expected int <= 1)"),
        ("world_size", None, "invalid field: world_size (null, though the status is ok)"),
    ],
)
def test_an_ill_typed_record_is_left_out_and_named(
    name: str, value: object, problem: str, tmp_path: Path
) -> None:
    good = json.loads(write_record(made_record(), tmp_path / "good").read_text())
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / RECORD_FILE).write_text(json.dumps({**good, name: value}))
    records, (left_out,) = find_records([tmp_path])
    assert [path.parent.name for path, _ in records] == ["good"]
    assert left_out.startswith(f"{tmp_path}/bad/{RECORD_FILE}: {problem}")
    assert left_out.count("\n") == 1
