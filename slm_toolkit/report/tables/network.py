"""A measured network as rich tables: every timing, then the line fitted to each collective."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.hardware.network import COLLECTIVES, MeasuredNetwork, bus_bytes_per_second, fit, seconds
from slm_toolkit.report.tables.cells import DASH
from slm_toolkit.report.tables.fitted import Column, fix_width, table_of


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
