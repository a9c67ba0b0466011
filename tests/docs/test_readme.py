"""What the README shows is true: its commands run, its tables hold; test_docs.py parses them."""

import json
import re
import shlex
from pathlib import Path

import pytest
from conftest import ROOT, bench, record_under, run, slm, slm_here

from slm_toolkit.cli.main import _VERBS

README = (ROOT / "README.md").read_text()
COMMANDS = [
    shlex.split(line, comments=True)
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]
TRAIN = [words for words in COMMANDS if words[:2] == ["accelerate", "launch"]]
SLM = [words for words in COMMANDS if words[0] == "slm"]


@pytest.mark.quick
def test_ci_runs_the_two_commands_as_the_readme_has_them() -> None:
    script = (ROOT / ".ci" / "run").read_text().replace(" --quiet -c constraints/cpu.txt", "")
    assert "pip install -e . && slm compare\n" in README
    assert 'pip install -e ".[test]" && pytest -n 2\n' in README
    # `pytest -n 2` and `pytest -n 2 -m full` in one
    last = '\npytest -n 2 -m "not slow" #'
    for said in ("pip install -e . #", "slm compare)\n", 'pip install -e ".[test]"\n', last):
        assert said in script


@pytest.mark.quick
@pytest.mark.parametrize(
    "words", [words for words in SLM if words[1] in ("estimate", "recommend") and "path/to" not in str(words)]
)
def test_a_prediction_of_the_readme_is_made(words: list[str]) -> None:
    done = slm_here(*words[1:])
    assert done.code == 0, done.err
    assert "$" in done.out


@pytest.mark.parametrize("words", TRAIN, ids=" ".join)
def test_the_long_form_trains(words: list[str], tmp_path: Path) -> None:
    short = ("--model", "slm-1m", "--seq_len", "32", "--max_steps", "2", "--output_dir", str(tmp_path))
    done = run(*words[:2], "--main_process_port", "0", *words[2:], *short)
    assert done.code == 0, done.err
    assert record_under(tmp_path)["strategy"] == "fsdp_shard_grad_op"


def test_the_rehearsal_of_the_readme_rehearses(tmp_path: Path) -> None:
    (words,) = [words for words in SLM if "--rehearse" in words]
    done = slm(*words[1:], "--strategy", "ddp", "--output_dir", str(tmp_path), "--json")
    assert done.code == 0, done.err
    assert {row["evidence"] for row in json.loads(done.out)} == {"rehearsed"}


def test_the_text_example_trains_stops_and_goes_on(tmp_path: Path) -> None:
    first, second = [words for words in SLM if words[1] == "train" and "readme" in words]
    for words in (first, second):
        done = slm(*words[1:], "--output_dir", str(tmp_path), "--main_process_port", "0")
        assert done.code == 0, done.err
    record = record_under(tmp_path)
    assert record["first_step"] == 40
    assert len(record["losses"]) == 20
    assert record["losses"][-1] < 4.0  # from 5.95, the logarithm of 384 tokens
    assert (Path(record["model_dir"]) / "model.safetensors").is_file()


@pytest.mark.quick
def test_the_picture_is_the_report_of_the_records_shipped() -> None:
    ((records, picture),) = re.findall(r"drawn by `python bench/table_picture.py (\S+) (\S+)`", README)
    assert bench("table_picture").picture(str(ROOT / records)) == (ROOT / picture).read_text()


@pytest.mark.quick
def test_every_verb_has_its_line() -> None:
    assert set(re.findall(r"^\| `slm (\w+)` \|", README, re.M)) == set(_VERBS)


@pytest.mark.quick
def test_every_folder_of_the_tree_and_every_link_is_there() -> None:
    tree = README[README.index("```text\nslm_toolkit/") :].partition("\n```\n")[0]
    for line in tree.splitlines()[2:]:
        for name in re.findall(r"([\w]+)/", line):
            place = ROOT / "slm_toolkit" / name if line.startswith("  ") else ROOT / name
            assert place.is_dir(), name
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
