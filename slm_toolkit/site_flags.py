"""What `slm estimate`, `recommend` and `doctor` are told of prices and the network between GPUs."""

import argparse
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from slm_toolkit.output_flags import positive_number

if TYPE_CHECKING:
    from slm_toolkit.hardware import Gpu
    from slm_toolkit.predict.site import Site

_KINDS = ("on-demand", "spot", "reserved", "community")  # prices.KINDS, whose module is slow to load here


def add_site_flags(parser: argparse.ArgumentParser) -> None:
    prices = parser.add_argument_group("prices")
    prices.add_argument(
        "--usd_per_gpu_hour", type=positive_number, metavar="USD", help="your price, instead of the table's"
    )
    prices.add_argument(
        "--prices",
        type=Path,
        metavar="YAML",
        help="your prices by GPU, as `h100-80gb: 2.49`, with kind, provider, as_of, source if you like",
    )
    prices.add_argument(
        "--price_kind", choices=_KINDS, default="on-demand", help="of the table's prices (default: on-demand)"
    )
    prices.add_argument("--provider", metavar="NAME", help="of the table's prices (default: their median)")
    network = parser.add_argument_group("network")
    network.add_argument(
        "--inter_node_gbps",
        type=positive_number,
        metavar="GBIT",
        help="a node's network in gigabit per second (default: as AWS rents the GPU: A100 400, H100 3200)",
    )
    network.add_argument(
        "--network",
        type=Path,
        metavar="JSON",
        help="what `slm compare --probe_network` measured, used in place of data sheets",
    )


def sites_of(args: argparse.Namespace) -> "Callable[[Gpu | None], Site]":
    """The Site of each GPU under these flags. Raises ValueError for files that can't be read."""
    from slm_toolkit.network import read_network
    from slm_toolkit.predict.bandwidth import cluster_of
    from slm_toolkit.predict.site import Site
    from slm_toolkit.prices import Price, price_of, read_prices

    overrides = read_prices(args.prices) if args.prices else None
    measured = read_network(args.network) if args.network else None
    if args.provider is not None:
        price_of("h100-80gb", kind=args.price_kind, provider=args.provider)  # refuses an unknown one

    @cache
    def site_of(gpu: "Gpu | None") -> "Site":
        if gpu is None:
            return Site()
        if args.usd_per_gpu_hour is not None:
            price = Price(args.usd_per_gpu_hour, "given by --usd_per_gpu_hour")
        else:
            kind, provider = args.price_kind, args.provider
            price = price_of(gpu.name, kind=kind, provider=provider, overrides=overrides)
        cluster = cluster_of(gpu, inter_node_gbps=args.inter_node_gbps, measured=measured)
        return Site(cluster, price)

    return site_of
