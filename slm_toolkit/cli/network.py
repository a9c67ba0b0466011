"""`slm compare --probe_network`: its flags, its launch and its table."""

import argparse
import dataclasses
import json
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.flag_pairs import flags_given
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.network import (
    COLLECTIVES,
    NETWORK_FILE,
    MeasuredNetwork,
    bus_bytes_per_second,
    fit,
    read_network,
    seconds,
)
from slm_toolkit.report.tables.fitted import DASH, Column, console_of_stdout, fix_width, table_of

_TAKEN = ("probe_network", "num_processes", "timeout", "output_dir", "json")


def add_probe_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe_network",
        action="store_true",
        help="compare nothing: measure all_reduce, all_gather and reduce_scatter among the ranks. "
        f"Writes {NETWORK_FILE} into --output_dir",
    )


def print_probe(args: argparse.Namespace) -> int:
    """Measure, then print the table, or with --json the file's content. Returns the exit code."""
    with ExitStack() as until_the_end:
        return _print_probe(args, until_the_end)


def _print_probe(args: argparse.Namespace, until_the_end: ExitStack) -> int:
    from slm_toolkit.compare.probe_network import num_ranks_to_probe, probe_network
    from slm_toolkit.compare.supervisor import locked
    from slm_toolkit.hardware.gpus import this_machine

    console = Console(stderr=True)
    output = Path(args.output_dir or RunConfig.output_dir) / NETWORK_FILE
    with user_errors():
        if unused := [name for name in flags_given(args) if name not in _TAKEN]:
            raise ValueError(
                f"--{unused[0]} with --probe_network, which does not train\n"
                f"hint: it can be combined with {', '.join(f'--{name}' for name in _TAKEN[1:])}"
            )
        with console.status("looking at this machine"):
            num_processes = num_ranks_to_probe(args.num_processes, this_machine())
        until_the_end.enter_context(locked(output.parent.resolve()))  # a comparison would stop it
    console.print(f"measuring collectives among {num_processes} processes", highlight=False)
    try:
        with console.status("starting") as status:
            reason = probe_network(
                output,
                num_processes=num_processes,
                timeout_seconds=args.timeout,
                on_progress=lambda line: status.update(line or "starting"),
            )
    except KeyboardInterrupt:
        console.print("stopped: nothing was written")
        return 130
    if reason is not None:
        console.print(
            f"the network was not measured: {reason}", markup=False, highlight=False, soft_wrap=True
        )
        return 1
    network = read_network(output)
    console.print(f"network: {output}", highlight=False, soft_wrap=True)
    if args.json:
        print(json.dumps(dataclasses.asdict(network), indent=2, allow_nan=False))
    else:
        console = console_of_stdout()
        console.print(network_table(network), crop=False)
    return 0


# A measured network as rich tables: every timing, then the line fitted to each collective.


def network_table(network: MeasuredNetwork) -> RenderableType:
    """Return the tables of a measured network. Print them with `crop=False`."""
    nodes = "1 node" if network.num_nodes == 1 else f"{network.num_nodes} nodes"
    ranks = f"{network.world_size} {network.gpu or 'CPU processes'}"
    return Group(
        Text(f"{ranks} on {nodes}, {network.backend}", style="bold"),
        _timings(network),
        table_of(_fits(network)),
        *(Text(line, style="yellow") for line in _failed_fits(network)),
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
    """Return columns of the line fitted to each collective, with its largest relative error."""
    lines = [fit(network, collective) for collective in COLLECTIVES]
    bandwidths = [line.bus_bytes_per_second for line in lines]
    return [
        Column("fit", list(COLLECTIVES)),
        Column(
            "latency µs",
            [f"{line.latency_seconds * 1e6:.1f}" if line.latency_seconds else DASH for line in lines],
        ),
        Column("bus GB/s", [DASH if value is None else f"{value / 1e9:.2f}" for value in bandwidths]),
        Column("off by at most", [_largest_error(network, collective) for collective in COLLECTIVES]),
    ]


def _failed_fits(network: MeasuredNetwork) -> list[str]:
    """Return a sentence for each collective whose timings give no latency or no bandwidth."""
    problems = []
    for collective in COLLECTIVES:
        line = fit(network, collective)
        if line.bus_bytes_per_second is None:
            problems.append(f"{collective}: larger tensors took no longer, so the fit has no bandwidth")
        elif not line.latency_seconds:
            problems.append(f"{collective}: small tensors took no extra time, so the fit has no latency")
    return [f"{problem}; other programs may have disturbed it, probe again" for problem in problems]


def _largest_error(network: MeasuredNetwork, collective: str) -> str:
    errors = [
        seconds(network, collective, timing.num_bytes) / timing.seconds - 1
        for timing in network.timings
        if timing.collective == collective
    ]
    return f"{max(errors, key=abs):+.0%}"


def _size(num_bytes: int) -> str:
    """Format with four digits: if the ranks are not a power of two, sizes are not round."""
    return f"{num_bytes / 2**20:.4g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.4g} KiB"
