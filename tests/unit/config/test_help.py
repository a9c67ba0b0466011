"""Help in two sizes, and its examples."""

import re
import shlex

import pytest
from conftest import slm_here

from slm_toolkit.cli.main import _VERBS, _parser
from slm_toolkit.config.flags import training_config
from slm_toolkit.config.parser import Parser, with_underscores
from slm_toolkit.config.run_config import FLAGS

LONG = ("train", "compare", "estimate", "recommend", "doctor", "report")
"verbs with so many flags that --help shows the basic ones"


def verb_parser(verb: str) -> Parser:
    return _parser(verb)._subparsers._group_actions[0].choices[verb]


def flags_in(text: str) -> set[str]:
    """The flags that a help has an entry for: `  --model, --model_name_or_path STR`."""
    return set(re.findall(r"(?:^  |, )(--\w+)", text.partition("\nexamples:")[0], re.M))


@pytest.mark.parametrize("verb", LONG)
def test_help_shows_five_to_fifteen_flags_and_help_all_every_flag(verb: str) -> None:
    short, whole = slm_here(verb, "--help"), slm_here(verb, "--help", "all")
    parser = verb_parser(verb)
    basic = [action for action in parser._actions if getattr(action, "basic", False)]
    assert 5 <= len(basic) <= 15
    assert flags_in(short.out) == {name for action in basic for name in action.option_strings}
    assert flags_in(whole.out) == {*parser._option_string_actions} - {"-h"}
    assert (
        short.out.splitlines()[-1]
        == f"flags from a file: --config FILE.yaml; every flag: slm {verb} --help all"
    )


@pytest.mark.parametrize("verb", sorted({*_VERBS} - {"launch"}))
def test_the_examples_of_every_help_parse(verb: str) -> None:
    text = slm_here(verb, "--help").out.partition("\nexamples:\n")[2].partition("\n\n")[0]
    examples = text.splitlines()
    assert 2 <= len(examples) <= 3
    for example in examples:
        command = re.split(r"\s{3,}", example.strip())[0]  # a remark follows
        words = shlex.split(command.partition(" > ")[0])
        assert words[:2] == ["slm", verb]
        _parser(words[1]).parse_args(with_underscores(words[1:]))


def test_the_scripts_help_shows_the_basic_flags_of_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for words, names in (([], {name for name, flag in FLAGS.items() if flag.basic}), (["all"], {*FLAGS})):
        with pytest.raises(SystemExit):
            training_config(["--help", *words])
        shown = flags_in(capsys.readouterr().out)
        assert {f"--{name}" for name in names - {"parity"}} <= shown
        assert "--parity" not in shown  # for the commands of `slm compare`
