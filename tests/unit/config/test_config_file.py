"""`--config FILE`: flags of a verb or of the script, from a YAML."""

from pathlib import Path
from typing import Any

import pytest

from slm_toolkit.cli.main import _parser
from slm_toolkit.config.flags import training_config
from slm_toolkit.config.parser import with_underscores
from slm_toolkit.config.run_config import RunConfig


def parse(*words: str) -> Any:
    return _parser(words[0]).parse_args(with_underscores(list(words)))


def write(folder: Path, text: str) -> str:
    (folder / "flags.yaml").write_text(text)
    return str(folder / "flags.yaml")


def test_a_flag_of_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "learning_rate: 1e-3\nmax_steps: 7\nmodel: slm-1m\npad_widths: true\n")
    expected = RunConfig(learning_rate=1e-3, max_steps=7, model="slm-1m", pad_widths=True)
    assert training_config(["--config", path]) == expected
    for words in (["--max_steps", "9", "--config", path], [f"--config={path}", "--max_steps", "9"]):
        assert training_config(words).max_steps == 9


def test_every_kind_of_value_is_taken(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "strategy: [ddp, ds_zero2]\nper-device-train-batch-size: [4, 8]\nseq_len: 64\ndry_run: true\n"
        'force: false\nbaseline: null\nslurm_options: "--partition=gpu --time=1:00:00"\n',
    )
    args = parse("compare", "--config", path)
    assert args.strategy == ["ddp", "ds_zero2"]
    assert args.per_device_train_batch_size == [4, 8]
    assert args.seq_len == [64]
    assert (args.dry_run, args.force, args.baseline) == (True, False, None)
    assert args.slurm_options == "--partition=gpu --time=1:00:00"
    assert not hasattr(args, "config")


def test_times_are_taken_as_they_are_written(tmp_path: Path) -> None:
    config = training_config(
        ["--config", write(tmp_path, "gradient_checkpointing: none\nmax_time: 1:12:00:00\n")]
    )
    assert config.gradient_checkpointing == "none"
    assert config.max_seconds == 129_600  # 24 x 3600 + 12 x 3600; YAML 1.1 reads 3 days in base 60


def test_names_of_other_trainers_work_in_the_file(tmp_path: Path) -> None:
    config = training_config(["--config", write(tmp_path, "lr: 1e-3\nepochs: 2\nfp16: true\nbf16: false\n")])
    assert (config.num_train_epochs, config.numerics) == (2.0, "fp16")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("lerning_rate: 1\nseed: 1\nmax_step: 2\n", "unknown lerning_rate, max_step\nhint: did you mean "),
        ("precision: bf16\n", "unknown precision\nhint: --numerics: aligned (the default)"),
        ("fp16: 3\n", "hint: it takes true or false"),
        ("seed: 1\nseed: 2\n", "seed given twice\nhint: keep one value"),
        ("lr: 1\nlearning_rate: 2\n", "learning_rate given twice"),
        ("numerics: fp32\nbf16: true\n", "numerics given twice"),
        ("seed: [1, 2]\n", "hint: it takes one value"),
        ("model: {name: slm-1m}\n", "model is {'a mapping'}"),
        ("", "is not a mapping"),
        ("seed: !!python/object:os.system 1\n", "has the tag"),
    ],
)
def test_a_file_that_makes_no_sense_is_one_error(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        training_config(["--config", write(tmp_path, text)])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert says in error


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--config",), "--config without a file"),
        (("--config", "missing.yaml"), "can't read --config missing.yaml"),
        (("--config", "/dev/zero"), "it is a pipe, a socket or a device"),
    ],
)
def test_a_file_that_is_not_there_is_one_error(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        training_config(list(words))
    assert says in capsys.readouterr().err
