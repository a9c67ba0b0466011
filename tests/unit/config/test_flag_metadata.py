"""What RunConfig's fields declare: every rule is about flags that exist, and gives its sentence."""

import pytest

from slm_toolkit.config.flag_metadata import Excludes
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.strategy.strategy import find_strategy

ALL_RULES = [(name, rule) for name, flag in FLAGS.items() for rule in flag.excludes]
RULES = [(name, rule) for name, rule in ALL_RULES if rule.other in FLAGS]


def a_value(name: str) -> object:
    """Some value of a flag that is within its range and not its default."""
    flag, default = FLAGS[name], getattr(RunConfig, name)
    if flag.choices:
        return next(choice for choice in flag.choices if choice != default)
    kind = RunConfig.__annotations__[name]
    if kind in (bool, bool | None):
        return True
    return "text" if kind in (str, str | None) else {"lora_dropout": 0.5}.get(name, 7)


@pytest.mark.parametrize(("name", "rule"), RULES, ids=str)
def test_each_pair_that_a_field_excludes_is_one_sentence(name: str, rule: Excludes) -> None:
    given = {
        name: rule.own[0] if rule.own else a_value(name),
        rule.other: rule.values[0] if rule.values else a_value(rule.other),
    }
    (problem,) = [
        problem
        for problem in RunConfig(**given).problems()
        if problem.startswith(f"--{name}") and f" with --{rule.other}" in problem
    ]
    assert problem.endswith(f": {rule.why}")


@pytest.mark.parametrize("name", [name for name, flag in FLAGS.items() if flag.needs])
def test_a_flag_that_needs_another_is_refused_without_it(name: str) -> None:
    (other,) = FLAGS[name].needs
    alone = RunConfig(**{name: a_value(name)}).problems()
    assert [problem for problem in alone if problem.endswith(f" without --{other}")] != []
    both = RunConfig(**{name: a_value(name), other: a_value(other)}).problems()
    assert not any("without" in problem for problem in both)


def test_rules_name_flags_and_choices_that_exist() -> None:
    for name, rule in RULES:
        for field, values in ((name, rule.own), (rule.other, rule.values)):
            assert set(values) <= set(FLAGS[field].choices or FLAGS[field].sets or values)
    for other in {rule.other for _, rule in ALL_RULES} - FLAGS.keys():
        assert isinstance(getattr(find_strategy("ddp"), other), bool)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"adam_beta1": 1.0}, "--adam_beta1 is 1: below 1"),
        ({"lora_alpha": 0.0, "peft": "lora"}, "--lora_alpha is 0: above 0"),
        ({"seq_len": 1}, "--seq_len is 1: at least 2"),
        ({"seed": 2**32}, "--seed is 4294967296: at most 4,294,967,295"),
        ({"max_steps": -(10**400)}, "--max_steps is -1000000000000000000...0000000000: at least 1"),
        ({"lora_alpha": float("inf"), "peft": "lora"}, "--lora_alpha is inf: at most 1,000,000,000,000"),
        ({"numerics": "int8"}, "--numerics is 'int8': one of aligned, stock, pure_bf16, fp16, fp32"),
        ({"learning_rate": 3e4}, "--learning_rate is 30000: at most 1"),
        ({"run_name": "a\nb"}, "--run_name is 'a\\nb': it has unprintable characters"),
    ],
)
def test_a_value_out_of_its_range_is_a_sentence(flags: dict, says: str) -> None:
    assert RunConfig(**flags).problems() == [says]
