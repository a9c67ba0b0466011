"""accelerate's trackers, started with the run's name and flags."""

import dataclasses
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers

from slm_toolkit.config import RunConfig


def check_tracker(name: str) -> None:
    """Raises ValueError unless accelerate has a tracker of this name and its package is installed."""
    if name not in ("none", *(str(tracker) for tracker in get_available_trackers())):
        raise ValueError(
            f"--report_to {name}: no such tracker is installed\n"
            "hint: `pip install tensorboard` (or trackio, wandb, ...) installs one"
        )


def start_tracker(accelerator: Accelerator, config: RunConfig, run_dir: Path) -> None:
    """Start the tracker that the accelerator was made with; its run is named as the run's folder."""
    flags = {key: "" if value is None else value for key, value in dataclasses.asdict(config).items()}
    options = {"trackio": {"name": run_dir.name}, "wandb": {"name": run_dir.name}}
    accelerator.init_trackers("slm_toolkit", config=flags, init_kwargs=options)
