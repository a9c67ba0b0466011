"""What `slm recommend` gives to launch: it parses, it runs, and it refuses what would not."""

import contextlib
import dataclasses
import io
import json
import shlex
from pathlib import Path

import pytest
import yaml
from conftest import own_strategy, plans_of, slm_here

from slm_toolkit.cli.main import _parser, main
from slm_toolkit.config.parser import with_underscores
from slm_toolkit.recommend.launch_files import launch_command, write_launch


def test_what_is_written_is_what_the_first_row_says(tmp_path: Path) -> None:
    asked = ("--model", "slm-1b", "--gpu", "h100-80gb:16", "--strategy", "ds_zero3", "--tokens", "20B")
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main(["recommend", "--json", *asked, "--write", str(tmp_path / "plan")])
    row = json.loads(out.getvalue())[0]
    script = (tmp_path / "plan" / "launch.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("slm train")]
    here = line.replace('"$(dirname "$0")"', str(tmp_path / "plan")).replace("$NODE_RANK", "1")
    words = shlex.split(here)
    args = _parser(words[1]).parse_args(with_underscores(words[1:]))
    assert args.per_device_train_batch_size == row["per_device_train_batch_size"]
    assert args.max_steps == row["num_steps"]
    assert "--num_processes 16 --num_machines 2 --machine_rank $NODE_RANK" in line
    assert "--main_process_ip $HEAD_NODE " in line
    config = yaml.safe_load(Path(args.strategy).read_text())
    assert (config["num_processes"], config["num_machines"]) == (16, 2)
    deepspeed = config["deepspeed_config"]
    assert deepspeed["deepspeed_multinode_launcher"] == "standard"
    assert (tmp_path / "plan" / deepspeed["deepspeed_config_file"]).is_file()
    again = slm_here("recommend", *asked, "--write", str(tmp_path / "plan"))
    assert "launch.sh exists\nhint: " in again.err


def test_nodes_of_an_own_file_are_those_of_the_plan(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 16\nnum_machines: 2\nmachine_rank: 1\n"
    (plan,) = plans_of(own_strategy(tmp_path, text, name="nodes"), num_gpus=8)
    assert "--num_machines 1 " in launch_command(plan)
    written, *_ = write_launch(plan, tmp_path / "plan")
    config = yaml.safe_load(written.read_text())
    assert (config["num_machines"], config["num_processes"]) == (1, 8)
    assert "machine_rank" not in config


def test_a_plan_names_its_tokenizer_saves_and_evaluates() -> None:
    def command(*asked: str) -> str:
        shown = slm_here("recommend", "--gpu", "h100-80gb:8@2", *asked).out
        return next(line for line in shown.splitlines() if line.startswith("slm train "))

    assert "--tokenizer_name Qwen/Qwen2.5-1.5B " in command("--model", "qwen2.5-1.5b", "--tokens", "50M")
    assert '--tokenizer_name "${TOKENIZER:?' in command("--model", "slm-2b", "--tokens", "40B")
    assert "TOKENIZER" not in command("--model", "slm-1m", "--tokens", "1B")
    words = shlex.split(command("--model", "slm-2b", "--dataset", "README.md", "--tokenizer_name", "byte"))
    flags = dict(zip(words[2:], words[3:], strict=False))
    assert (flags["--tokenizer_name"], flags["--dataset"]) == ("byte", "README.md")
    assert flags["--save_steps"] == flags["--eval_steps"]


def test_a_checkpoint_is_written_about_every_half_hour_and_at_least_once() -> None:
    (plan,) = plans_of("ddp", num_gpus=2)
    long = dataclasses.replace(plan, hours=10.0, num_steps=2000)  # 200 steps an hour
    assert "--eval_steps 100 --save_steps 100 " in launch_command(long)
    short = dataclasses.replace(plan, hours=0.01, num_steps=20)
    assert "--save_steps 20 " in launch_command(short)
