"""Launches `slm_toolkit.run.network_probe` on this machine."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from slm_toolkit.base.safe_files import open_new
from slm_toolkit.compare.local import free_port
from slm_toolkit.compare.outcome import LOG_FILE, reason_in_log
from slm_toolkit.compare.supervisor import end_kept, start_kept
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.hardware.network import COLLECTIVES
from slm_toolkit.launch.processes import safe_environment
from slm_toolkit.strategy.strategy import find_strategy, write_resolved


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
    folder = output.with_name("network_probe")
    yaml_path = write_resolved(find_strategy("ddp"), folder / "launch", num_processes)
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(yaml_path)),
        *("--num_processes", str(num_processes)),
        *("--main_process_port", str(free_port())),
        *("-m", "slm_toolkit.run.network_probe"),
        *("--output", str(output)),
    ]
    log_path = folder / LOG_FILE
    started = time.monotonic()
    with open_new(log_path, "xb") as log:
        keeper = start_kept(command, folder, log, {**safe_environment(), "PYTHONUNBUFFERED": "1"})
        try:
            while keeper.poll() is None:
                on_progress(_last_measured(log_path))
                if time.monotonic() - started > timeout_seconds:
                    return f"stopped after {timeout_seconds:g} s: see {log_path}"
                time.sleep(0.2)
        finally:
            end_kept(keeper, folder)
    return None if keeper.returncode == 0 and output.is_file() else reason_in_log(log_path)


def _last_measured(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith(COLLECTIVES)), "")
