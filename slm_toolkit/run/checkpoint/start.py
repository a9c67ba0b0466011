"""Where a run starts: the checkpoints that it may resume from, and whether its folder is free for it.

`slm train` checks this before it launches the ranks, and rank 0 checks it again. Imports no torch.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.run_config import FLAGS, RunConfig
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.record.run_record import (
    RECORD_FILE,
    everything_asked,
    identity_of,
    installed_versions,
    run_name_of,
)
from slm_toolkit.record.saved_files import (
    CHECKPOINTS_DIR,
    MODEL_DIR,
    check_replaceable,
    finished,
    model_damage,
    saved_model,
)
from slm_toolkit.run.checkpoint.files import (
    DATA,
    MANIFEST_FILE,
    Checkpoint,
    Manifest,
    damage,
    read_manifest,
)
from slm_toolkit.run.checkpoint.output_dir import check_apart, check_writable, has_ended, hold_run
from slm_toolkit.strategy.strategy import Strategy, sequences_per_step


def check_before_launch(
    config: RunConfig, spec: ModelSpec, strategy: Strategy, num_processes: int, gpu: str | None
) -> None:
    """Raise ValueError if the ranks would refuse to start; exit with 0 if they would have nothing to do."""
    identity = identity_of(everything_asked(config, strategy, num_processes), installed_versions(), gpu)
    run_name = config.run_name or run_name_of(spec, strategy, identity)
    run_dir = Path(os.path.realpath(config.output_dir), run_name)
    is_ended = claim(run_dir, config, spec, identity)
    per_step = sequences_per_step(config, strategy, num_processes)
    config = config.with_steps(per_step)
    description = run_description(config, per_step)
    candidates = find_start(run_dir, config, description, config.resume_from_checkpoint, is_ended=is_ended)
    if candidates and config.steps_asked is not None:
        first = candidates[0]
        if damage(first.path, first.manifest.files) is None:
            check_steps_left(first, config.steps_asked, config.resume_from_checkpoint, run_dir)


def claim(run_dir: Path, config: RunConfig, spec: ModelSpec, identity: str) -> bool:
    """Lock the run's folder, if it exists, and return whether this very run has ended in it.

    Raises ValueError if the run can't use the folder. Exits if --resume_from_checkpoint is auto and the run
    has ended.
    """
    is_rank_0 = os.environ.get("RANK", "0") == "0"
    if is_rank_0 and exists(run_dir):
        check_writable(run_dir)
        hold_run(run_dir)
    is_ended = has_ended(run_dir, identity)
    if config.resume_from_checkpoint == "auto" and is_ended:
        problem = model_damage(run_dir / MODEL_DIR) if config.saves_model else None
        reason = f", but {problem}, so it resumes to save its model again" if problem else ""
        if is_rank_0:
            with suppress(OSError):  # the log may be on a full disk
                print(f"note: this run has ended{reason}: {run_dir / RECORD_FILE}", file=sys.stderr)
        if problem is None:
            raise SystemExit(0)
    if config.saves_model or config.overwrite_output_dir:
        check_replaceable(run_dir / MODEL_DIR)
        if spec.path is not None:
            check_apart(typed_path(spec.path), run_dir / MODEL_DIR)
    return is_ended


def find_start(
    run_dir: Path, config: RunConfig, run: dict[str, Any], resume: str | None, *, is_ended: bool
) -> list[Checkpoint]:
    """Return the checkpoints that the run may resume from, best first; empty if it starts without one.

    Raises ValueError if there is none to resume from, or if the run would replace another run's files.
    """
    candidates = find_checkpoints(resume, run_dir, run, num_steps=config.steps_asked) if resume else []
    if not config.overwrite_output_dir and config.rehearse is None and (not resume or config.save_steps):
        check_place(run_dir, run, starts=resume is None, has_ended=is_ended)
    return candidates


def check_steps_left(checkpoint: Checkpoint, num_steps: int, resume: str | None, run_dir: Path) -> None:
    """Raise ValueError if all steps are done and the run has nothing else to finish."""
    # a run that was killed between its last checkpoint and its record has no step left, but must finish
    may_end = {"auto": True, "latest": not has_ended(run_dir)}.get(resume)
    first_step = checkpoint.manifest.step
    if first_step > num_steps or (first_step == num_steps and not may_end):
        raise ValueError(
            f"{checkpoint.path} has all {num_steps} steps done\n"
            f"hint: to train longer, give --max_steps above {first_step} "
            f"and --resume_from_checkpoint {checkpoint.path}"
        )


def run_description(config: RunConfig, sequences_per_step: int) -> dict[str, Any]:
    """Return the settings that a resuming run must share with the run that wrote the checkpoint.

    Strategy, number of processes and the split of a step's sequences over them may change. A checkpoint also
    describes its data, see `Data.contents`.
    """
    flags = {name: getattr(config, name) for name, flag in FLAGS.items() if not flag.may_change_on_resume}
    evaluates = config.eval_steps is not None  # evaluation holds out some of the data
    return {**flags, "evaluates": evaluates, "sequences_per_step": sequences_per_step}


def is_of(manifest: Manifest, run: dict[str, Any]) -> bool:
    """Return True if a run with this description wrote the checkpoint. Ignores the data and removed flags."""
    return all(manifest.run.get(name) == value for name, value in plain(run).items() if name != DATA)


def launch_description(config: RunConfig, strategy: Strategy, num_processes: int) -> dict[str, Any]:
    """Return the settings that a resuming run may change."""
    return {
        "strategy": strategy.name,
        "num_processes": num_processes,
        "per_device_train_batch_size": config.per_device_train_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
    }


def readable_manifests(folder: Path, *, warn: bool = False) -> dict[Path, Manifest]:
    """Return the readable manifests of a folder, by checkpoint, the newest last.

    `warn`: name unreadable ones on stderr.
    """
    manifests = {}
    for path in finished(folder):
        try:
            manifests[path] = read_manifest(path)
        except ValueError as error:
            if warn and os.environ.get("RANK", "0") == "0":
                reason = str(error).splitlines()[0]
                print(f"warning: skipped the damaged checkpoint {path}: {reason}", file=sys.stderr)
    return dict(sorted(manifests.items(), key=lambda item: item[1].order))


def by_order(folder: Path) -> list[Path]:
    """Return the readable checkpoints of a folder, the newest last."""
    return list(readable_manifests(folder))


def plain(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description as it is after a round trip through JSON."""
    return json.loads(json.dumps(description))


