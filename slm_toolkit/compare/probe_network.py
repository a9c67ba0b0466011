"""Launch `slm_toolkit.run.network_probe` on this machine, and show the measured network as tables."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.base.safe_files import open_new
from slm_toolkit.compare.local import free_port
from slm_toolkit.compare.outcome import LOG_FILE, reason_in_log
from slm_toolkit.compare.supervisor import end_kept, start_kept
from slm_toolkit.hardware.gpus import Machine
from slm_toolkit.hardware.network import COLLECTIVES, MeasuredNetwork, bus_bytes_per_second, fit, seconds
from slm_toolkit.launch.processes import safe_environment
from slm_toolkit.report.tables.fitted import DASH, Column, fix_width, table_of
from slm_toolkit.strategy.strategy import find_strategy, write_resolved


def num_ranks_to_probe(asked: int | None, machine: Machine) -> int:
    """`asked`, or all GPUs, or two CPU processes. Raises ValueError where nothing could be measured."""
    num_processes = (machine.num_gpus or 2) if asked is None else asked
    if num_processes < 2:
        of_gpu = " on this machine's one GPU" if machine.num_gpus == 1 else ""
        raise ValueError(
            f"--probe_network with {num_processes} process{of_gpu}: nobody to send to\n"
            "hint: --num_processes 2 or more, with a GPU each; several nodes: `python -m "
            "slm_toolkit.run.network_probe --help`"
        )
    if 0 < machine.num_gpus < num_processes:
        raise ValueError(
            f"--num_processes is {num_processes}: this machine has {machine.num_gpus} GPUs\n"
            "hint: a rank needs a GPU of its own"
        )
    return num_processes


def probe_network(
    output: Path,
    *,
    num_processes: int,
    probe_seconds: float,
    timeout_seconds: float,
    on_progress: Callable[[str], None],
) -> str | None:
    """Measure, and let rank 0 write `output`; returns None, or why there is no such file.

    `on_progress` is called several times a second with what was measured last, "" before the first.
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
        *("--output", str(output), "--probe_seconds", str(probe_seconds)),
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


# A measured network as rich tables: every timing, then the line fitted to each collective.


def network_table(network: MeasuredNetwork) -> RenderableType:
    """Print it with `crop=False`."""
    nodes = "1 node" if network.num_nodes == 1 else f"{network.num_nodes} nodes"
    ranks = f"{network.world_size} {network.gpu or 'CPU processes'}"
    return Group(
        Text(f"{ranks} on {nodes}, {network.backend}", style="bold"),
        _timings(network),
        table_of(_fits(network)),
        Text(
            "bus GB/s: bytes that each rank sends, 2(n-1)/n or (n-1)/n of the tensor, per second", style="dim"
        ),
        Text("fit: seconds = latency + those bytes / bus bandwidth", style="dim"),
    )


def _timings(network: MeasuredNetwork) -> Table:
    table = Table(header_style="bold")
    table.add_column("collective", no_wrap=True)
    for title in ("size", "median ms", "bus GB/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for collective in COLLECTIVES:
        for timing in network.timings:
            if timing.collective == collective:
                table.add_row(
                    collective,
                    _size(timing.num_bytes),
                    f"{timing.seconds * 1e3:.3f}",
                    f"{bus_bytes_per_second(timing, network.world_size) / 1e9:.2f}",
                )
        table.add_section()
    return fix_width(table)


def _fits(network: MeasuredNetwork) -> list[Column]:
    """The line fitted to each collective; its largest relative error says how far to trust it."""
    lines = [fit(network, collective) for collective in COLLECTIVES]
    bandwidths = [line.bus_bytes_per_second for line in lines]
    return [
        Column("fit", list(COLLECTIVES)),
        Column("latency µs", [f"{line.latency_seconds * 1e6:.1f}" for line in lines]),
        Column("bus GB/s", [DASH if value is None else f"{value / 1e9:.2f}" for value in bandwidths]),
        Column("off by at most", [_largest_error(network, collective) for collective in COLLECTIVES]),
    ]


def _largest_error(network: MeasuredNetwork, collective: str) -> str:
    errors = [
        seconds(network, collective, timing.num_bytes) / timing.seconds - 1
        for timing in network.timings
        if timing.collective == collective
    ]
    return f"{max(errors, key=abs):+.0%}"


def _size(num_bytes: int) -> str:
    """With four figures: shares of a number of ranks that is no power of two add up to a little less."""
    return f"{num_bytes / 2**20:.4g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.4g} KiB"
