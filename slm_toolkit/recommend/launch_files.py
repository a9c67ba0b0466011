"""Write a plan's commands, its YAML and launch script."""

import dataclasses
import shlex
from pathlib import Path

from slm_toolkit.base.safe_files import write_new
from slm_toolkit.config.flags import flags_of
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.names import needs_tokenizer
from slm_toolkit.recommend.plans import Plan
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.strategy import is_shipped, on_nodes, write_resolved

SCRIPT = "launch.sh"


def launch_command(plan: Plan) -> str:
    """Return the command that launches the plan on this machine.

    Each of several nodes runs it with its own NODE_RANK. What the user must still choose, such as the
    dataset, is an environment variable.
    """
    path = Path(plan.strategy.path).resolve()
    strategy = plan.strategy.name if is_shipped(path) else str(path)
    return _train(plan, shlex.quote(strategy))


def write_launch(plan: Plan, folder: Path) -> list[Path]:
    """Write the YAML, its JSON and a launch script.

    What the user must still choose is a variable of the script. Return the paths. Raise ValueError if a file
    exists or can't be written.
    """
    check_folder(folder)
    row = plan.estimate
    num_nodes = row.num_gpus // row.gpus_per_node
    yaml_path = write_resolved(on_nodes(plan.strategy, num_nodes), folder, row.num_gpus)
    # name the JSON without its folder, so that the folder can be copied anywhere
    write_new(yaml_path, yaml_path.read_text().replace(f"{yaml_path.parent}/", ""))
    lines = [
        "#!/bin/sh",
        f"# {row.model} on {row.num_gpus} x {row.gpu}: {plan.num_tokens:.3g} tokens, "
        f"{plan.hours:,.1f} h expected",
        *(f"# set {variable}: {holds}" for variable, holds in _missing(plan).values()),
    ]
    if num_nodes > 1:
        lines.append("# run it on each node, with NODE_RANK from 0 and HEAD_NODE, the address of node 0")
    own_yaml = f'"$(dirname "$0")"/{shlex.quote(yaml_path.name)}'
    lines += ["set -e", _train(plan, own_yaml)]
    script = folder / SCRIPT
    write_new(script, "\n".join(lines) + "\n")
    script.chmod(0o755)
    return [yaml_path, script]


def check_folder(folder: Path) -> None:
    """Raise ValueError if `write_launch` can't write to the folder, or would overwrite a script."""
    if (folder / SCRIPT).exists():
        raise ValueError(f"{folder / SCRIPT} exists\nhint: give --write an empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"can't write to {folder}: {error.strerror}\nhint: give --write a folder") from None


_HOURS_BETWEEN_CHECKPOINTS = 0.5


def _train(plan: Plan, strategy: str) -> str:
    """Return a `slm train` of the plan. `strategy` is a word for a shell."""
    row = plan.estimate
    num_nodes = row.num_gpus // row.gpus_per_node
    nodes = f" --num_machines {num_nodes}" if num_nodes > 1 or plan.strategy.num_machines > 1 else ""
    if num_nodes > 1:
        nodes += " --machine_rank $NODE_RANK --main_process_ip $HEAD_NODE"
    return f"slm train --strategy {strategy} --num_processes {row.num_gpus}{nodes} {_flags(plan)}"


def _missing(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return the variable of each flag that the user must still choose, and what it holds."""
    config, found = plan.config, {}
    if config.dataset == SYNTHETIC:
        found["dataset"] = "DATASET", "a hub id, file or folder"
    has_tokens = config.tokenizer_name or plan.spec.hub_id or config.dataset_format == "tokens"
    if not has_tokens and needs_tokenizer(plan.spec):
        found["tokenizer_name"] = "TOKENIZER", "a hub id or folder, or byte"
    return found


def _flags(plan: Plan) -> str:
    """Return the plan's flags for a shell, without the defaults of a GPU.

    A run that trains writes a checkpoint and evaluates about every half hour, at least once.
    """
    defaults = RunConfig(numerics=plan.config.numerics).with_defaults(has_gpu=True)
    filled_in = ("max_grad_norm", "save_final_model")
    changes = {name: None for name in filled_in if getattr(plan.config, name) == getattr(defaults, name)}
    changes |= {
        "model": plan.starts_from or plan.spec.path or plan.config.model,
        "tokenizer_name": plan.config.tokenizer_name or plan.spec.hub_id,
    }
    per_checkpoint = round(plan.num_steps / plan.hours * _HOURS_BETWEEN_CHECKPOINTS)
    every = min(max(1, per_checkpoint), plan.num_steps)
    changes |= {"max_steps": plan.num_steps, "eval_steps": every}
    if not contradictions(plan.strategy, dataclasses.replace(plan.config, save_steps=every)):
        changes["save_steps"] = every
    words = [shlex.join(flags_of(dataclasses.replace(plan.config, **changes)))]
    words += [f'--{name} "${{{variable}:?{holds}}}"' for name, (variable, holds) in _missing(plan).items()]
    return " ".join(words)