def find_checkpoints(
    resume: str, run_dir: Path, run: dict[str, Any], *, num_steps: int | None
) -> list[Checkpoint]:
    """Return the checkpoints that `resume` (the value of --resume_from_checkpoint) may mean, best first.

    `choose` then takes the first undamaged checkpoint. `latest` and `auto` mean this run's newest; `auto`
    prefers checkpoints before `num_steps`, the run's last step. The folder of a run means that run's newest
    checkpoint, and any other folder means itself.

    Returns [] for `auto` without checkpoints. Otherwise raises ValueError if there is no checkpoint that this
    run can resume from.
    """
    if resume not in ("latest", "auto"):
        folder = Path(os.path.realpath(typed_path(resume)))
        run_dir = folder.parent if folder.name == CHECKPOINTS_DIR else folder
        if not (run_dir / CHECKPOINTS_DIR).is_dir():
            checkpoint = checkpoint_in(folder)
            check_settings(folder, checkpoint.manifest, run)
            return [checkpoint]
    folder = run_dir / CHECKPOINTS_DIR
    manifests = readable_manifests(folder, warn=True)
    of_run = [Checkpoint(path, m) for path, m in reversed(manifests.items()) if is_of(m, run)]
    if of_run:
        # a run killed between its last checkpoint and its record repeats its last steps
        is_late = resume == "auto" and num_steps is not None
        return sorted(of_run, key=lambda c: is_late and c.manifest.step >= num_steps)
    for path, manifest in reversed(manifests.items()):
        check_settings(path, manifest, run)
    if unreadable := finished(folder):
        raise ValueError(
            f"none of the {len(unreadable)} checkpoints under {folder} can be read\n"
            "hint: see the warnings above; use the version that wrote them, or start with another --run_name"
        )
    if resume == "auto":
        return []
    raise ValueError(
        f"no checkpoint under {folder}\n"
        "hint: check --run_name; --save_steps writes checkpoints; auto instead of latest starts without one"
    )


def checkpoint_in(folder: Path) -> Checkpoint:
    """Return the checkpoint in a folder. Raises ValueError if there is none, or one of another program."""
    if not (folder / MANIFEST_FILE).exists():
        raise ValueError(
            f"{folder} contains no checkpoint of slm_toolkit\n"
            "hint: give latest, or a folder like runs/<run>/checkpoints/step_<k>. `accelerate merge-weights` "
            "and DeepSpeed's zero_to_fp32.py turn other programs' checkpoints into weights for --model"
        )
    return Checkpoint(folder, read_manifest(folder))


def check_place(run_dir: Path, run: dict[str, Any], *, starts: bool, has_ended: bool) -> None:
    """Raise ValueError if the run would replace another run's checkpoints.

    If it `starts` from the beginning, also raise it if the run would replace its own checkpoints or the model
    in its folder. has_ended: True if the folder contains the record of this very run, with all steps done.
    """
    replaces = "; --overwrite_output_dir deletes {} and starts from the beginning" if starts else ""
    manifests = readable_manifests(run_dir / CHECKPOINTS_DIR)
    for path, manifest in manifests.items():
        check_settings(path, manifest, run, hint=f", or use another --run_name{replaces.format('it')}")
    if not starts:
        return
    if manifests:
        *_, newest = manifests
        ended = ", which has ended" if has_ended else ""
        resumes = " and a larger --max_steps resume" if has_ended else " resumes"
        raise ValueError(
            f"{run_dir} contains checkpoints of this run{ended}, and a new start would replace them\n"
            f"hint: --resume_from_checkpoint latest{resumes} from {newest.name}{replaces.format('them')}"
        )
    kept = [f"{path} can't be read" for path in reversed(finished(run_dir / CHECKPOINTS_DIR))]
    kept += [f"{model} is the model of an earlier run"] if (model := saved_model(run_dir)) else []
    if kept:
        raise ValueError(
            f"{kept[0]}, and a new start would replace it\n"
            f"hint: use another --run_name to keep it{replaces.format('it')}"
        )


def check_settings(checkpoint: Path, manifest: Manifest, run: dict[str, Any], *, hint: str = "") -> None:
    """Raise ValueError if a run with these settings is not the run that wrote the checkpoint."""
    differences = "; ".join(
        f"{name} {manifest.run.get(name)!r} in the checkpoint, {value!r} now"
        for name, value in plain(run).items()
        if manifest.run.get(name) != value
    )
    if differences:
        raise ValueError(
            f"{checkpoint} belongs to another run: {differences}\n"
            "hint: give the flags that it was written with; strategy, number of processes, length and "
            "learning rate may change, but not sequences_per_step, which is --per_device_train_batch_size x "
            f"--gradient_accumulation_steps x processes{hint}"
        )
