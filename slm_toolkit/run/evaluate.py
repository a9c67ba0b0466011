"""Evaluates a run: the loss on held-out sets during training, and lm-eval on the saved model."""

import json
import math
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from slm_toolkit.base.errors import pip_install
from slm_toolkit.base.user_files import is_file, read_text
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.launch.processes import safe_environment
from slm_toolkit.record.run_record import finite
from slm_toolkit.run.data.batches import model_inputs, num_labels
from slm_toolkit.run.model.adapters import MERGED
from slm_toolkit.run.model.loss_recorder import RecordedLoss
from slm_toolkit.run.model.sequence_parallel import SequenceGroup
from slm_toolkit.run.observe.progress import NoProgress, Tracker, TrainingProgress


class Evaluations:
    """All evaluations of a run: after every --eval_steps steps and after the last one."""

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        model: torch.nn.Module,
        loss_recorder: RecordedLoss,
        loaders: dict[str, DataLoader],
        progress: TrainingProgress | NoProgress,
        tracker: Tracker,
        num_steps: int,
        *,
        sequence_group: SequenceGroup,
    ) -> None:
        """`loaders`: one per held-out set, empty without --eval_steps. `num_steps`: the run's last step."""
        self._config, self._accelerator, self._num_steps = config, accelerator, num_steps
        self._model, self._loss_recorder, self._loaders = model, loss_recorder, loaders
        self._sequence_group = sequence_group
        self._progress, self._tracker = progress, tracker
        self._losses: list[dict[str, float]] = []
        "one entry per evaluation: its step, and the mean loss over the tokens of all sets"
        self._losses_by_set: dict[str, list[float | None]] = {name: [] for name in loaders}

    @property
    def has_sets(self) -> bool:
        return bool(self._loaders)

    def due(self, step: int) -> bool:
        """Return True if an evaluation is due after `step` steps."""
        return self.has_sets and (step % self._config.eval_steps == 0 or step == self._num_steps)

    def run(self, step: int) -> None:
        """Evaluate after `step` steps and report the losses. Every rank must call it."""
        by_set = self._evaluate()
        self._losses.append({"step": step, "loss": finite(mean_loss(by_set))})
        for name, (loss, _) in by_set.items():
            self._losses_by_set[name].append(finite(loss))
        self._progress.say(f"step {step}: eval loss {described(by_set)}")
        losses = {name: loss for name, (loss, _) in by_set.items()}
        self._tracker.log_evaluation(step, mean_loss(by_set), losses)

    def observed(self) -> dict[str, Any]:
        """Return fields of the record."""
        return {"eval_losses": self._losses, "eval_losses_by_set": self._losses_by_set}

    @torch.no_grad()
    def _evaluate(self) -> dict[str, tuple[float, int]]:
        """Return each set's mean loss over its tokens that have a label, and the number of those tokens.

        Every rank uses its first `eval_batches` batches.
        """
        config, accelerator, loss_recorder = self._config, self._accelerator, self._loss_recorder
        self._model.eval()
        loss_recorder.divide_by(torch.ones((), device=accelerator.device))  # makes the loss a sum
        by_set = {}
        for name, loader in self._loaders.items():
            total = torch.zeros(2, device=accelerator.device, dtype=torch.float64)
            batches = map(self._sequence_group.stretch_of, loader)
            for _, batch in zip(range(config.eval_batches), batches, strict=False):
                if config.records_graphs:
                    torch.compiler.cudagraph_mark_step_begin()
                self._model(**model_inputs(batch, config))
                total += torch.stack([loss_recorder.last, num_labels(batch)])
            loss, count = accelerator.reduce(total, reduction="sum").tolist()
            by_set[name] = (loss / count if count else math.nan, int(count))
        loss_recorder.divide_by(None)
        self._model.train()
        return by_set


