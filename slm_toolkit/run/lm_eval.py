"""Runs EleutherAI's lm-eval on the model that a run saved, in its own process after training."""

import json
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from slm_toolkit.base.extras import pip_install
from slm_toolkit.base.user_files import is_file, read_text
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.launch.python_environment import safe_environment
from slm_toolkit.run.model.adapters import MERGED

_LAUNCH_PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "ACCELERATE_",
    "FSDP_",
    "TORCHELASTIC_",
)
"prefixes of variables that would make lm-eval one more rank of the launch"


def check_lm_eval(config: RunConfig) -> None:
    """Raises ValueError if this run can't do `--lm_eval_tasks`."""
    if config.lm_eval_tasks is None:
        return
    if find_spec("lm_eval") is None:
        raise ValueError(f"--lm_eval_tasks needs lm-eval\nhint: {pip_install('lm_eval')}")
    missing = [task for task in _split(config.lm_eval_tasks) if _is_file(task) and not is_file(Path(task))]
    if missing:
        raise ValueError(f"--lm_eval_tasks: no such file: {missing[0]}\nhint: a task's YAML, or its name")
    if config.peft != "none" and not config.merge_adapter:
        raise ValueError(
            f"--lm_eval_tasks with --peft {config.peft}: an adapter alone is no model\nhint: --merge_adapter"
        )


def lm_eval(tasks: str, model_dir: Path, folder: Path) -> dict[str, Any]:
    """The results by task, as lm-eval gives them; its own files stay in `folder`.

    Raises ValueError with lm-eval's last line if it fails.
    """
    command = lm_eval_command(tasks, model_dir, folder)
    print(f"lm-eval: {shlex.join(command)}", file=sys.stderr)
    env = safe_environment()
    env = {name: value for name, value in env.items() if not name.startswith(_LAUNCH_PREFIXES)}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    written = sorted(folder.rglob("results_*.json"), key=lambda path: path.stat().st_mtime_ns)
    if done.returncode or not written:
        (folder / "lm_eval.log").write_text(done.stdout)
        last = next((line for line in reversed(done.stdout.splitlines()) if line.strip()), "no output")
        raise ValueError(f"lm-eval ended with {done.returncode}: {last}\nhint: {folder}/lm_eval.log has all")
    return json.loads(written[-1].read_text())["results"]


def lm_eval_command(tasks: str, model_dir: Path, folder: Path) -> list[str]:
    """The command line of lm-eval, which takes a task by name: for a path, by the name in that YAML."""
    folder.mkdir(parents=True, exist_ok=True)
    named = _split(tasks)
    merged = model_dir / MERGED
    include = sorted({str(Path(task).resolve().parent) for task in named if _is_file(task)})
    if len(include) > 1:
        raise ValueError(f"--lm_eval_tasks {tasks}: YAMLs of several folders\nhint: put them into one")
    names = [_task_name(Path(task)) if _is_file(task) else task for task in named]
    return [
        *(sys.executable, "-m", "lm_eval", "--model", "hf"),
        *("--model_args", f"pretrained={merged if merged.is_dir() else model_dir}"),
        *("--tasks", ",".join(names), "--batch_size", "8", "--output_path", str(folder)),
        *("--device", "cuda:0" if torch.cuda.is_available() else "cpu"),
        *(["--include_path", include[0]] if include else []),
    ]


def lm_eval_described(results: dict[str, Any]) -> str:
    """One line for each task: its metrics, with standard errors where lm-eval has them."""
    lines = []
    for task, metrics in results.items():
        parts = []
        for name, value in metrics.items():
            metric, _, kind = name.partition(",")
            if not isinstance(value, float) or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{kind}")
            parts.append(f"{metric} {value:.4g}" + (f" ± {error:.2g}" if isinstance(error, float) else ""))
        lines.append(f"lm-eval {task}: {', '.join(parts)}")
    return "\n".join(lines)


def _split(tasks: str) -> list[str]:
    return [task.strip() for task in tasks.split(",") if task.strip()]


def _is_file(task: str) -> bool:
    return task.endswith((".yaml", ".yml"))


def _task_name(path: Path) -> str:
    """The `task:` of a YAML; lm-eval's YAMLs have tags that no plain loader reads."""
    lines = (
        line.partition(":")
        for line in read_text(path, hint="a task's YAML").splitlines()
        if line.startswith("task:")
    )
    return next((value.strip() for _, _, value in lines), path.stem)
