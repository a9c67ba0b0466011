"""A plan as a SkyPilot task, which rents the GPUs where they are cheapest and launches on every node."""

import json
import re
import textwrap
from pathlib import Path

from slm_toolkit.config import SYNTHETIC
from slm_toolkit.predict.plans import Plan

SKYPILOT_FILE = "skypilot.yaml"
# `sky gpus list -a`, skypilot-org/skypilot docs/source/compute/show-gpus-all.txt @1c9d60b, read 2026-11-20;
# it has no names for the PCIe cards, none yet for B300
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
    """The YAML of a task that runs `command` in a copy of `folder` on each node; None for a nameless GPU.

    `command` is `launch_files.launch_command`'s, in the words of which a node has NODE_RANK and HEAD_NODE.
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
        f"workdir: {json.dumps(str(folder.resolve()))}  # a copy is each node's working folder",
        f"num_nodes: {row.num_gpus // num_gpus}",
        "resources:",
        f"  accelerators: {{{SKYPILOT_NAMES[row.gpu]}: {num_gpus}}}  # of each node",
        "envs:",
        "  SLM_TOOLKIT:  # what pip installs: git+https://..., or a wheel's address; sky asks for it",
    ]
    if plan.config.dataset == SYNTHETIC:
        lines.append("  DATASET:  # a hub id; sky asks for it")
    named = {plan.config.model, plan.config.dataset} - {SYNTHETIC}
    files = sorted(str(Path(path).resolve()) for path in named if Path(path).exists())
    if files:
        lines.append("file_mounts:  # to the same place on each node")
        lines += [f"  {json.dumps(path)}: {json.dumps(path)}" for path in files]
    run = [
        "set -e",
        'export NODE_RANK=$SKYPILOT_NODE_RANK HEAD_NODE=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)',
        'echo "node $NODE_RANK of $SKYPILOT_NUM_NODES, the first is $HEAD_NODE"',
        command,
    ]
    lines += ["setup: |", '  pip install "$SLM_TOOLKIT"', "run: |", textwrap.indent("\n".join(run), "  ")]
    return "\n".join(lines) + "\n"
