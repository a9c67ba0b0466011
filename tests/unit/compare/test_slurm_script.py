"""The scripts of `slm compare --launcher slurm`, written without any Slurm at hand."""

import shlex
from pathlib import Path

import pytest
import yaml
from conftest import Finished, slm_here


def written(folder: Path, *words: str) -> Finished:
    asked = ("compare", "--launcher", "slurm", "--dry_run", "--model", "slm-1m")
    return slm_here(*asked, "--output_dir", str(folder / "my runs"), *words)


def scripts_of(done: Finished) -> list[Path]:
    """Of the `sbatch FILE` lines."""
    assert done.code == 0, done.err
    return [Path(line.removeprefix("sbatch ").strip("'")) for line in done.out.splitlines()]


def test_the_script_asks_for_what_the_flags_say(tmp_path: Path) -> None:
    words = ("--strategy", "ds_zero3", "single", "--num_nodes", "2", "--gpus_per_node", "8")
    options = "--partition=gpu --time=2:00:00"
    zero3, single = scripts_of(written(tmp_path, *words, f"--slurm_options={options}"))
    text = zero3.read_text()
    assert "{{" not in text
    assert "#SBATCH --nodes=2\n" in text
    assert f"#SBATCH --cpus-per-task=32 --gpus-per-node=8 {options}\n" in text  # 4 cores x 8 ranks of a node
    assert "--num_machines 2 --num_processes 16 " in text
    words = shlex.split(text.partition("--config_file ")[2].replace("\\\n", " "))
    config = yaml.safe_load(Path(words[0]).read_text())
    assert (config["num_machines"], config["num_processes"]) == (2, 16)
    assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    assert "machine_rank" not in config  # the script says it
    assert "#SBATCH --nodes=1\n" in single.read_text()  # one process needs no second node
    assert "--gpus-per-node=1 " in single.read_text()
    (script,) = scripts_of(written(tmp_path, "--strategy", "ddp", "--timeout", "90"))
    assert "#SBATCH --time=2 --cpus-per-task=2\n" in script.read_text()  # whole minutes, a core for each rank


def test_other_nodes_and_hardware_are_other_runs_but_another_time_limit_is_not(tmp_path: Path) -> None:
    def folder(*words: str) -> str:
        return scripts_of(written(tmp_path, "--strategy", "ddp", *words))[0].parent.name

    plain = folder()
    assert folder("--slurm_options=--time=5 --account=me") == plain
    assert len({plain, folder("--num_nodes", "2"), folder("--slurm_options=-p fast")}) == 3


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--num_nodes", "2", "--launcher", "local"), "--num_nodes without --launcher slurm"),
        (("--num_nodes", "3"), "2 processes on 3 nodes"),
        (("--slurm_template", "my.sh"), "jobs get its environment"),
        (("--slurm_options=--gres=gpu:8",), "--slurm_options has gres: also set --gpus_per_node"),
    ],
)
def test_what_can_not_be_asked_is_refused(words: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    done = written(tmp_path, *words)
    assert done.code == 2
    assert problem in done.err
