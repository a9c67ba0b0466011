"""The other trainers that `slm compare --ours_against` knows, and the runs of theirs that match ours."""

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.run_record import (
    everything_asked,
    identity_of,
    installed_versions,
    run_name_of,
)
from slm_toolkit.strategy.strategy import Strategy, find_strategy

PROGRAM = "slm_toolkit.rivals.launch"
"module that does such a run: `python -m`"
WORK_FILE = "work.json"


@dataclass(frozen=True)
class Rival:
    """A trainer that a user would pick instead of ours."""

    key: str
    "its name for --ours_against, and for training.py"
    name: str
    "its name in tables"
    packages: tuple[str, ...]
    "packages that it needs, as pip calls them; their versions are recorded"
    install: str
    "command that installs them"

    def name_under(self, strategy: Strategy) -> str:
        """Return the name of its rows under a strategy."""
        return f"{self.name}, {strategy.name}"

    @property
    def missing(self) -> str | None:
        """Return a line that says how to install it; None if it is installed."""
        for package in self.packages:
            try:
                version(package)
            except PackageNotFoundError:
                return f"{self.name} needs {package}, which is not installed: {self.install}"
        return None


RIVALS = {
    rival.key: rival
    for rival in (
        Rival("trainer", "Hugging Face Trainer", ("transformers", "accelerate"), "pip install transformers"),
        # without --no-deps, LitGPT 0.5.13 asks for huggingface-hub < 1.4, which transformers 5 can't use
        Rival(
            "litgpt",
            "LitGPT",
            ("litgpt", "lightning"),
            "pip install --no-deps litgpt lightning lightning-utilities torchmetrics pytorch-lightning "
            "jsonargparse",
        ),
    )
}
_REFUSED = (
    *("peft", "fp8", "tf32", "reduce_dtype", "grad_dtype", "keep_grads", "scale_lr"),
    "sp_size",
    *("parity_task", "rehearse", "trace_memory", "eval_dataset", "eval_steps", "num_train_epochs"),
    *("max_tokens", "until_loss", "stage_ends"),
    *("save_steps", "on_bad_step", "max_loss", "find_batch_size", "streaming", "lm_eval_tasks"),
)
"flags with which our run does other work than another trainer's would: an error, unless at their default"
_OURS_ALONE = (
    *("loss_kernel", "loss_chunk_tokens", "norm_kernel", "pad_widths"),
    *("torch_compile_mode", "fsdp_prefetch", "dataloader_num_workers", "profile", "fp32_steps"),
    *("report_to", "save_final_model", "triton_loss"),
)
"flags of ours that change speed or output, but not the work: another trainer's row has their defaults"


def problems_of(config: RunConfig) -> list[str]:
    """Return a sentence for each flag of our run that another trainer's run can't follow."""
    problems = [
        f"--ours_against with --{name}, which the other trainers' runs do not follow"
        for name in _REFUSED
        if getattr(config, name) != getattr(RunConfig, name)
    ]
    if config.numerics == "pure_bf16":
        problems.append("--ours_against with --numerics pure_bf16: the others train fp32 weights")
    if config.numerics == "fp16":
        problems.append("--ours_against with --numerics fp16: the others compute in bf16 or fp32")
    if config.optimizer_rule != "adamw":
        problems.append(f"--ours_against with --optim {config.optim}: the others train with AdamW")
    if config.attn_implementation.startswith("sdpa_"):
        name = config.attn_implementation
        problems.append(f"--ours_against with --attn_implementation {name}: the others know sdpa as a whole")
    if config.gradient_checkpointing not in ("none", "full"):
        problems.append(
            f"--ours_against with --gradient_checkpointing {config.gradient_checkpointing}: the others know "
            "none and full"
        )
    return problems


def config_of_others(config: RunConfig) -> RunConfig:
    """Return the flags of another trainer's run that does the work of `config`, and no more.

    The others compute in fp32, or with fp32 weights under bf16 autocast, which is our --numerics stock. They
    clip as our run does.
    """
    max_grad_norm = config.max_grad_norm
    if max_grad_norm is None:
        max_grad_norm = 0.0 if config.numerics == "stock" else 1.0
    return dataclasses.replace(
        config,
        numerics="fp32" if config.numerics == "fp32" else "stock",
        max_grad_norm=max_grad_norm,
        run_name=None,
        **{name: getattr(RunConfig, name) for name in _OURS_ALONE},
    )


def matching_runs(runs: list[PlannedRun], keys: Sequence[str]) -> list[PlannedRun]:
    """Return the runs of other trainers that do the same work as these runs of ours, without repeats.

    They run under the DDP and single-process strategies among ours; without one of these, under DDP. Raises
    ValueError for unknown trainers and for flags that they can't follow.
    """
    if not keys:
        return []
    if unknown := [key for key in keys if key not in RIVALS]:
        raise ValueError(f"--ours_against {unknown[0]}: no such trainer\nhint: use {' or '.join(RIVALS)}")
    if problems := dict.fromkeys(problem for run in runs for problem in problems_of(run.config)):
        raise ValueError("\n".join(problems) + "\nhint: compare without --ours_against, or without the flag")
    plain = [run for run in runs if not run.strategy.is_deepspeed and not run.strategy.is_fsdp]
    ddp = find_strategy("ddp")
    others = [
        _matching(run, run.strategy if plain else ddp, RIVALS[key]) for key in keys for run in plain or runs
    ]
    return list({run.folder: run for run in others}.values())


def _matching(run: PlannedRun, strategy: Strategy, rival: Rival) -> PlannedRun:
    facts = Facts.of(config_of_others(run.config), strategy, run.num_processes, rival, run.gpu)
    name_of_ours = run_name_of(run.spec, strategy, facts.identity)
    run_name = f"{rival.key}-{name_of_ours}"
    return dataclasses.replace(
        run,
        config=dataclasses.replace(config_of_others(run.config), run_name=run_name),
        strategy=strategy,
        asked=facts.asked,
        versions=facts.versions,
        identity=facts.identity,
        run_name=run_name,
        taken_out=None,
        rival_name=rival.name_under(strategy),
        program=(PROGRAM, "--trainer", rival.key, "--strategy", strategy.name),
    )


@dataclass(frozen=True)
class Facts:
    """What a record says about a run before it begins; `slm compare` and the run's process compute it."""

    asked: dict[str, Any]
    versions: dict[str, str]
    identity: str

    @classmethod
    def of(
        cls,
        config: RunConfig,
        strategy: Strategy,
        num_processes: int,
        rival: Rival,
        gpu: str | None,
    ) -> "Facts":
        asked = {**everything_asked(config, strategy, num_processes), "trainer": rival.key}
        versions = installed_versions()
        for package in rival.packages:
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        return cls(asked, versions, identity_of(asked, versions, gpu))
