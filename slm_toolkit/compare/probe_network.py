"""Launches `slm_toolkit.run.network_probe` on this machine."""

from collections.abc import Callable
from pathlib import Path
from threading import Event

from slm_toolkit.compare.grid import PlannedRun
from slm_toolkit.compare.local import Slot, launch
from slm_toolkit.compare.outcome import LOG_FILE, reason_in_log
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.hardware.network import COLLECTIVES
from slm_toolkit.strategy.strategy import find_strategy


def num_ranks_to_probe(requested: int | None, machine: Machine) -> int:
    """Return `requested`, or the number of GPUs, or 2 CPU processes. Raises ValueError for less than two."""
    num_processes = (machine.num_gpus or 2) if requested is None else requested
    if num_processes < 2:
        on_gpu = " on this machine's only GPU" if machine.num_gpus == 1 else ""
        raise ValueError(
            f"--probe_network with {num_processes} process{on_gpu}: it needs two or more\n"
            "hint: --num_processes 2 or more, with a GPU each; for several nodes see `python -m "
            "slm_toolkit.run.network_probe --help`"
        )
    if 0 < machine.num_gpus < num_processes:
        raise ValueError(
            f"--num_processes is {num_processes}: this machine has {machine.num_gpus} GPUs\n"
            "hint: each rank needs its own GPU"
        )
    return num_processes


def probe_network(
    output: Path,
    *,
    num_processes: int,
    timeout_seconds: float,
    on_progress: Callable[[str], None],
) -> str | None:
    """Measure the network; rank 0 writes `output`. Return None, or the reason why that failed.

    Calls `on_progress` several times a second with the line of the last measurement, "" before the first.
    """
    output = output.resolve()
    output.unlink(missing_ok=True)
    run = PlannedRun(
        config=RunConfig(output_dir=str(output.parent), run_name="network_probe"),
        spec=None,
        strategy=find_strategy("ddp"),
        num_ranks=num_processes,
        gpu=None,
        words=("-m", "slm_toolkit.run.network_probe", "--output", str(output)),
    )
    ended = launch(
        run,
        Slot(),
        timeout_seconds=timeout_seconds,
        stop=Event(),
        on_progress=lambda _: on_progress(_last_measured(run.folder / LOG_FILE)),
    )
    if ended.stopped_after_seconds is not None:
        return f"stopped after {timeout_seconds:g} s: see {run.folder / LOG_FILE}"
    return None if ended.exit_code == 0 and output.is_file() else reason_in_log(run.folder / LOG_FILE)


def _last_measured(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith(COLLECTIVES)), "")
