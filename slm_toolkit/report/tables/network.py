"""A measured network as rich tables: every timing, then the line fitted to each collective."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slm_toolkit.hardware.network import COLLECTIVES, MeasuredNetwork, bus_bytes_per_second, fit, seconds
from slm_toolkit.report.tables.cells import DASH
from slm_toolkit.report.tables.fitted import fix_width


def network_table(network: MeasuredNetwork) -> RenderableType:
    """Print it with `crop=False`."""
    nodes = "1 node" if network.num_nodes == 1 else f"{network.num_nodes} nodes"
    ranks = f"{network.world_size} {network.gpu or 'CPU processes'}"
    return Group(
        Text(f"{ranks} on {nodes}, {network.backend}", style="bold"),
        _timings(network),
        _fits(network),
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


def _fits(network: MeasuredNetwork) -> Table:
    """With the largest relative error, which says how far to trust the line."""
    table = Table(header_style="bold")
    table.add_column("fit", no_wrap=True)
    for title in ("latency µs", "bus GB/s", "off by at most"):
        table.add_column(title, justify="right", no_wrap=True)
    for collective in COLLECTIVES:
        line = fit(network, collective)
        errors = [
            seconds(network, collective, timing.num_bytes) / timing.seconds - 1
            for timing in network.timings
            if timing.collective == collective
        ]
        bandwidth = line.bus_bytes_per_second
        table.add_row(
            collective,
            f"{line.latency_seconds * 1e6:.1f}",
            DASH if bandwidth is None else f"{bandwidth / 1e9:.2f}",
            f"{max(errors, key=abs):+.0%}",
        )
    return fix_width(table)


def _size(num_bytes: int) -> str:
    """With four figures: shares of a number of ranks that is no power of two add up to a little less."""
    return f"{num_bytes / 2**20:.4g} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.4g} KiB"
