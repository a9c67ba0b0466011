"""What `slm estimate`, `recommend` and `doctor` are told of prices and the network between GPUs."""

import argparse
from pathlib import Path
from typing import Any

from slm_toolkit.config.parser import positive_number, price_per_hour

_KINDS = ("on-demand", "spot", "reserved", "community")  # prices.KINDS, whose import takes its time


def add_price_flags(parser: argparse.ArgumentParser) -> None:
    prices = parser.add_argument_group("prices")
    prices.add_argument(
        "--usd_per_gpu_hour", type=price_per_hour, metavar="USD", help="your price, of every --gpu"
    )
    prices.add_argument(
        "--prices",
        type=Path,
        metavar="YAML",
        help="your prices by GPU, as `h100-80gb: 2.49`, with kind, provider, as_of, source if you like",
    )
    prices.add_argument("--price_kind", choices=_KINDS, help="of the table's prices (default: on-demand)")
    prices.add_argument("--provider", metavar="NAME", help="of the table's prices (default: their median)")


def add_network_flags(parser: argparse.ArgumentParser) -> None:
    network = parser.add_argument_group("network")
    network.add_argument(
        "--inter_node_gbps",
        type=positive_number,
        metavar="GBIT",
        help="a node's network in gigabit per second (default: as AWS rents the GPU, A100 400, H100 3200 of "
        "eight GPUs; of smaller nodes their share)",
    )
    network.add_argument(
        "--network",
        type=Path,
        metavar="JSON",
        help="what `slm compare --probe_network` measured, used in place of data sheets",
    )


def deployment_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of prices and of the network by name; None where a verb lacks the flag."""
    names = ("usd_per_gpu_hour", "prices", "price_kind", "provider", "inter_node_gbps", "network")
    return {name: getattr(args, name, None) for name in names}