def mean_loss(by_set: dict[str, tuple[float, int]]) -> float:
    """Return the mean loss over the tokens of all sets; NaN if no token has a label."""
    with_labels = [(loss, count) for loss, count in by_set.values() if count]
    num_tokens = sum(count for _, count in with_labels)
    return sum(loss * count for loss, count in with_labels) / num_tokens if num_tokens else math.nan


def described(by_set: dict[str, tuple[float, int]]) -> str:
    """Return a line with loss and perplexity over all sets; if there are several, then of each set."""
    parts = [_loss_and_perplexity(mean_loss(by_set))]
    if len(by_set) > 1:
        sets = (f"{name} {_loss_and_perplexity(loss)}" for name, (loss, _) in by_set.items())
        parts.append(", ".join(sets))
    return "; ".join(parts)


def _loss_and_perplexity(loss: float) -> str:
    perplexity = math.exp(loss) if loss < 20 else math.inf
    return f"{loss:.4f} (perplexity {perplexity:.4g})"


# EleutherAI's lm-eval on the saved model, in its own process after training.

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
"prefixes of environment variables that would make lm-eval join the launch as one more rank"


def check_lm_eval(config: RunConfig) -> None:
    """Raise ValueError if this run can't evaluate `--lm_eval_tasks`."""
    if config.lm_eval_tasks is None:
        return
    if find_spec("lm_eval") is None:
        raise ValueError(f"--lm_eval_tasks needs lm-eval\nhint: {pip_install('lm_eval')}")
    missing = [task for task in _split(config.lm_eval_tasks) if _is_file(task) and not is_file(Path(task))]
    if missing:
        raise ValueError(
            f"--lm_eval_tasks: no such file: {missing[0]}\nhint: give a task's YAML file, or a task's name"
        )
    if config.peft != "none" and not config.merge_adapter:
        raise ValueError(
            f"--lm_eval_tasks with --peft {config.peft}: lm-eval needs a whole model, not an adapter alone\n"
            "hint: add --merge_adapter"
        )


def lm_eval(tasks: str, model_dir: Path, folder: Path) -> dict[str, Any]:
    """Run lm-eval and return its results by task. lm-eval's own files stay in `folder`.

    Raises ValueError with the last line of lm-eval's output if it fails.
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
        raise ValueError(
            f"lm-eval ended with exit code {done.returncode}: {last}\n"
            f"hint: its whole output is in {folder}/lm_eval.log"
        )
    return json.loads(written[-1].read_text())["results"]


def lm_eval_command(tasks: str, model_dir: Path, folder: Path) -> list[str]:
    """Return the command line of lm-eval. lm-eval takes names of tasks: a YAML's name stands in the file."""
    folder.mkdir(parents=True, exist_ok=True)
    named = _split(tasks)
    merged = model_dir / MERGED
    include = sorted({str(Path(task).resolve().parent) for task in named if _is_file(task)})
    if len(include) > 1:
        raise ValueError(
            f"--lm_eval_tasks {tasks}: the YAML files are in several folders\nhint: put them into one folder"
        )
    names = [_task_name(Path(task)) if _is_file(task) else task for task in named]
    return [
        *(sys.executable, "-m", "lm_eval", "--model", "hf"),
        *("--model_args", f"pretrained={merged if merged.is_dir() else model_dir}"),
        *("--tasks", ",".join(names), "--batch_size", "8", "--output_path", str(folder)),
        *("--device", "cuda:0" if torch.cuda.is_available() else "cpu"),
        *(["--include_path", include[0]] if include else []),
    ]


def lm_eval_described(results: dict[str, Any]) -> str:
    """Return one line per task: its metrics, with their standard errors if lm-eval reports them."""
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
    """Return the `task:` of a YAML. lm-eval's YAMLs have tags that a plain YAML loader can't read."""
    lines = (
        line.partition(":")
        for line in read_text(path, hint="give a task's YAML file").splitlines()
        if line.startswith("task:")
    )
    return next((value.strip() for _, _, value in lines), path.stem)
