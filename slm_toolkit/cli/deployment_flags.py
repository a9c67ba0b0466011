"""Flags for prices and the network between GPUs, of `slm estimate`, `recommend` and `doctor`."""

import argparse
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from slm_toolkit.config.flag_pairs import Pair, check_pairs, names_given
from slm_toolkit.config.parser import positive_number, price_per_hour

if TYPE_CHECKING:
    from slm_toolkit.hardware.gpus import Gpu
    from slm_toolkit.hardware.network import MeasuredNetwork
    from slm_toolkit.predict.setup.setup import Deployment

_KINDS = ("on-demand", "spot", "reserved", "community")  # prices.KINDS, whose import takes time
_PRICE_PAIRS = (
    *(
        Pair(own, of_table, ", which chooses from the shipped table")
        for own in ("usd_per_gpu_hour", "prices")
        for of_table in ("price_kind", "provider")
    ),
    Pair("usd_per_gpu_hour", "prices", ": both set prices"),
)


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


def deployments_of(args: argparse.Namespace) -> "Callable[[Gpu | None], Deployment]":
    """Return a function that gives the Deployment of a GPU under these flags.

    Raises ValueError for flags that contradict each other, files that can't be read, and a measured network
    of other GPUs.
    """
    from slm_toolkit.predict.setup.setup import Deployment

    usd, path, kind, provider = (
        getattr(args, name, None) for name in ("usd_per_gpu_hour", "prices", "price_kind", "provider")
    )
    check_pairs(names_given(vars(args)), _PRICE_PAIRS)
    overrides = measured = None
    if path:
        from slm_toolkit.hardware.prices import read_prices

        overrides = read_prices(path)
    if args.network:
        from slm_toolkit.hardware.network import read_network

        measured = read_network(args.network)
    if measured is not None and args.inter_node_gbps is not None and measured.num_nodes > 1:
        raise ValueError(
            f"--inter_node_gbps with --network {args.network}, which has a measurement between nodes\n"
            "hint: give one"
        )
    if provider is not None:
        from slm_toolkit.hardware.prices import price_of

        price_of("h100-80gb", kind=kind or "on-demand", provider=provider)  # refuses an unknown one

    @cache
    def deployment_of(gpu: "Gpu | None") -> "Deployment":
        if gpu is None:
            return Deployment()
        from slm_toolkit.hardware.network import cluster_of
        from slm_toolkit.hardware.prices import Price, price_of

        if measured is not None:
            _check_measured(measured, gpu, args.network)
        if usd is not None:
            price = Price(usd, "given by --usd_per_gpu_hour")
        else:
            price = price_of(gpu.name, kind=kind or "on-demand", provider=provider, overrides=overrides)
        return Deployment(cluster_of(gpu, inter_node_gbps=args.inter_node_gbps, measured=measured), price)

    return deployment_of


def _check_measured(measured: "MeasuredNetwork", gpu: "Gpu", path: Path) -> None:
    from slm_toolkit.hardware.gpus import find_gpu

    known = find_gpu(measured.gpu)
    if known is None or known.name != gpu.name:
        of = f"between {measured.gpu}s" if measured.gpu else f"between CPU processes ({measured.backend})"
        raise ValueError(
            f"--network {path} was measured {of}, not {gpu.name}\n"
            "hint: `slm compare --probe_network` on these GPUs"
        )
