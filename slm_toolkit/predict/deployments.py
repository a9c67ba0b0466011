"""The price and the network of each GPU: your own, measured, or from our tables."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from slm_toolkit.config.flag_pairs import Pair, check_pairs, names_given
from slm_toolkit.predict.setup.setup import Deployment

if TYPE_CHECKING:
    from slm_toolkit.hardware.gpus import Gpu
    from slm_toolkit.hardware.network import MeasuredNetwork

_PRICE_PAIRS = (
    *(
        Pair(own, of_table, ", which chooses from the shipped table")
        for own in ("usd_per_gpu_hour", "prices")
        for of_table in ("price_kind", "provider")
    ),
    Pair("usd_per_gpu_hour", "prices", ": both set prices"),
)


def deployments(
    *,
    usd_per_gpu_hour: float | None = None,
    prices: Path | None = None,
    price_kind: str | None = None,
    provider: str | None = None,
    inter_node_gbps: float | None = None,
    network: Path | None = None,
) -> "Callable[[Gpu | None], Deployment]":
    """Return the function that gives each GPU its Deployment.

    `usd_per_gpu_hour`: dollars, for every GPU. `prices`: a YAML of dollars by GPU. `inter_node_gbps`: gigabit
    per second of a node. `network`: a JSON that `slm compare --probe_network` measured. Raises ValueError for
    values that contradict each other, for files that can't be read, and for a network measured between other
    GPUs.
    """
    of_prices = {
        "usd_per_gpu_hour": usd_per_gpu_hour,
        "prices": prices,
        "price_kind": price_kind,
        "provider": provider,
    }
    check_pairs(names_given(of_prices), _PRICE_PAIRS)
    overrides = measured = None
    if prices:
        from slm_toolkit.hardware.prices import read_prices

        overrides = read_prices(prices)
    if network:
        from slm_toolkit.hardware.network import read_network

        measured = read_network(network)
    if measured is not None and inter_node_gbps is not None and measured.num_nodes > 1:
        raise ValueError(
            f"--inter_node_gbps with --network {network}, which has a measurement between nodes\n"
            "hint: give one"
        )
    if provider is not None:
        from slm_toolkit.hardware.prices import price_of

        price_of("h100-80gb", kind=price_kind or "on-demand", provider=provider)  # refuses an unknown one

    @cache
    def deployment_of(gpu: "Gpu | None") -> "Deployment":
        if gpu is None:
            return Deployment()
        from slm_toolkit.hardware.network import cluster_of
        from slm_toolkit.hardware.prices import Price, price_of

        if measured is not None:
            _check_measured(measured, gpu, network)
        if usd_per_gpu_hour is not None:
            price = Price(usd_per_gpu_hour, "given by --usd_per_gpu_hour")
        else:
            price = price_of(gpu.name, kind=price_kind or "on-demand", provider=provider, overrides=overrides)
        return Deployment(cluster_of(gpu, inter_node_gbps=inter_node_gbps, measured=measured), price)

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
