"""Other trainers' flags, GPUs and models as people type them: accepted, or answered with the right hint."""

import json
import re
from pathlib import Path

import pytest
import yaml
from conftest import ROOT, slm_here

from slm_toolkit.cli.main import _parser
from slm_toolkit.config.flags import training_config
from slm_toolkit.config.parser import foreign_flags, with_underscores
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import gpu_of_name, gpus_and_count
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.flag_checks import gpus_asked
from slm_toolkit.strategy.checked_run import precision_problem
from slm_toolkit.strategy.strategy import find_strategy


def refused(*words: str) -> str:
    """What is said of a command line that does not parse."""
    with pytest.raises(ValueError, match="hint: ") as ended:
        _parser(words[0]).parse_args(with_underscores(list(words)))
    return str(ended.value)


@pytest.mark.parametrize(
    ("typed", "field", "value"),
    [
        ("--lr 1e-3", "learning_rate", 1e-3),
        ("--epochs 3", "num_train_epochs", 3.0),
        ("--steps 7", "max_steps", 7),
        ("--max_seq_length 64", "seq_len", 64),
        ("--block-size=64", "seq_len", 64),
        ("--grad_accum 2", "gradient_accumulation_steps", 2),
        ("--micro_batch_size 2", "per_device_train_batch_size", 2),
        ("--grad_clip 0.5", "max_grad_norm", 0.5),
    ],
)
def test_a_name_with_the_same_meaning_is_taken_by_verbs_and_by_the_script(
    typed: str, field: str, value: object
) -> None:
    words = typed.split()
    assert getattr(training_config(words), field) == value
    assert getattr(_parser("train").parse_args(with_underscores(["train", *words])), field) == value
    found = getattr(_parser("compare").parse_args(with_underscores(["compare", *words])), field)
    assert found in (value, [value])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--bf16", {}),
        ("--bf16 true --fp16=false", {}),
        ("--fp16", {"numerics": "fp16"}),
        ("--torch_compile True --seed 1", {"kernels": "compiled", "seed": 1}),
    ],
)
def test_a_switch_of_trainer_is_a_value_of_our_flag(typed: str, meant: dict[str, object]) -> None:
    assert training_config(typed.split()) == RunConfig(**meant)


def test_the_tables_name_flags_that_exist_and_no_name_twice(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser("train").parse_args(["train", "--help", "all"])
    flags = set(re.findall(r"--(\w+)", capsys.readouterr().out))
    same = foreign_flags("same")
    assert set(same.values()) <= flags
    assert not same.keys() & set(RunConfig.__dataclass_fields__)
    assert not same.keys() & foreign_flags("hints").keys()
    for section in yaml.safe_load((ROOT / "slm_toolkit/config/foreign_flags.yaml").read_text()).values():
        names = " ".join(section).split()
        assert len(names) == len(set(names))
    mentioned = {flag for text in foreign_flags("hints").values() for flag in re.findall(r"--(\w+)", text)}
    assert mentioned <= flags | {"num_gpus"}  # estimate's


@pytest.mark.parametrize("verb", ["train", "compare"])
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--batch_size 4", "hint: --per_device_train_batch_size N: sequences of one process"),
        ("--precision bf16", "hint: --numerics: aligned (the default) computes in bf16"),
        ("--warmup_ratio 0.1", "hint: --warmup_steps N"),
        ("--use_lora", "hint: --peft lora"),
        ("--deepspeed ds.json", "hint: --strategy NAME or FILE"),
        ("--lerning_rate 1", "hint: did you mean --learning_rate?"),
    ],
)
def test_a_name_that_may_mean_something_else_gets_a_hint(verb: str, words: str, hint: str) -> None:
    said = refused(verb, *words.split())
    assert said.startswith(f"unknown: {words}\n{hint}")
    assert said.endswith(f"; slm {verb} --help")
    assert "find_batch_size" not in said


def test_a_removed_flag_is_answered_with_what_to_do_instead() -> None:
    for name, instead in foreign_flags("removed").items():
        said = refused("compare", f"--{name}", "1")
        assert said.startswith(f"unknown: --{name} 1\nhint: --{name} was removed: {instead}")


def test_a_file_with_fp16_runs_with_the_switch_of_trainer(tmp_path: Path) -> None:
    """It is --numerics fp16, which runs anywhere; accelerate's own fp16, of --numerics stock, needs a GPU."""
    path = tmp_path / "half.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp16\n")
    asked = find_strategy(str(path)).mixed_precision
    assert precision_problem(asked, training_config(["--fp16"]), has_gpu=False) is None
    assert precision_problem("bf16", RunConfig(numerics="fp16"), has_gpu=False) is not None
    assert precision_problem(asked, RunConfig(numerics="stock"), has_gpu=True) is None
    assert precision_problem(asked, RunConfig(numerics="stock"), has_gpu=False) is not None
    assert precision_problem(asked, RunConfig(numerics="aligned"), has_gpu=True) is not None


