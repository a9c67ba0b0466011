"""Write a plan's commands, its YAML and launch script, and a SkyPilot task that rents its GPUs."""

import dataclasses
import json
import os
import re
import shlex
import textwrap
from pathlib import Path

from slm_toolkit.base.safe_files import write_new
from slm_toolkit.config.flags import flags_of
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.from_config import check_trainable
from slm_toolkit.recommend.plans import Plan
from slm_toolkit.strategy.groups import group_options
from slm_toolkit.strategy.strategy import config_dir, config_options, on_nodes, write_resolved

SKYPILOT_FILE = "skypilot.yaml"
# `sky gpus list -a`, skypilot-org/skypilot docs/source/compute/show-gpus-all.txt @1c9d60b, read 2026-11-20;
# it does not list the PCIe cards, and not yet the B300
SKYPILOT_NAMES = {
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "h100-80gb": "H100",
    "h200": "H200",
    "b200": "B200",
    "gh200": "GH200",
    "l40s": "L40S",
    "l4": "L4",
    "a40": "A40",
    "rtx-a6000": "RTXA6000",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
}


def skypilot_task(plan: Plan, command: str, folder: Path) -> str | None:
    """Return the YAML of a task that runs `command` in a copy of `folder` on each node.

    Return None for a GPU without a SkyPilot name. `command` comes from `launch_command` and may use NODE_RANK
    and HEAD_NODE, which the task sets.
    Format and variables: https://docs.skypilot.co/en/latest/reference/yaml-spec.html, read 2026-11-20.
    """
    row = plan.estimate
    if row.gpu not in SKYPILOT_NAMES:
        return None
    num_gpus = min(row.num_gpus, row.gpus_per_node)
    lines = [
        f"# {row.model} on {row.num_gpus} x {row.gpu}: {plan.num_tokens:.3g} tokens, "
        f"{plan.hours:,.1f} h expected ({plan.evidence}). Records and checkpoints stay on the first node.",
        f"#   sky launch {SKYPILOT_FILE} --env SLM_TOOLKIT=git+https://..."
        + (" --env DATASET=a-hub-id" if plan.config.dataset == SYNTHETIC else ""),
        f"name: {re.sub('[^a-z0-9]+', '-', plan.strategy.name.lower()).strip('-')}-{row.num_gpus}-gpus",
        f"workdir: {json.dumps(str(folder.resolve()))}  # each node works in a copy of it",
        f"num_nodes: {row.num_gpus // num_gpus}",
        "resources:",
        f"  accelerators: {{{SKYPILOT_NAMES[row.gpu]}: {num_gpus}}}  # per node",
        "envs:",
        "  SLM_TOOLKIT:  # required: the source for pip install, git+https://... or the address of a wheel",
    ]
    if plan.config.dataset == SYNTHETIC:
        lines.append("  DATASET:  # required: a hub id")
    names = {plan.config.model, plan.config.dataset} - {SYNTHETIC}
    files = sorted(str(Path(name).resolve()) for name in names if Path(name).exists())
    if files:
        lines.append("file_mounts:  # to the same path on each node")
        lines += [f"  {json.dumps(path)}: {json.dumps(path)}" for path in files]
    run = [
        "set -e",
        'export NODE_RANK=$SKYPILOT_NODE_RANK HEAD_NODE=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        'echo "node $NODE_RANK of $SKYPILOT_NUM_NODES, the first node is $HEAD_NODE"',
        command,
    ]
    lines += ["setup: |", '  pip install "$SLM_TOOLKIT"', "run: |", textwrap.indent("\n".join(run), "  ")]
    return "\n".join(lines) + "\n"


SCRIPT = "launch.sh"


def launch_command(plan: Plan, yaml_path: str, *, num_steps: int | None = None) -> str:
    """Return the command that launches the plan; each of several nodes runs it with its own NODE_RANK.

    If the plan has no dataset, the command needs the environment variable DATASET.
    """
    row = plan.estimate
    num_nodes = row.num_gpus // row.gpus_per_node
    words = ["accelerate", "launch", *config_options(yaml_path), "--num_processes", str(row.num_gpus)]
    several = ""
    if num_nodes > 1:
        words[0] = "slm"  # `slm launch` waits for all nodes, and sets DeepSpeed's launcher for several nodes
        several = " --machine_rank $NODE_RANK --main_process_ip $HEAD_NODE --main_process_port 29500"
    if num_nodes > 1 or plan.strategy.num_machines > 1:
        words += ["--num_machines", str(num_nodes)]
    words += group_options(plan.strategy)
    flags = _flags(plan, measures_only=num_steps is not None)
    script = ["-m", "slm_toolkit.train", *flags, "--max_steps", str(num_steps or plan.num_steps)]
    dataset = "" if num_steps or plan.config.dataset != SYNTHETIC else f" --dataset {_DATASET}"
    return f"{shlex.join(words)}{several} {shlex.join(script)}{dataset}"


