"""Every recipe does two steps on CPU processes, and its head and its real commands are what it says."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COMPILING_SECONDS, ROOT, WARM, Finished, free_port, run, slm_here

from slm_toolkit.cli.main import _parser
from slm_toolkit.cli.recipes import shipped_recipes
from slm_toolkit.config.flags import every_config, given_flags
from slm_toolkit.config.parser import with_underscores

BIN = str(Path(sys.executable).parent)
TRIED = {"PATH": f"{BIN}:{os.environ['PATH']}", "TRY": "1", "SLURM_CONF": os.devnull}
RECIPES = {recipe.name: recipe for recipe in shipped_recipes()}
RUNS = {  # strategies and ranks of the runs that a recipe does with TRY=1
    "chat_fine_tune": [("single", 1)],
    "cheapest_100m": [("single", 1), ("single", 1)],
    "eight_gpus_1b": [("ddp", 2), ("fsdp_shard_grad_op", 2)],
    "little_ram": [("in_pieces", 2)],
    "long_sequences": [("fsdp_full_shard", 2), ("fsdp_full_shard", 2)],
    "lora": [("single", 1), ("single", 1)],
    "memory_dry_run": [("fsdp_shard_grad_op", 64)],
    "mixed_data": [("single", 1)],
    "nvme_offload": [("ds_zero3_nvme", 1)],
    "one_24gb_card_2b": [("ds_zero2_offload", 1), ("single", 1)],
    "paper_grid": [("ddp", 2)],
    "qlora": [("single", 1), ("single", 1)],
    "slurm": [],
    "two_nodes_2b": [("fsdp_hybrid_shard", 4)],
}
PACKAGES = {"lora": ["peft"], "qlora": ["peft", "bitsandbytes"]}
SHIM = """#!{python}
import json, os, sys
words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
if words[0] == "slm" and words[1] not in ("compare", "train", "report"):
    os.execv("{bin}/slm", words)
with open("{log}", "a") as log:
    log.write(json.dumps(words) + "\\n")
print('[{{"peak_rss_bytes": 1}}]')
"""
"in the place of what would train, or wants a GPU: writes down what it was asked; the other verbs are real"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_short_and_plain_bash(name: str) -> None:
    path = ROOT / "recipes" / f"{name}.sh"
    lines = path.read_text().splitlines()
    assert max(len(lines), *map(len, lines)) <= 110
    assert "set -euo pipefail" in lines
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here: apt-get install shellcheck")
    done = run("shellcheck", str(path))
    assert done.code == 0, done.out


@pytest.mark.parametrize("name", RECIPES)
def test_the_real_commands_have_flags_that_exist_and_contradict_nothing(name: str, tmp_path: Path) -> None:
    if name == "nvme_offload" and not Path("/usr/include/libaio.h").exists():
        pytest.skip("apt-get install libaio-dev")
    for words in real_commands(name, tmp_path):
        args = _parser(words[1]).parse_args(with_underscores(words[1:]))
        for config in every_config(given_flags(args)):
            assert config.problems() == []


def real_commands(name: str, folder: Path) -> list[list[str]]:
    """What a recipe would launch with GPUs, and with a Slurm that answers, parsed by nobody yet."""
    log, shims = folder / "log", folder / "bin"
    shims.mkdir()
    for program in ("nvidia-smi", "sinfo", "slm"):
        path = shims / program
        path.write_text(SHIM.format(python=sys.executable, bin=BIN, log=log))
        path.chmod(0o755)
    (folder / "runs" / "lora" / "model").mkdir(parents=True)
    env = {
        **{"PATH": f"{shims}:{BIN}:{os.environ['PATH']}", "TRY": ""},
        **{"HEAD_NODE": "10.0.0.1", "NODE_RANK": "0", "NVME": str(folder), "DISK_GB": "0"},
    }
    done = run("bash", str(ROOT / "recipes" / f"{name}.sh"), cwd=folder, env=env)
    assert done.code == 0, done.err
    commands = [json.loads(line) for line in log.read_text().splitlines()]
    return [words for words in commands if words[1:2] in (["compare"], ["train"])]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nvme] if name == "nvme_offload" else []) for name in RECIPES],
)
def test_a_recipe_does_two_steps_on_this_machine(name: str, tmp_path: Path) -> None:
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package)
    done = tried(name, tmp_path)
    assert done.code == 0, done.err
    records = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("record.json"))]
    assert sorted((record["strategy"], record["world_size"]) for record in records) == RUNS[name]
    for record in records:
        assert record["status"] == "ok"
        assert len(record["losses"]) == (0 if record["asked"]["config"]["rehearse"] else 2)
    if name == "mixed_data":
        assert records[0]["eval_losses_by_set"].keys() == {"sums", "products"}
    if name == "slurm":
        assert done.out.count("\nsbatch ") == 2


def tried(name: str, folder: Path) -> Finished:
    """What a recipe does with TRY=1; both nodes of two are this one, two ranks each."""
    words, variables, second = ("bash", str(ROOT / "recipes" / f"{name}.sh")), TRIED, None
    if name == "two_nodes_2b":
        variables = {**TRIED, "NODES": "2", "GPUS_PER_NODE": "2", "PORT": str(free_port())}
        env = {**WARM.env(), **variables, "NODE_RANK": "1"}
        second = subprocess.Popen(words, cwd=folder, env=env, stdout=subprocess.DEVNULL)
    try:
        return run(*words, cwd=folder, env={**variables, "NODE_RANK": "0"}, timeout=COMPILING_SECONDS)
    finally:
        if second is not None:
            second.wait(timeout=60)


@pytest.mark.quick
def test_recipes_are_listed_and_one_is_printed_as_it_is() -> None:
    listed = slm_here("recipes").out
    for recipe in RECIPES.values():
        assert recipe.name in listed
        assert recipe.question in listed
    assert RUNS.keys() == RECIPES.keys()
    assert slm_here("recipes", "lora").out == (ROOT / "recipes" / "lora.sh").read_text()
    done = slm_here("recipes", "qlorra")
    assert (done.code, "there are chat_fine_tune, " in done.err) == (2, True)