def test_the_script_says_the_same_and_sends_the_launchers_words_away(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words, hint in (
        ("--batch_size 4", "--per_device_train_batch_size N"),
        ("--strategy ddp", "`slm train` takes it"),
        ("--num_processes 2", "`slm train` takes it"),
    ):
        with pytest.raises(SystemExit):
            training_config(words.split())
        assert hint in capsys.readouterr().err


def test_a_verb_without_training_flags_gives_no_hint_of_them() -> None:
    assert refused("report", "--bf16") == "unknown: --bf16\nhint: slm report --help"


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("8xA100-40GB", (("a100-40gb",), (8,), None)),
        ("8 x A100 40GB", (("a100-40gb",), (8,), None)),
        ("h100-80gb:8,16@2.49", (("h100-80gb",), (8, 16), 2.49)),
        ("4090", (("rtx-4090",), (), None)),
        ("RTX4090:2", (("rtx-4090",), (2,), None)),
        ("NVIDIA GeForce RTX 4090", (("rtx-4090",), (), None)),
        ("NVIDIA A100-SXM4-40GB", (("a100-40gb",), (), None)),
        ("A100:8", (("a100-40gb", "a100-80gb", "a100-80gb-pcie"), (8,), None)),
        ("8xH100@3", (("h100-80gb", "h100-80gb-pcie"), (8,), 3)),
        ("L4", (("l4",), (), None)),
        ("8xh200:8", None),
    ],
)
def test_a_gpu_is_known_as_people_write_it(text: str, meant: object) -> None:
    assert gpus_and_count(text) == meant


def test_an_unknown_gpu_is_answered_with_the_closest_and_the_count() -> None:
    with pytest.raises(ValueError, match="did you mean a100-40gb:8 or a100-80gb:8 or a100-80gb-pcie:8?"):
        gpus_and_count("A10:8")
    with pytest.raises(ValueError, match="unknown GPU 'H20'"):  # another GPU than the H200
        gpu_of_name("H20")
    with pytest.raises(ValueError, match="unknown GPU 'RTX'"):  # no family, but a brand
        gpus_and_count("RTX")


def test_a_family_of_gpus_is_all_its_types() -> None:
    assert gpus_asked(["A100:8"], None) == (["a100-40gb", "a100-80gb", "a100-80gb-pcie"], [8])
    done = slm_here("recommend", "--gpu", "H100:2@3", "--model", "slm-100m", "--tokens", "1B", "--json")
    assert {(row["gpu"], row["num_gpus"], row["usd_per_gpu_hour"]) for row in json.loads(done.out)} == {
        ("h100-80gb", 2, 3),
        ("h100-80gb-pcie", 2, 3),
    }


def test_estimate_takes_the_number_with_the_gpu() -> None:
    assert gpus_asked(["8xA100-40GB"], None) == (["a100-40gb"], [8])
    assert gpus_asked(["h200", "l4"], [2]) == (["h200", "l4"], [2])
    for words, counts in ((["h200:8"], [4]), (["h200:8", "l4:4"], None), (["h200:8", "l4"], None)):
        with pytest.raises(ValueError, match="several numbers of GPUs\nhint: --gpu h200"):
            gpus_asked(words, counts)
    with pytest.raises(ValueError, match="hint: --gpu h200 --prices 2.5"):
        gpus_asked(["h200@2.5"], None)
    done = slm_here("estimate", "--gpu", "2xL4", "--model", "slm-100m", "--strategy", "ddp", "--json")
    assert '"num_gpus": 2' in done.out


def test_recommend_and_doctor_take_them_too() -> None:
    done = slm_here(
        "recommend", "--gpu", "1xrtx-5090", "--model", "slm-100m", "--strategy", "single", "--json"
    )
    assert done.code == 0, done.err  # its memory was unknown once, and the hint was of something else
    assert '"gpu": "rtx-5090"' in done.out
    done = slm_here("doctor", "--gpu", "a100-40gb:16", "--model", "slm-1b", "--strategy", "ddp")
    assert done.code in (0, 1), done.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("slm1m", "slm-1m"),
        ("SLM_1M", "slm-1m"),
        ("slm700m", "slm-700m"),
        ("smolm2-135m", "smollm2-135m"),
        ("tinylama-1.1b", "tinyllama-1.1b"),
    ],
)
def test_a_mistyped_model_is_answered_with_the_preset(typed: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown model '{typed}'\nhint: did you mean {meant}[?] "):
        find_model(typed)
