"""Other trainers' flags, GPUs and models as people type them: accepted, or answered with the right hint."""

import re

import pytest
import yaml
from conftest import ROOT

from slm_toolkit.cli.main import _parser
from slm_toolkit.config.flags import training_config
from slm_toolkit.config.parser import foreign_flags, with_underscores
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import gpu_of_name, gpus_and_count
from slm_toolkit.model.names import find_model
from slm_toolkit.predict.flag_checks import gpus_asked
from slm_toolkit.strategy.checked_run import precision_problem


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
        ("--block-size=64", "seq_len", 64),
        ("--grad_clip 0.5", "max_grad_norm", 0.5),
    ],
)
def test_a_name_with_the_same_meaning_is_taken_by_verbs_and_by_the_script(
    typed: str, field: str, value: object
) -> None:
    words = typed.split()
    assert getattr(training_config(words), field) == value
    for verb in ("train", "compare"):
        found = getattr(_parser(verb).parse_args(with_underscores([verb, *words])), field)
        assert found in (value, [value])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--bf16 true --fp16=false", {}),
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
    for section in yaml.safe_load((ROOT / "slm_toolkit/config/foreign_flags.yaml").read_text()).values():
        names = " ".join(section).split()
        assert len(names) == len(set(names))
    mentioned = {flag for text in foreign_flags("hints").values() for flag in re.findall(r"--(\w+)", text)}
    assert mentioned <= flags | {"num_gpus", "tokens"}  # estimate's, recommend's


@pytest.mark.parametrize("verb", ["train", "compare"])
@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("--batch_size 4", "hint: --per_device_train_batch_size N: sequences of one process"),
        ("--precision bf16", "hint: --numerics: aligned (the default) computes in bf16"),
        ("--warmup_ratio 0.1", "hint: --warmup_steps N"),
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


@pytest.mark.parametrize(
    ("precision", "numerics", "has_gpu", "is_refused"),
    [
        ("fp16", "fp16", False, False),
        ("fp16", "stock", True, False),
        ("fp16", "stock", False, True),  # accelerate's own fp16 needs a GPU
        ("fp16", "aligned", True, True),
    ],
)
def test_a_files_precision_that_contradicts_the_flags_is_refused(
    precision: str, numerics: str, has_gpu: bool, is_refused: bool
) -> None:
    problem = precision_problem(precision, RunConfig(numerics=numerics), has_gpu=has_gpu)
    assert (problem is not None) == is_refused


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
        ("h100-80gb:8,16@2.49", (("h100-80gb",), (8, 16), 2.49)),
        ("4090", (("rtx-4090",), (), None)),
        ("NVIDIA A100-SXM4-40GB", (("a100-40gb",), (), None)),
        ("A100:8", (("a100-40gb", "a100-80gb", "a100-80gb-pcie"), (8,), None)),
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


@pytest.mark.parametrize(
    ("words", "counts", "meant"),
    [
        (["A100:8"], None, (["a100-40gb", "a100-80gb", "a100-80gb-pcie"], [8])),
        (["h200", "l4"], [2], (["h200", "l4"], [2])),
        (["h200:8"], [4], None),
        (["h200:8", "l4:4"], None, None),
    ],
)
def test_a_family_of_gpus_is_all_its_types_and_one_number(words: list, counts: list, meant: tuple) -> None:
    if meant is None:
        with pytest.raises(ValueError, match="hint: --gpu "):
            gpus_asked(words, counts)
    else:
        assert gpus_asked(words, counts) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("slm1m", "slm-1m"),
        ("smolm2-135m", "smollm2-135m"),
        ("tinylama-1.1b", "tinyllama-1.1b"),
    ],
)
def test_a_mistyped_model_is_answered_with_the_preset(typed: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown model '{typed}'\nhint: did you mean {meant}[?] "):
        find_model(typed)
