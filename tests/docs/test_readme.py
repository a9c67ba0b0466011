"""What the README shows is true: its commands parse or run, its tables are what the code says."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Comparison, record_under, slm

from slm_toolkit.cli.main import _parser
from slm_toolkit.config.flags import add_flags
from slm_toolkit.config.parser import Parser, with_underscores
from slm_toolkit.model.names import find_model

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
    assert "pip install -e . #" in script
    assert "slm compare)\n" in script
    assert 'pip install -e ".[test]"\n' in script
    assert "\npytest -n 2\npytest -n 2 -m full\n" in script


@pytest.mark.quick
@pytest.mark.parametrize("words", TRAIN, ids=" ".join)
def test_a_training_command_names_a_config_that_is_there_and_flags_that_exist(words: list[str]) -> None:
    launcher, arguments = words[2 : words.index("-m")], words[words.index("-m") + 2 :]
    assert (ROOT / launcher[launcher.index("--config_file") + 1]).is_file()
    parser = Parser(prog="train")
    add_flags(parser, grid=False)
    parser.parse_args(with_underscores(arguments))


@pytest.mark.quick
@pytest.mark.parametrize("words", SLM, ids=" ".join)
def test_an_slm_command_parses(words: list[str]) -> None:
    _parser().parse_args(with_underscores(words[1:]))


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
def test_the_table_shown_is_the_report_of_the_records_shipped() -> None:
    shown = re.search(r"```text\n(.*?)```", README, re.S)[1]
    assert slm("report", "results/cpu").out == shown


@pytest.mark.quick
def test_the_error_table_shown_is_the_ledger_of_the_records_shipped() -> None:
    shown = re.findall(r"```text\n(.*?)```", README, re.S)[1]
    assert slm("report", "results/rehearsed", "--errors").out.endswith(shown)


@pytest.mark.quick
def test_the_accuracy_shown_is_that_of_the_traces_shipped() -> None:
    printed = subprocess.run(
        [sys.executable, "bench/memory_accuracy.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    halves = re.findall(r"^\w+: (\d+) configurations, median error (\S+%), worst (\S+%);", printed, re.M)
    shown = re.findall(r"^\| [^|]+ \| (\d+) \| ([\d.]+%) \| ([\d.]+%) \|$", README, re.M)
    assert shown[:6] == halves


@pytest.mark.quick
def test_the_throughput_shown_is_what_was_kept() -> None:
    section = README[README.index("## As fast as") : README.index("**On a CPU the allocator")]
    shown = " ".join(section.replace("*", "").split())
    for kept in sorted((ROOT / "results" / "throughput").glob("cpu-glibc-*.json")):
        for row in json.loads(kept.read_text())[0]["rows"]:
            if "bf16" in kept.name:
                assert f"| {row['step_seconds']:.3f} | " in shown
                assert f"| {row['peak_bytes'] / 2**20:,.0f} |" in shown
            if row["arm"] == "ours_compile":
                for baseline in ("trainer", "trainer_compile"):
                    middle, low, high = row["against"][baseline]["speed"]
                    assert f"{middle:.2f} ({low:.2f}-{high:.2f})" in shown


def test_the_published_memory_shown_is_what_the_bench_prints() -> None:
    printed = subprocess.run(
        [sys.executable, "bench/published_memory.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "allocated: 4 rows, median error 2.1%, worst 2.3%" in printed
    assert "reserved: 10 rows, median error 4.4%, worst 9.3%" in printed
    text = " ".join(README.split())
    assert "allocated 4 rows, median error 2.1%, worst 2.3%" in text
    assert "10 rows, 4.4% and 9.3%" in text
    assert "--software 2024: 16 of 16 right" in printed


def test_the_recommendation_shown_is_what_its_command_prints() -> None:
    shown = re.findall(r"```text\n(.*?)```", README, re.S)[2]
    (words, *_) = [words for words in SLM if words[1] == "recommend"]
    assert slm(*words[1:]).out.startswith(shown)


def test_the_findings_shown_are_what_the_doctor_prints(tmp_path: Path) -> None:
    section = README[README.index("### Doctor") :]
    (tmp_path / "mine.yaml").write_text(re.search(r"```yaml\n(.*?)```", section, re.S)[1])
    (words, fixing, *_) = [words for words in SLM if words[1] == "doctor"]
    printed = slm(*words[1:], cwd=tmp_path, env={"COLUMNS": "110"}).out
    assert printed == re.search(r"```text\n(.*?)```", section, re.S)[1]
    assert slm(*fixing[1:], cwd=tmp_path).code == 0
    assert "# from a guide of 2023" in (tmp_path / "fixed" / "mine.yaml").read_text()


@pytest.mark.quick
def test_the_errors_shown_are_those_of_the_bench_as_it_was_kept() -> None:
    printed = (ROOT / "results" / "speed" / "accuracy.txt").read_text()
    line = r"^  {}  +n +(\d+)  median \|error\| +([\d.]+%)  p90 +([\d.]+%)"
    paper, _, tables = re.findall(line.format("one model left out"), printed, re.M)
    (others,) = re.findall(line.format("all"), printed, re.M)
    assert re.findall(r"^\| [^|]+ \| (\d+) \| ([\d.]+%) \| ([\d.]+%) \|$", README, re.M)[6:] == [
        paper,
        tables,
        others,
    ]
    assert "16 of 18 separated panels right" in printed
    assert "band that `slm estimate` prints: 80 of 87" in printed


@pytest.mark.slow
def test_the_bench_prints_what_was_kept() -> None:
    pytest.importorskip("scipy", reason="pip install scipy: bench/speed_accuracy.py fits with it")
    command = [sys.executable, "bench/speed_accuracy.py", "--rows"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == (ROOT / "results" / "speed" / "accuracy.txt").read_text().strip()


@pytest.mark.parametrize(
    ("field", "of_ddp", "of_fsdp2", "of_deepspeed"),
    re.findall(r"^\| .*`(\w+)`.* \| (\S+) \| (\S+) \| (\S+) \|$", README, re.M),
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
    re.findall(r"`(slm-[\w-]+)`", README)
    and [
        pair
        for names, counts in re.findall(r"^\| ((?:`slm-[\w-]+`(?:, )?)+) \| ([\d.,M ]+) \|", README, re.M)
        for pair in zip(re.findall(r"`([\w-]+)`", names), counts.split(", "), strict=True)
    ],
)
def test_a_models_size_is_the_one_in_the_table(name: str, printed: str) -> None:
    millions = find_model(name).num_params / 1e6
    decimals = len(printed.removesuffix("M").partition(".")[2])
    assert f"{millions:,.{decimals}f}M" == printed


@pytest.mark.parametrize(
    ("name", "formula"), re.findall(r"^\| `(\w+)\.yaml` \|.*\| ([\d+/N ]+) \|$", README, re.M)
)
def test_bytes_per_parameter_are_those_that_were_counted(
    name: str, formula: str, aligned: Comparison
) -> None:
    if name == "single":
        pytest.skip("not part of the comparison; test_optimizer holds its sixteen bytes")
    state = aligned.rows[name]["state_bytes_per_rank"]
    whole, _, shared = formula.partition(" + ") if "+" in formula else ("0", "", formula)
    per_rank = float(shared.split("/")[0]) / (2 if "/N" in shared else 1) + float(whole)
    assert sum(state.values()) / 951_424 == pytest.approx(per_rank, rel=0.01)
