"""What docs/ shows is what the commands beside it print, and what results/ keeps."""

import json
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT

from slm_toolkit.cli.launch import plan_launch
from slm_toolkit.cli.main import _parser
from slm_toolkit.cli.train import launch_words
from slm_toolkit.config.flags import add_flags, config_from_args
from slm_toolkit.config.parser import Parser, with_underscores
from slm_toolkit.strategy.groups import text_for_machines
from slm_toolkit.strategy.strategy import config_dir, find_strategy

MACHINES = (ROOT / "docs" / "several_machines.md").read_text()
FAST_PATH = (ROOT / "docs" / "fast_path.md").read_text()
LABELS = {
    "plain": "no flag",
    "eager_attention": "`--attn_implementation eager`",
    "fused_norm": "`--norm_kernel fused`",
    "fused_mlp": "`--mlp_kernel fused`",
    "fused_loss": "`--loss_kernel fused_linear`",
    "all_fused": "all three",
    "compile": "`--torch_compile`",
    "ours_compile": "`--torch_compile --loss_kernel fused_linear`",
    "unfused_adamw": "`--optim adamw_torch`",
    "pure_bf16": "`--numerics pure_bf16`",
}


def test_the_predicted_table_is_what_its_command_prints() -> None:
    command = (sys.executable, "bench/features.py")
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed in FAST_PATH


@pytest.mark.quick
def test_the_measured_table_is_what_was_kept() -> None:
    kept = ROOT / "results" / "throughput" / "features-cpu-glibc-bf16.json"
    (model,) = json.loads(kept.read_text())
    for row in model["rows"]:
        middle, low, high = row["against"]["plain"]["speed"]
        cells = f"{row['step_seconds']:.3f} | {middle:.2f} ({low:.2f}-{high:.2f}) | "
        assert f"| {LABELS[row['arm']]} | {cells}{row['peak_bytes'] / 2**20:,.0f} |" in FAST_PATH
    assert {row["arm"] for row in model["rows"]} == LABELS.keys()


def commands(text: str) -> list[list[str]]:
    blocks = "".join(re.findall(r"```bash\n(.*?)```", text, re.S)).replace("\\\n", " ")
    return [shlex.split(line) for line in blocks.splitlines()]


@pytest.mark.quick
@pytest.mark.parametrize("words", commands(MACHINES), ids=" ".join)
def test_a_command_for_several_machines_is_one(words: list[str]) -> None:
    args = _parser().parse_args(with_underscores(words[1:]))
    if words[1] == "train":
        args.main_process_ip = "127.0.0.1" if args.machine_rank == 0 else args.main_process_ip
        planned = plan_launch(launch_words(find_strategy(args.strategy), config_from_args(args), args))
        assert (planned.machine.num_machines, planned.machine.said["num_processes"]) == (2, 16)
    if words[1] != "launch":
        return
    assert args.words == words[2:]
    config, here = (
        words[words.index("--config_file") + 1],
        ["127.0.0.1" if "10.0." in w else w for w in words[2:]],
    )
    if config.startswith("two_machines/"):  # which the command before it writes
        shipped = config_dir("accel_configs") / config.rpartition("/")[2]
        assert "\nnum_machines: 2 " in text_for_machines(shipped, num_machines=2, gpus_per_node=8)
        here += ["--num_machines", "2", "--num_processes", "16"]
        here[here.index(config)] = f"accel_configs/{shipped.name}"
        here = [*here[-4:], *here[:-4]]
    planned = plan_launch(here)
    assert (planned.machine.num_machines, planned.machine.said["num_processes"]) == (2, 16)
    script = words[words.index("-m") + 1 :]
    if script[0] == "slm_toolkit.train":
        parser = Parser(prog="train")
        add_flags(parser, grid=False)
        parser.parse_args(script[1:])
