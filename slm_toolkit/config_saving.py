"""SavingConfig: the part of a RunConfig that says what a run keeps, where, and when it gives up."""

from dataclasses import dataclass

from slm_toolkit.config_field import flag
from slm_toolkit.extras import pip_install


@dataclass(frozen=True)
class SavingConfig:
    """What is evaluated, saved, gone on from and reported."""

    eval_steps: int | None = flag(None, "evaluate every so many steps and at the end", group="saving")
    eval_batches: int = flag(20, "batches per process of one evaluation", group="saving")
    save_steps: int | None = flag(None, "write a checkpoint every so many steps", group="saving")
    save_total_limit: int = flag(2, "checkpoints kept", group="saving", identity=False)
    save_final_model: bool | None = flag(
        None,
        "write a Hugging Face model folder at the end (default: with a dataset yes, with synthetic no;"
        " slm compare: no)",
        group="saving",
        identity=False,
    )
    async_save: bool = flag(
        False,
        "write checkpoints while training goes on, from a copy in the host's RAM",
        group="saving",
        identity=False,
    )
    resume_from_checkpoint: str | None = flag(
        None,
        "a checkpoint's folder; a run's, for its newest; latest: the newest of this run; auto: that, or from "
        "the start where there is none. The strategy and the number of processes may be others",
        group="saving",
        identity=False,
    )
    overwrite_output_dir: bool = flag(
        False,
        "start from the beginning in a folder that holds an earlier run, whose checkpoints, model and record "
        "are deleted before the first step",
        group="saving",
        identity=False,
    )
    lm_eval_tasks: str | None = flag(
        None,
        "tasks of EleutherAI's lm-eval for the saved model, by commas: names, or a task's YAML by path; with "
        f"`{pip_install('lm_eval')}`",
        group="saving",
        identity=False,
    )
    ddp_timeout: float = flag(
        600.0,
        "seconds that a step, an evaluation or a checkpoint may take, with its waiting for other ranks; then "
        "the rank that hangs is named, and the run ends. With --torch_compile the first step has an hour. "
        "Building model, data and engine is not counted",
        group="saving",
        identity=False,
    )
    report_to: str = flag(
        "none", "an accelerate tracker: tensorboard, trackio, wandb, ...", group="saving", identity=False
    )
    output_dir: str = flag("runs", "each run gets a folder here", group="saving", identity=False)
    run_name: str | None = flag(
        None,
        "the run's folder (default: model, strategy and a hash of all asked)",
        group="saving",
        identity=False,
    )
