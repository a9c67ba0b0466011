"""The command that launches a plan."""

import dataclasses
import shlex
from pathlib import Path

from slm_toolkit.config.flags import flags_of
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.names import needs_tokenizer
from slm_toolkit.recommend.plans import Plan
from slm_toolkit.strategy.strategy import contradictions, is_shipped

_HOLDS = {
    "model": "a hub id, folder or config.json",
    "dataset": "a hub id, file or folder",
    "tokenizer_name": "a hub id or folder, or byte",
}
_VARIABLES = {"model": "MODEL", "dataset": "DATASET", "tokenizer_name": "TOKENIZER"}
_HOURS_BETWEEN_CHECKPOINTS = 0.5


def launch_command(plan: Plan) -> str:
    """Return the command that launches the plan on this machine.

    Each of several nodes runs it with its own NODE_RANK, and with HEAD_NODE, the address of node 0. What the
    user must still choose, such as the dataset, is an environment variable.
    """
    row, path = plan.estimate, Path(plan.strategy.path).resolve()
    strategy = plan.strategy.name if is_shipped(path) else str(path)
    num_nodes = row.num_gpus // row.gpus_per_node
    nodes = f" --num_machines {num_nodes}" if num_nodes > 1 or plan.strategy.num_machines > 1 else ""
    if num_nodes > 1:
        nodes += " --machine_rank $NODE_RANK --main_process_ip $HEAD_NODE"
    ranks = f"--num_processes {row.num_gpus}{nodes}"
    return f"slm train --strategy {shlex.quote(strategy)} {ranks} {_flags(plan)}"


def _flags(plan: Plan) -> str:
    """Return the plan's flags for a shell, without the defaults of a GPU.

    A run that trains writes a checkpoint and evaluates about every half hour, at least once.
    """
    config, spec, standard = plan.config, plan.spec, RunConfig()
    values = {
        "model": plan.starts_from or spec.path or config.model,
        "dataset": None if config.dataset == SYNTHETIC else config.dataset,
        "tokenizer_name": config.tokenizer_name or spec.hub_id,
    }
    if config.dataset_format == "tokens" or not needs_tokenizer(spec):
        values = {name: value for name, value in values.items() if value or name == "dataset"}
    unknown = [name for name, value in values.items() if value is None]
    defaults = RunConfig(numerics=config.numerics).with_defaults(has_gpu=True)
    filled_in = ("max_grad_norm", "save_final_model")
    changes = {name: None for name in filled_in if getattr(config, name) == getattr(defaults, name)}
    changes |= values | {name: getattr(standard, name) for name in unknown}
    per_checkpoint = round(plan.num_steps / plan.hours * _HOURS_BETWEEN_CHECKPOINTS)
    every = min(max(1, per_checkpoint), plan.num_steps)
    changes |= {"max_steps": plan.num_steps, "eval_steps": every}
    if not contradictions(plan.strategy, dataclasses.replace(config, save_steps=every)):
        changes["save_steps"] = every
    words = [shlex.join(flags_of(dataclasses.replace(config, **changes)))]
    words += [f'--{name} "${{{_VARIABLES[name]}:?{_HOLDS[name]}}}"' for name in unknown]
    return " ".join(words)
