"""A user's mistake is one clear line with a hint, exit code 2, and nothing left behind."""

import json
from pathlib import Path

import pytest
from conftest import slm

DS = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: mine.json\n"
FILES = {
    "broken.yaml": "a: [1, 2",
    "beside.yaml": DS + "  zero_stage: 2\n",
    "fixed.yaml": DS,
    "mine.json": json.dumps({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 32}),
    "blank.txt": "\n\n  \n",
    "broken.json": "{",
}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["--model", "broken.json"], "broken.json is not JSON"),
        (["--strategy", "zero9"], "unknown strategy 'zero9'"),
        (["--strategy", "broken.yaml"], "broken.yaml is not YAML at line 2"),
        (["--strategy", "beside.yaml"], "zero_stage 2 contradicts mine.json"),
        (
            ["--strategy", "fixed.yaml"],
            "train_micro_batch_size_per_gpu 32, --per_device_train_batch_size says 4",
        ),
        (["--per_device_train_batch_size", "4", "0"], "--per_device_train_batch_size is 0"),
        (["--per_device_train_batch_size", "four"], "invalid int value: 'four'"),
        (["--dataset", "nowhere.txt"], "no such file: nowhere.txt"),
        (["--dataset", "blank.txt"], "blank.txt contains no text"),
        (["--num_processes", "0"], "argument --num_processes: 0 is below 1"),
        (
            ["--prices", "-1"],
            "argument --prices: -1 is not a price per GPU-hour: 0.000001 to 1000000",
        ),
        (["--timeout", "soon"], "invalid positive_number value: 'soon'"),
        (["--numerics", "fp4"], "invalid choice: 'fp4'"),
        (["--attn_implementation", "magic"], "--attn_implementation magic"),
        (["--report_to", "paper"], "--report_to paper: this tracker is not installed"),
    ],
)
def test_compare_says_what_is_wrong(arguments: list[str], says: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = slm("compare", *arguments, cwd=tmp_path)
    assert done.code == 2, done.err
    assert says in done.err
    assert [line[:5] for line in done.err.splitlines() if line[:6] in ("error:", "hint: ")] == [
        "error",
        "hint:",
    ]
    assert "Traceback" not in done.err
    assert done.out == ""
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


def is_one_line_with_a_hint(err: str) -> bool:
    found = [line[:5] for line in err.splitlines() if line[:6] in ("error:", "hint: ")]
    return found == ["error", "hint:"] and "Traceback" not in err


@pytest.mark.quick
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt-5"], "unknown model 'gpt-5'"),
        (["--per_device_train_batch_size", "0"], "--per_device_train_batch_size is 0"),
        (["--report_to", "paper"], "--report_to paper: this tracker is not installed"),
        (["--resume_from_checkpoint", "latest"], "no checkpoint under"),
        (["--max_steps", "5", "--num_train_epochs", "1"], "give one of them"),
    ],
)
def test_train_says_what_is_wrong(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from slm_toolkit.train import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main([*([] if "--model" in arguments else ["--model", "slm-1m"]), *arguments])
    printed = capsys.readouterr()
    assert (exit_info.value.code, printed.out) == (2, "")
    assert says in printed.err
    assert is_one_line_with_a_hint(printed.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such folder"),
        ("{", "can't read record"),
        ("{}", "record.json: missing field: run_name"),
        ("[]", "record.json: expected object, got array"),
    ],
)
def test_report_says_what_is_wrong(content: str | None, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    if content is not None:
        folder.mkdir()
        (folder / "record.json").write_text(content)
    done = slm("report", str(folder))
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert "hint: " in done.err
