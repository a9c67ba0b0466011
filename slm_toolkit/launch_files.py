"""The command lines of a plan, and its YAML and launch script on disk."""

import dataclasses
import os
import shlex
from pathlib import Path

import yaml

from slm_toolkit.config import RunConfig
from slm_toolkit.flags import flags_of
from slm_toolkit.predict.plans import Plan
from slm_toolkit.strategy import write_resolved

SCRIPT = "launch.sh"


def launch_commands(plan: Plan, yaml_path: str) -> list[str]:
    """What to type: one command on one node, the same on each of several with its own rank."""
    row = plan.estimate
    num_nodes = row.num_gpus // row.gpus_per_node
    words = ["accelerate", "launch", "--config_file", yaml_path, "--num_processes", str(row.num_gpus)]
    several = ""
    if num_nodes > 1:
        words += ["--num_machines", str(num_nodes)]
        several = " --machine_rank $NODE_RANK --main_process_ip $HEAD_NODE --main_process_port 29500"
    script = ["-m", "slm_toolkit.train", *_flags(plan), "--max_steps", str(plan.num_steps)]
    return [f"{shlex.join(words)}{several} {shlex.join(script)}"]


def check_command(plan: Plan) -> str:
    """What measures the plan for some steps before all is paid for."""
    processes = ["--num_processes", str(plan.estimate.num_gpus)]
    return shlex.join(["slm", "compare", "--strategy", _name_of(plan), *processes, *_flags(plan)])


def _flags(plan: Plan) -> list[str]:
    """Without those that the trainer fills in by itself on a GPU; the model and its sequences always."""
    usual = RunConfig(numerics=plan.config.numerics).with_defaults(has_gpu=True)
    filled = ("max_grad_norm", "save_final_model")
    left = {
        name: getattr(RunConfig, name)
        for name in filled
        if getattr(plan.config, name) == getattr(usual, name)
    }
    return flags_of(dataclasses.replace(plan.config, **left))


def yaml_name(plan: Plan) -> str:
    """Where the plan's YAML is found without writing anything: shipped, or the user's own."""
    path = Path(plan.strategy.path).resolve()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def write_launch(plan: Plan, folder: Path) -> list[Path]:
    """The YAML, the JSON it names and a script; raises ValueError where they would overwrite something."""
    script = folder / SCRIPT
    if script.exists():
        raise ValueError(f"{script} exists\nhint: give --write an empty folder")
    row = plan.estimate
    yaml_path = write_resolved(plan.strategy, folder, row.num_gpus)
    if row.num_gpus > row.gpus_per_node and plan.strategy.engine == "deepspeed":
        config = yaml.safe_load(yaml_path.read_text())
        config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"  # started on each node by you
        yaml_path.write_text(yaml.safe_dump(config, sort_keys=False))
    lines = [
        "#!/bin/sh",
        f"# {row.model} on {row.num_gpus} x {row.gpu}: {plan.num_tokens:.3g} tokens, "
        f"{plan.hours:,.1f} h expected ({plan.evidence})",
    ]
    if row.num_gpus > row.gpus_per_node:
        lines.append("# on each node, with NODE_RANK from 0 and HEAD_NODE, the address of the node of rank 0")
    lines += ["set -e", *launch_commands(plan, str(yaml_path))]
    script.write_text("\n".join(lines) + "\n")
    script.chmod(0o755)
    return [yaml_path, script]


def _name_of(plan: Plan) -> str:
    is_own = plan.strategy.name.startswith("own-")
    return plan.strategy.path if is_own and plan.strategy.path else plan.strategy.name
