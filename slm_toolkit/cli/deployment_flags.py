"""Flags for prices and the network between GPUs, of `slm estimate`, `recommend` and `doctor`."""

import argparse
from pathlib import Path
from typing import Any

from slm_toolkit.config.parser import positive_number, price_per_hour

_KINDS = ("on-demand", "spot", "reserved", "community")  # prices.KINDS, whose import takes its time


def add_price_flags(parser: argparse.ArgumentParser) -> None:
    prices = parser.add_argument_group("prices")
    prices.add_argument(
        "--usd_per_gpu_hour",
        type=price_per_hour,
        metavar="USD",
        help="your price per GPU-hour, for every --gpu",
    )
    prices.add_argument(
        "--prices",
        type=Path,
        metavar="YAML",
        help="your prices by GPU, such as `h100-80gb: 2.49`; kind, provider, as_of and source are optional",
    )
    prices.add_argument(
        "--price_kind", choices=_KINDS, help="kind of price in the shipped table (default: on-demand)"
    )
    prices.add_argument(
        "--provider", metavar="NAME", help="provider in the shipped table (default: the median of all)"
    )


def add_network_flags(parser: argparse.ArgumentParser) -> None:
    network = parser.add_argument_group("network")
    network.add_argument(
        "--inter_node_gbps",
        type=positive_number,
        metavar="GBIT",
        help="network of one node in gigabit per second (default: as AWS rents eight GPUs: A100 400, "
        "H100 3200; smaller nodes get their share)",
    )
    network.add_argument(
        "--network",
        type=Path,
        metavar="JSON",
        help="measurement of `slm compare --probe_network`, which replaces data sheets",
    )


def deployment_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of prices and of the network by name; None where a verb lacks the flag."""
    names = ("usd_per_gpu_hour", "prices", "price_kind", "provider", "inter_node_gbps", "network")
    return {name: getattr(args, name, None) for name in names}