def check_command(plan: Plan) -> str:
    """Return the command that measures the plan for a few steps, on generated tokens."""
    row = plan.estimate
    if row.num_gpus > row.gpus_per_node:  # `slm compare` runs on one machine
        return launch_command(plan, yaml_name(plan), num_steps=_STEPS_OF_A_CHECK)
    processes = ["--num_processes", str(row.num_gpus)]
    return shlex.join(
        ["slm", "compare", "--strategy", _strategy_word(plan), *processes, *_flags(plan, measures_only=True)]
    )


def yaml_name(plan: Plan) -> str:
    """Return the path of the plan's existing YAML, shipped or the user's own."""
    path = Path(plan.strategy.path).resolve()
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def write_launch(plan: Plan, folder: Path) -> list[Path]:
    """Write the YAML, its JSON, a launch script and, if SkyPilot has the GPU, a SkyPilot task.

    Return their paths. Raise ValueError for a model that can only be estimated, and if a file exists or can't
    be written.
    """
    check_trainable(plan.spec, plan.config)
    check_folder(folder)
    row = plan.estimate
    num_nodes = row.num_gpus // row.gpus_per_node
    yaml_path = write_resolved(on_nodes(plan.strategy, num_nodes), folder, row.num_gpus)
    # name the JSON without its folder, so that the folder can be copied anywhere
    write_new(yaml_path, yaml_path.read_text().replace(f"{yaml_path.parent}/", ""))
    lines = [
        "#!/bin/sh",
        f"# {row.model} on {row.num_gpus} x {row.gpu}: {plan.num_tokens:.3g} tokens, "
        f"{plan.hours:,.1f} h expected ({plan.evidence})",
    ]
    if num_nodes > 1:
        lines.append("# run it on each node, with NODE_RANK from 0 and HEAD_NODE, the address of node 0")
    lines += ["set -e", launch_command(plan, str(yaml_path))]
    script = folder / SCRIPT
    write_new(script, "\n".join(lines) + "\n")
    script.chmod(0o755)
    task = skypilot_task(plan, launch_command(plan, yaml_path.name), folder)
    if task is None:
        return [yaml_path, script]
    write_new(folder / SKYPILOT_FILE, task)
    return [yaml_path, script, folder / SKYPILOT_FILE]


def check_folder(folder: Path) -> None:
    """Raise ValueError if `write_launch` can't write to the folder, or would overwrite a script."""
    if (folder / SCRIPT).exists():
        raise ValueError(f"{folder / SCRIPT} exists\nhint: give --write an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"can't write to {folder}: {error.strerror}\nhint: give --write a folder") from None


_DATASET = '"${DATASET:?a hub id, file or folder}"'
_STEPS_OF_A_CHECK = 33


def _flags(plan: Plan, *, measures_only: bool) -> list[str]:
    """Return the plan's flags, without the defaults of a GPU and with absolute paths of the user's files.

    A published preset gets the hub id of its weights, or of its tokenizer, unless the run only measures.
    """
    config, defaults = plan.config, RunConfig(numerics=plan.config.numerics).with_defaults(has_gpu=True)
    filled_in = ("max_grad_norm", "save_final_model")
    changes = {name: None for name in filled_in if getattr(config, name) == getattr(defaults, name)}
    for name in ("model", "dataset"):
        if Path(path := getattr(config, name)).exists() and path != SYNTHETIC:
            changes[name] = str(Path(path).resolve())
    if plan.spec.hub_id is not None and not measures_only:
        changes |= {"model": plan.starts_from} if plan.starts_from else {"tokenizer_name": plan.spec.hub_id}
    return flags_of(dataclasses.replace(config, **changes))


def _strategy_word(plan: Plan) -> str:
    """Return the value for `--strategy`: the name of a shipped strategy, or else its file."""
    path = Path(plan.strategy.path).resolve()
    is_shipped = path.parent == config_dir("accel_configs").resolve()
    return plan.strategy.name if is_shipped else yaml_name(plan)
