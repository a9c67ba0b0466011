"""The command that `slm recommend` prints: it parses, and names all that a run needs."""

import dataclasses
import shlex
from pathlib import Path

from conftest import own_strategy, plans_of, slm_here
from transformers import GPT2Config

from slm_toolkit import api
from slm_toolkit.cli.main import _parser
from slm_toolkit.config.parser import with_underscores
from slm_toolkit.recommend.command import launch_command


def test_the_command_is_what_the_first_row_says() -> None:
    made = api.recommend(model="slm-1b", gpu="h100-80gb:16", strategy="ds_zero3", tokens=2e10)
    words = shlex.split(launch_command(made[0]))
    flags = dict(zip(words[2:], words[3:], strict=False))
    assert flags["--strategy"] == "ds_zero3"
    assert flags["--num_processes"] == "16"
    assert flags["--num_machines"] == "2"
    assert flags["--main_process_ip"] == "$HEAD_NODE"
    assert flags["--machine_rank"] == "$NODE_RANK"
    assert flags["--per_device_train_batch_size"] == str(made[0].config.per_device_train_batch_size)
    assert flags["--max_steps"] == str(made[0].num_steps)


def test_the_command_parses_for_shipped_and_own_files(tmp_path: Path) -> None:
    own = own_strategy(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 8\n", name="mine")
    for name in ("ddp", own):
        words = shlex.split(launch_command(plans_of(name, num_gpus=8)[0]))
        args = _parser().parse_args(with_underscores(words[1:]))
        assert args.strategy == name


def test_nodes_of_an_own_file_are_those_of_the_plan(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 16\nnum_machines: 2\nmachine_rank: 1\n"
    (plan,) = plans_of(own_strategy(tmp_path, text, name="nodes"), num_gpus=8)
    assert "--num_machines 1 " in launch_command(plan)


def test_a_model_that_is_not_trained_here_has_nothing_to_launch(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    done = slm_here("recommend", "--model", str(tmp_path / "gpt2"), "--gpu", "h100-80gb:1", "--tokens", "1B")
    assert done.code == 0
    assert "a gpt2 can be estimated, not trained here" in done.out
    assert "slm train" not in done.out


def test_a_plan_names_its_tokenizer_saves_and_evaluates() -> None:
    def command(*asked: str) -> str:
        shown = slm_here("recommend", "--gpu", "h100-80gb:8@2", *asked).out
        return next(line for line in shown.splitlines() if line.startswith("slm train "))

    named = command("--model", "qwen2.5-1.5b", "--tokens", "50M")
    assert "--model Qwen/Qwen2.5-1.5B " in named
    assert "--tokenizer_name Qwen/Qwen2.5-1.5B " in named
    unnamed = command("--model", "slm-2b", "--tokens", "40B")
    assert '--tokenizer_name "${TOKENIZER:?' in unnamed
    assert "TOKENIZER" not in command("--model", "slm-1m", "--tokens", "1B")
    words = shlex.split(command("--model", "slm-2b", "--dataset", "README.md", "--tokenizer_name", "byte"))
    flags = dict(zip(words[2:], words[3:], strict=False))
    assert flags["--tokenizer_name"] == "byte"
    assert flags["--dataset"] == "README.md"
    assert flags["--save_steps"] == flags["--eval_steps"]


def test_a_checkpoint_is_written_about_every_half_hour_and_at_least_once() -> None:
    (plan,) = plans_of("ddp", num_gpus=2)
    long = dataclasses.replace(plan, hours=10.0, num_steps=2000)  # 200 steps an hour
    assert "--eval_steps 100 --save_steps 100 " in launch_command(long)
    short = dataclasses.replace(plan, hours=0.01, num_steps=20)
    assert "--save_steps 20 " in launch_command(short)
