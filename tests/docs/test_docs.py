"""What docs/ shows is true: its commands parse or run, its tables are what the code and results/ say.

Outputs that need no training are written by bench/generate_docs.py; test_generated_docs.py compares them.
"""

import re
import shlex
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ROOT, Comparison

from slm_toolkit.cli.main import _VERBS, _parser
from slm_toolkit.config.flags import add_flags
from slm_toolkit.config.parser import Parser, with_underscores
from slm_toolkit.model.names import find_model

PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
OTHER_PROGRAMS = ("accelerate", "hf", "lm_eval", "pip", "pytest", "mkdocs", "bash", "for")


def commands(text: str) -> list[list[str]]:
    """The words of each command in a page's bash blocks."""
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.S)).replace("\\\n", " ")
    return [
        shlex.split(part, comments=True)
        for line in blocks.splitlines()
        if line.strip()
        for part in line.partition(" #")[0].split(" && ")
    ]


COMMANDS = [(name, words) for name, text in PAGES.items() for words in commands(text)]
INLINE = sorted(
    {
        (name, command)
        for name, text in PAGES.items()
        for command in re.findall(r"(?<!`)`(slm [a-z][^`]*)`", " ".join(text.split()))
    }
)


@pytest.mark.quick
@pytest.mark.parametrize(("name", "words"), COMMANDS, ids=lambda value: str(value))
def test_a_command_parses(name: str, words: list[str]) -> None:
    words = [word for word in words if "=" not in word or not word.partition("=")[0].isupper()]
    if words[0] == "slm" and "--help" in words:  # prints and exits
        assert words[1] in _VERBS
    elif words[0] == "slm":
        _parser(words[1]).parse_args(with_underscores(words[1:]))
    elif "slm_toolkit.train" in words:
        launcher, arguments = words[2 : words.index("-m")], words[words.index("-m") + 2 :]
        assert (ROOT / launcher[launcher.index("--config_file") + 1]).is_file()
        parser = Parser(prog="train")
        add_flags(parser, grid=False)
        parser.parse_args(with_underscores(arguments))
    elif words[0] == "python" and words[1] == "-m":
        assert (ROOT / (words[2].replace(".", "/") + ".py")).is_file()
    elif words[0] == "python":
        script = (ROOT / words[1]).read_text()
        flags = [word.partition("=")[0] for word in words if word.startswith("--")]
        assert [flag for flag in flags if flag not in script] == []
    else:
        assert words[0] in OTHER_PROGRAMS


@pytest.mark.quick
@pytest.mark.parametrize(("name", "command"), INLINE)
def test_a_command_named_in_a_sentence_has_flags_that_exist(name: str, command: str) -> None:
    words = shlex.split(command)
    parser = Parser(prog="slm")
    import_module(f"slm_toolkit.cli.{words[1]}").fill(parser)
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert flags <= parser._option_string_actions.keys()


@pytest.mark.quick
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    if shutil.which("mkdocs") is None:
        pytest.skip("pip install -e '.[docs]'")
    command = ("mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.quick
def test_the_medians_in_sentences_are_those_of_the_tables() -> None:
    for row, page, said in (
        ("until ZeRO's forms were made simpler | 107 | 0.001% | 1.43% |", "memory.md", "error is 0.001 %"),
        ("allocated: 4 rows, median error 2.1%", "memory.md", "off by 2.1 % and reserved memory by 1.6 %"),
        ("reserved: 8 rows, median error 1.6%", "memory.md", "worst is\n1.43 %"),
        ("| 98 | 96 | 76 | 37 |", "numerics_and_parity.md", "catches 96, and plain `slm compare` catches 76"),
        ("H100 | 275 | 3.2% |", "speed_and_cost.md", "3.2 % on the study's figures, 2.5 % on published"),
        ("`slm estimate --kernels loss` answers | 87 | 8.3% |", "speed_and_cost.md", "and 8.3 % on other"),
        ("own loss kernels | 87 | 5.9% |", "speed_and_cost.md", "(5.9 % with the loss kernels"),
    ):
        assert (row in PAGES["accuracy.md"], said in PAGES[page]) == (True, True), row


@pytest.mark.parametrize(
    ("field", "of_ddp", "of_fsdp2", "of_deepspeed"),
    re.findall(r"^\| .*`(\w+)`.* \| (\S+) \| (\S+) \| (\S+) \|$", PAGES["numerics_and_parity.md"], re.M),
)
def test_what_stock_does_otherwise_is_what_the_probe_finds(
    field: str, of_ddp: str, of_fsdp2: str, of_deepspeed: str, stock: Comparison
) -> None:
    shown = {"ddp": of_ddp, "fsdp_full_shard": of_fsdp2, "ds_zero2": of_deepspeed}
    words = {"True": "on", "False": "off", "0.0": "none", "1.0": "1"}
    for name, word in shown.items():
        value = stock.rows[name]["numerics_probed"][field]
        assert word == words.get(str(value), value)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "printed"),
    [
        pair
        for names, counts in re.findall(
            r"^\| ((?:`slm-[\w-]+`(?:, )?)+) \| ([\d.,M ]+) \|", PAGES["getting_started.md"], re.M
        )
        for pair in zip(re.findall(r"`([\w-]+)`", names), counts.split(", "), strict=True)
    ],
)
def test_a_models_size_is_the_one_in_the_table(name: str, printed: str) -> None:
    millions = find_model(name).num_params / 1e6
    decimals = len(printed.removesuffix("M").partition(".")[2])
    assert f"{millions:,.{decimals}f}M" == printed


@pytest.mark.quick
@pytest.mark.parametrize(
    ("name", "formula"),
    re.findall(
        r"^\| `(\w+)\.yaml` \|.*\| ([\d+/N ]+) \|$",
        PAGES["getting_started.md"] + PAGES["README.md"],
        re.M,
    ),
)
def test_bytes_per_parameter_are_those_that_were_counted(
    name: str, formula: str, aligned: Comparison
) -> None:
    if name == "single":
        pytest.skip("not part of the comparison; test_optimizer checks its sixteen bytes")
    state = aligned.rows[name]["state_bytes_per_rank"]
    whole, _, shared = formula.partition(" + ") if "+" in formula else ("0", "", formula)
    per_rank = float(shared.split("/")[0]) / (2 if "/N" in shared else 1) + float(whole)
    assert sum(state.values()) / 951_424 == pytest.approx(per_rank, rel=0.01)
