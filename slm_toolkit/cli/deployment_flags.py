"""Flags for prices and for the network between GPUs, which several verbs share."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from slm_toolkit.config.parser import positive_number
from slm_toolkit.predict.setup.setup import Deployment

if TYPE_CHECKING:
    from slm_toolkit.hardware.gpus import Gpu
    from slm_toolkit.hardware.network import MeasuredNetwork
    from slm_toolkit.hardware.prices import OwnPrices


def add_price_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prices",
        type=_prices,
        metavar="USD|YAML",
        help="your price of one GPU for an hour, or a YAML of prices such as `h100-80gb: 2.49` (default: the "
        "median of providers in our table). Without a GPU: of one process",
    )


def add_network_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--network",
        type=_network,
        metavar="GBIT|JSON",
        help="network of one node in gigabit per second, or a measurement of bench/network_probe.py "
        "(default: as AWS rents eight GPUs: A100 400, H100 3200; smaller nodes get their share)",
    )


def _prices(text: str) -> "OwnPrices":
    from slm_toolkit.hardware.prices import own_prices

    return typed(own_prices, text)


def _network(text: str) -> float | Path:
    try:
        float(text)
    except ValueError:
        return Path(text)
    return positive_number(text)


def typed(read: Callable, text: str) -> object:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def deployments(args: argparse.Namespace) -> "Callable[[Gpu | None], Deployment]":
    """Return the function that gives each GPU the price and the network of the flags, else of our tables.

    Raises ValueError for a network that can't be read, and later for one measured between other GPUs.
    """
    measured = None
    if isinstance(args.network, Path):
        from slm_toolkit.hardware.network import read_network

        measured = read_network(args.network)
    gbps = args.network if measured is None else None

    def deployment_of(gpu: "Gpu | None") -> Deployment:
        if gpu is None:
            return Deployment()
        from slm_toolkit.hardware.network import cluster_of
        from slm_toolkit.hardware.prices import price_of

        if measured is not None:
            _check_measured(measured, gpu)
        price = price_of(gpu.name, getattr(args, "prices", None))
        return Deployment(cluster_of(gpu, inter_node_gbps=gbps, measured=measured), price)

    return deployment_of


def _check_measured(measured: "MeasuredNetwork", gpu: "Gpu") -> None:
    from slm_toolkit.hardware.gpus import find_gpu

    known = find_gpu(measured.gpu)
    if known is None or known.name != gpu.name:
        raise ValueError(
            f"--network was measured between {measured.gpu or 'CPU processes'}, not {gpu.name}\n"
            "hint: `slm launch bench/network_probe.py` on these GPUs"
        )
