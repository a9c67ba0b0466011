"""The flags that come from RunConfig's fields."""

import pytest

from slm_toolkit.config.flags import add_flags, config_from_args, flags_of
from slm_toolkit.config.parser import Parser, with_underscores
from slm_toolkit.config.run_config import RunConfig, in_todays_names


def parse(*argv: str, grid: bool = False) -> RunConfig:
    parser = Parser(prog="test")
    add_flags(parser, grid=grid)
    return config_from_args(parser.parse_args(with_underscores(list(argv))))


@pytest.mark.parametrize(
    ("typed", "field", "value"),
    [
        ("--seq-len 64", "seq_len", 64),
        ("--model_name_or_path slm-1m", "model", "slm-1m"),
        ("--output_dir a--b_c", "output_dir", "a--b_c"),
        ("--pad_widths", "pad_widths", True),
        ("--save_final_model", "save_final_model", "true"),
        ("--gradient_checkpointing", "gradient_checkpointing", "full"),  # a switch in other trainers
        ("--gradient_checkpointing false", "gradient_checkpointing", "none"),
        ("--profile", "profile", "time"),
        ("--per_device_train_batch_size auto", "per_device_train_batch_size", None),
        ("--kernels loss+norm+triton", "kernels", "fused"),
        ("--kernels fused+compile", "kernels", "compiled"),
    ],
)
def test_a_flag_is_taken_as_people_type_it(typed: str, field: str, value: object) -> None:
    assert getattr(parse(*typed.split()), field) == value


def test_flags_of_a_config_parse_back_to_it() -> None:
    config = RunConfig(model="slm-1m", gradient_checkpointing="full", learning_rate=1e-4, pad_widths=True)
    assert parse(*flags_of(config)) == config
    several = parse("--gradient_checkpointing", "false", "selective_op", grid=True)
    assert several.gradient_checkpointing == ["none", "selective_op"]


def test_parts_of_kernels_can_be_added_and_left_out() -> None:
    config = RunConfig(kernels="fused")
    assert config.without_kernels(*config.kernel_parts).kernels == "plain"
    assert config.with_kernels("compile").kernels == "compiled"


def test_the_final_model_is_saved_with_a_dataset() -> None:
    assert RunConfig(dataset="a/b:en").with_defaults(has_gpu=True).saves_model
    assert not RunConfig().with_defaults(has_gpu=True).saves_model


def test_a_configuration_of_older_records_is_part_of_the_dataset() -> None:
    old = {"dataset": "a/b=3,a/c=1", "dataset_config_name": "en"}
    assert in_todays_names(old)["dataset"] == "a/b:en=3,a/c:en=1"


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ({}, 3 + 30),  # the warm-up, and three blocks of ten
        ({"num_train_epochs": 1.0}, None),
        ({"max_tokens": "2B"}, 3815),  # 2e9 / (512 x 1024) = 3814.7
    ],
)
def test_the_number_of_steps_follows_from_steps_epochs_or_tokens(flags: dict, steps: int | None) -> None:
    assert RunConfig(seq_len=1024, **flags).with_steps(512).steps_asked == steps


_TEXTS = {"dataset": "x.txt", "eval_steps": 1}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        *(
            ({**_TEXTS, "eval_dataset": share}, f"--eval_dataset is {share}: a share is 1% to 50%")
            for share in ("0%", "51%", "2.5%")
        ),
        *(({"max_tokens": text}, "is not a number of tokens") for text in ("many", "0", "-1M", "1e400")),
        ({"max_tokens": "1M", "max_steps": 7}, "give one of them"),
        ({"gradient_checkpointing": True}, "one of none, full"),
        ({"kernels": "plain+loss"}, "or several joined by +"),
        ({"kernels": "auto+loss"}, "or several joined by +"),  # not the rest alone
        ({"resume_from_checkpoint": ""}, "is a variable unset?"),
        ({"max_time": "1 hour", "save_steps": 1}, "use DD:HH:MM:SS"),
        ({"dataset": "synthetic,x.txt"}, "can't be mixed"),
        ({"fp8": "rowwise", "seq_len": 30, "per_device_train_batch_size": 1}, "a multiple of 16"),
    ],
)
def test_a_value_that_makes_no_sense_is_one_sentence(flags: dict, says: str) -> None:
    (problem,) = RunConfig(**flags).problems()
    assert says in problem


def test_all_problems_are_reported_at_once() -> None:
    config = RunConfig(per_device_train_batch_size=0, seq_len=-1, learning_rate=float("nan"))
    for flag in ("--per_device_train_batch_size is 0", "--seq_len is -1", "--learning_rate is nan"):
        assert flag in "\n".join(config.problems())


def test_where_a_run_is_written_is_not_part_of_what_it_is() -> None:
    assert RunConfig(output_dir="a", report_to="trackio").identity == RunConfig().identity
    assert RunConfig(seed=1).identity != RunConfig().identity
