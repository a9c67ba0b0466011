"""Write a plan's commands, its YAML and launch script."""

import dataclasses
import os
import shlex
from pathlib import Path

from slm_toolkit.base.safe_files import write_new
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.dataset_files import FILE_FORMATS
from slm_toolkit.config.flags import flags_of
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.from_config import check_trainable
from slm_toolkit.model.names import needs_tokenizer
from slm_toolkit.recommend.plans import Plan
from slm_toolkit.strategy.strategy import contradictions, is_shipped, on_nodes, write_resolved

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

    What the user must still choose is a variable of the script. Return the paths. Raise ValueError for a
    model that can only be estimated, and if a file exists or can't be written.
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
        f"{plan.hours:,.1f} h expected",
        *(
            f"# set {_VARIABLES[name]}: {_HOLDS[name]}"
            for name, value in _values(plan).items()
            if value is None
        ),
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


_VARIABLES = {"model": "MODEL", "dataset": "DATASET", "tokenizer_name": "TOKENIZER"}
_HOLDS = {
    "model": "a hub id, folder or config.json",
    "dataset": "a hub id, file or folder",
    "tokenizer_name": "a hub id or folder, or byte",
}
_HOURS_BETWEEN_CHECKPOINTS = 0.5


def _train(plan: Plan, strategy: str) -> str:
    """Return a `slm train` of the plan. `strategy` is a word for a shell."""
    row = plan.estimate
    num_nodes = row.num_gpus // row.gpus_per_node
    nodes = f" --num_machines {num_nodes}" if num_nodes > 1 or plan.strategy.num_machines > 1 else ""
    if num_nodes > 1:
        nodes += " --machine_rank $NODE_RANK --main_process_ip $HEAD_NODE"
    return f"slm train --strategy {strategy} --num_processes {row.num_gpus}{nodes} {_flags(plan)}"


def _values(plan: Plan) -> dict[str, str | None]:
    """Return the model, dataset and tokenizer, with absolute paths; None: the user must choose it."""
    config, spec = plan.config, plan.spec
    sources = [
        _absolute(source.path)
        + (f":{source.configuration}" if source.configuration else "")
        + (f"={source.weight:g}" if source.weight else "")
        for source in config.sources
    ]
    values = {
        "model": _absolute(plan.starts_from or spec.path or config.model),
        "dataset": ",".join(sources) if config.dataset != SYNTHETIC else None,
    }
    tokenizer = config.tokenizer_name or spec.hub_id
    if tokenizer or (config.dataset_format != "tokens" and needs_tokenizer(spec)):
        values["tokenizer_name"] = tokenizer and _absolute(tokenizer)
    return values


def _absolute(name: str) -> str:
    """Return the absolute path of a file, folder or glob of files; any other name as it is."""
    is_path = exists(typed_path(name)) or Path(name).suffix in FILE_FORMATS
    return os.path.abspath(typed_path(name)) if is_path else name


def _flags(plan: Plan) -> str:
    """Return the plan's flags for a shell, without the defaults of a GPU.

    A run that trains writes a checkpoint and evaluates about every half hour, at least once.
    """
    defaults = RunConfig(numerics=plan.config.numerics).with_defaults(has_gpu=True)
    filled_in = ("max_grad_norm", "save_final_model")
    changes = {name: None for name in filled_in if getattr(plan.config, name) == getattr(defaults, name)}
    values = _values(plan)
    variables = [name for name, value in values.items() if value is None]
    changes |= {name: getattr(RunConfig(), name) if name in variables else values[name] for name in values}
    per_checkpoint = round(plan.num_steps / plan.hours * _HOURS_BETWEEN_CHECKPOINTS)
    every = min(max(1, per_checkpoint), plan.num_steps)
    changes |= {"max_steps": plan.num_steps, "eval_steps": every}
    if not contradictions(plan.strategy, dataclasses.replace(plan.config, save_steps=every)):
        changes["save_steps"] = every
    words = [shlex.join(flags_of(dataclasses.replace(plan.config, **changes)))]
    words += [f'--{name} "${{{_VARIABLES[name]}:?{_HOLDS[name]}}}"' for name in variables]
    return " ".join(words)
