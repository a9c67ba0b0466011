"""The flags that come from RunConfig's fields."""

import pytest

from slm_toolkit.config.flags import add_flags, config_from_args, flags_of
from slm_toolkit.config.parser import Parser, hint_for, with_underscores
from slm_toolkit.config.run_config import RunConfig, in_todays_names


def check(config: RunConfig) -> None:
    if problems := config.problems():
        raise ValueError("\n".join(problems))


def parse(*argv: str, grid: bool = False) -> RunConfig:
    parser = Parser(prog="test")
    add_flags(parser, grid=grid)
    return config_from_args(parser.parse_args(with_underscores(list(argv))))


def test_flags_take_hyphens_underscores_and_hugging_face_names() -> None:
    assert parse("--seq-len", "64") == parse("--seq_len=64") == parse("--max_length", "64")
    assert parse("--model_name_or_path", "slm-1m").model == "slm-1m"
    assert parse("--output_dir", "a--b_c").output_dir == "a--b_c"


def test_flags_of_a_config_parse_back_to_it() -> None:
    config = RunConfig(
        model="slm-1m", gradient_checkpointing="full", learning_rate=1e-4, save_final_model="false"
    )
    assert parse(*flags_of(config)) == config


def test_a_bare_switch_is_true_and_a_named_one_what_it_says() -> None:
    assert parse("--pad_widths").pad_widths is True
    assert parse("--pad_widths", "false").pad_widths is False


@pytest.mark.parametrize(
    ("given", "kernels"),
    [
        ("norm+loss", "loss+norm"),
        ("loss+norm+triton", "fused"),
        ("fused+compile", "compiled"),
        ("fused+graphs", "compiled+graphs"),
    ],
)
def test_kernels_are_words_joined_in_any_order(given: str, kernels: str) -> None:
    config = parse("--kernels", given)
    assert config.kernels == kernels
    assert config.without_kernels(*config.kernel_parts).kernels == "plain"
    assert config.with_kernels("compile").compiles
    with pytest.raises(ValueError, match="auto, plain, fused, compiled, .*, or several joined by"):
        check(RunConfig(kernels=f"plain+{given}"))
    assert parse("--kernels", f"auto+{given}").problems()  # not the rest alone


def test_the_final_model_is_saved_with_a_dataset() -> None:
    assert parse("--save_final_model") == parse("--save_final_model", "True")
    assert RunConfig(dataset="a/b:en").with_defaults(has_gpu=True).saves_model
    assert not RunConfig().with_defaults(has_gpu=True).saves_model


def test_a_configuration_of_older_records_is_part_of_the_dataset() -> None:
    old = {"dataset": "a/b=3,a/c=1", "dataset_config_name": "en"}
    assert in_todays_names(old)["dataset"] == "a/b:en=3,a/c:en=1"


def test_a_choice_that_was_a_switch_once_is_still_understood_as_one() -> None:
    assert parse("--gradient_checkpointing").gradient_checkpointing == "full"
    assert parse("--gradient_checkpointing", "true").gradient_checkpointing == "full"
    assert parse("--gradient_checkpointing", "false").gradient_checkpointing == "none"
    assert parse("--gradient_checkpointing", grid=True).gradient_checkpointing == ["full"]
    several = parse("--gradient_checkpointing", "false", "selective_op", grid=True)
    assert several.gradient_checkpointing == ["none", "selective_op"]
    assert [parse("--profile").profile, parse("--profile", "false").profile] == ["time", "none"]
    with pytest.raises(ValueError, match="--gradient_checkpointing is True: one of none, full"):
        check(RunConfig(gradient_checkpointing=True))


def test_the_default_length_is_thirty_steps_after_the_warm_up() -> None:
    assert RunConfig().steps_asked == 3 + 30
    assert RunConfig(max_steps=7).steps_asked == 7
    assert RunConfig(num_train_epochs=1.0).steps_asked is None


@pytest.mark.parametrize("share", ["0%", "51%", "-5%", "2.5%"])
def test_the_share_to_hold_out_is_a_whole_percentage_up_to_half(share: str) -> None:
    assert RunConfig().held_out_percent == 5
    assert RunConfig(eval_dataset="a.jsonl").held_out_percent is None
    with pytest.raises(ValueError, match=f"--eval_dataset is {share}: a share is 1% to 50%"):
        check(RunConfig(dataset="x.txt", eval_steps=1, eval_dataset=share))


def test_tokens_take_whole_steps_of_the_batch() -> None:
    config = parse("--tokens", "2B", "--seq_len", "1024")
    assert (config.max_tokens, config.steps_asked) == ("2B", None)
    check(config)
    assert config.with_steps(512).steps_asked == 3815  # 2e9 / (512 x 1024) = 3814.7
    assert parse("--max_tokens", "524288", "--seq_len", "1024").with_steps(512).steps_asked == 1
    assert RunConfig(max_steps=7).with_steps(512).steps_asked == 7
    for other in ({"max_steps": 7}, {"num_train_epochs": 1.0, "dataset": "x.txt"}):
        with pytest.raises(ValueError, match="--max_tokens with .*: give one of them"):
            check(RunConfig(max_tokens="1M", **other))
    for text in ("many", "0", "-1M", "1e400"):
        with pytest.raises(ValueError, match="is not a number of tokens such as 20B"):
            check(RunConfig(max_tokens=text))


def test_all_problems_are_reported_at_once() -> None:
    config = RunConfig(per_device_train_batch_size=0, seq_len=-1, learning_rate=float("nan"))
    with pytest.raises(ValueError, match="learning_rate") as error:
        check(config)
    for flag in ("--per_device_train_batch_size is 0", "--seq_len is -1", "--learning_rate is nan"):
        assert flag in str(error.value)


def test_where_a_run_is_written_is_not_part_of_what_it_is() -> None:
    assert RunConfig(output_dir="a", report_to="trackio").identity == RunConfig().identity
    assert RunConfig(seed=1).identity != RunConfig().identity


def test_an_unknown_flag_is_one_line_with_a_hint() -> None:
    with pytest.raises(ValueError, match=r"^unknown: --nonsense 1\nhint: test --help$"):
        parse("--nonsense", "1")


def test_a_yaml_without_a_flag_is_taken_for_a_strategy() -> None:
    hint = hint_for(["mine.yaml", "--model", "x"], ["--strategy"])
    assert hint == "did you mean --strategy mine.yaml?"
    assert hint_for(["mine.yaml"], ["--model"]) == ""


@pytest.mark.parametrize(
    ("rate", "says"),
    [
        (3e4, "--learning_rate is 30000: above 0, at most 1; did you mean 3e-4?"),
        (10.0, "--learning_rate is 10: above 0, at most 1; did you mean 1e-1?"),
        (2.0, "--learning_rate is 2: above 0, at most 1"),
        (1.0, None),
    ],
)
def test_a_learning_rate_above_one_is_refused(rate: float, says: str | None) -> None:
    assert RunConfig(learning_rate=rate).problems() == ([] if says is None else [says])
