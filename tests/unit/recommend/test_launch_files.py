"""What `slm recommend` gives to launch: it parses, it runs, and it refuses what would not."""

import contextlib
import io
import json
import shlex
from pathlib import Path

import pytest
import yaml
from conftest import own_strategy, plans_of, slm_here
from transformers import GPT2Config

from slm_toolkit.cli.main import _parser, main
from slm_toolkit.config.parser import with_underscores
from slm_toolkit.recommend.launch_files import check_command, launch_command, write_launch, yaml_name


def test_what_is_written_is_what_the_first_row_says(tmp_path: Path) -> None:
    asked = ("--model", "slm-1b", "--gpu", "h100-80gb:16", "--strategy", "ds_zero3", "--tokens", "20B")
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main(["recommend", "--json", *asked, "--write", str(tmp_path / "plan")])
    row = json.loads(out.getvalue())[0]
    script = (tmp_path / "plan" / "launch.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("slm launch")]
    words = shlex.split(line)
    flags = dict(zip(words[2:], words[3:], strict=False))
    assert flags["--num_processes"] == "16"
    assert flags["--num_machines"] == "2"
    assert flags["--per_device_train_batch_size"] == str(row["per_device_train_batch_size"])
    assert flags["--max_steps"] == str(row["num_steps"])
    config = yaml.safe_load(Path(flags["--config_file"]).read_text())
    assert (config["num_processes"], config["num_machines"]) == (16, 2)
    assert config["deepspeed_config"]["deepspeed_multinode_launcher"] == "standard"
    assert (tmp_path / "plan" / config["deepspeed_config"]["deepspeed_config_file"]).is_file()
    again = slm_here("recommend", *asked, "--write", str(tmp_path / "plan"))
    assert again.code == 2
    assert "launch.sh exists\nhint: " in again.err


def test_the_command_to_measure_parses_for_shipped_and_own_files(tmp_path: Path) -> None:
    own = own_strategy(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 8\n", name="mine")
    for name in ("ddp", own):
        words = shlex.split(check_command(plans_of(name, num_gpus=8)[0]))
        args = _parser().parse_args(with_underscores(words[1:]))
        assert args.strategy == [name]
    several = check_command(plans_of("ddp", num_gpus=16)[0])
    assert several.startswith("slm launch ")  # `slm compare` is of one machine
    assert "--max_steps 33" in several


def test_nodes_of_an_own_file_are_those_of_the_plan(tmp_path: Path) -> None:
    text = "distributed_type: MULTI_GPU\nnum_processes: 16\nnum_machines: 2\nmachine_rank: 1\n"
    (plan,) = plans_of(own_strategy(tmp_path, text, name="nodes"), num_gpus=8)
    assert "--num_machines 1 " in launch_command(plan, yaml_name(plan))
    written, *_ = write_launch(plan, tmp_path / "plan")
    config = yaml.safe_load(written.read_text())
    assert (config["num_machines"], config["num_processes"]) == (1, 8)
    assert "machine_rank" not in config


def test_a_model_that_is_not_trained_here_has_nothing_to_launch(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    asked = ("recommend", "--model", str(tmp_path / "gpt2"), "--gpu", "h100-80gb:1", "--tokens", "1B")
    done = slm_here(*asked)
    assert done.code == 0
    assert "a gpt2 can be estimated, not trained here" in done.out
    assert "accelerate launch" not in done.out
    assert slm_here(*asked, "--write", str(tmp_path / "plan")).code == 2


def test_a_place_that_can_not_be_written_is_refused_before_all_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", Path("/proc/nowhere")):
        done = slm_here("recommend", "--gpu", "h100-80gb:1", "--write", str(place))
        assert done.code == 2
        assert "can't write to " in done.err
        assert "hint: " in done.err
