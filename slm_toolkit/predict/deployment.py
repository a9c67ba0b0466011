"""The part of an Estimate that is about time and money, on the network and at the prices of a Site."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.model.flops import model_flops_utilization
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.memory.adapters import adapters_of, weights_of
from slm_toolkit.predict.memory.host import Placement
from slm_toolkit.predict.speed.traffic import Transfer, transfers
from slm_toolkit.strategy.strategy import Strategy

if TYPE_CHECKING:
    from slm_toolkit.hardware.prices import Price
    from slm_toolkit.predict.speed.bandwidth import Cluster
    from slm_toolkit.predict.speed.software import Software
    from slm_toolkit.predict.speed.step import StepTime


@dataclass(frozen=True)
class Site:
    """Where a job would run: what connects the GPUs, and what they cost. None: the GPU's usual, no price."""

    cluster: "Cluster | None" = None
    price: "Price | None" = None


def speed_and_cost(
    spec: ModelSpec,
    strategy: Strategy,
    config: RunConfig,
    placement: Placement,
    *,
    num_gpus: int,
    gpus_per_node: int,
    gpu: Gpu | None,
    software: str,
    site: Site,
) -> dict[str, Any]:
    """The Estimate's fields from traffic_bytes on. What takes time to import is left alone without a GPU."""
    nodes = {"num_gpus": num_gpus, "gpus_per_node": gpus_per_node}
    sent = transfers(spec, strategy, config, placement, **nodes)
    cluster, time, constants = site.cluster, None, None
    if gpu is not None:
        from slm_toolkit.predict.speed.bandwidth import cluster_of

        cluster = cluster or cluster_of(gpu)
    if gpu is not None and not strategy.offloads:
        from slm_toolkit.hardware.calibration import calibration_of
        from slm_toolkit.predict.speed.software import SOFTWARE, calibrated
        from slm_toolkit.predict.speed.step import step_time

        constants = calibrated(SOFTWARE[software], calibration_of(gpu.name, software))
        time = step_time(
            spec,
            strategy,
            config,
            gpu=gpu,
            cluster=cluster,
            transfers=sent,
            num_gpus=num_gpus,
            num_shards=placement.ranks_of_a_copy(**nodes),
            software=constants,
        )
    return {
        **_traffic(sent, cluster, time, gpus_per_node=gpus_per_node),
        **_speed(time, spec, config, gpu, constants, num_gpus),
        **_cost(time, site.price, num_gpus),
    }


def _traffic(
    sent: tuple[Transfer, ...], cluster: "Cluster | None", time: "StepTime | None", *, gpus_per_node: int
) -> dict[str, Any]:
    inter_node = sum(transfer.inter_node_bytes for transfer in sent)
    network = cluster.node_bytes_per_second(gpus_per_node) if cluster and inter_node else None
    return {
        "traffic_bytes": {
            **{transfer.name: transfer.sent_bytes for transfer in sent},
            "intra_node": sum(transfer.intra_node_bytes for transfer in sent),
            "inter_node": inter_node,
        },
        "inter_node_gbps": network * 8 / 1e9 if network else None,
        "inter_node_gbps_needed": _gbps_needed(sent, time, gpus_per_node) if inter_node and time else None,
        "network_evidence": _network_evidence(sent, cluster) if time is not None and sent else None,
    }


def _gbps_needed(sent: tuple[Transfer, ...], time: "StepTime", gpus_per_node: int) -> float:
    """What is sent once hides behind the last micro-step, all together behind all of them; what follows the
    optimizer hides behind nothing and asks for nothing."""

    from slm_toolkit.predict.speed.software import NODE_NETWORK_SHARE

    def bytes_of(transfers: list[Transfer]) -> float:
        return gpus_per_node * sum(transfer.inter_node_bytes for transfer in transfers)

    hideable = [transfer for transfer in sent if transfer.overlaps]
    late = [transfer for transfer in hideable if transfer.in_last_micro_step]
    of_last = bytes_of(late) / time.last_micro_step_seconds
    of_all = bytes_of(hideable) / time.overlappable_seconds
    return max(of_last, of_all) / NODE_NETWORK_SHARE * 8 / 1e9


def _network_evidence(sent: tuple[Transfer, ...], cluster: "Cluster") -> str:
    if cluster.measured is not None and all(cluster.is_measured(transfer) for transfer in sent):
        return "measured"
    if cluster.measured is not None and any(cluster.is_measured(transfer) for transfer in sent):
        return "measured in part"
    is_given = cluster.given_node_bytes_per_second is not None
    return "given" if is_given and any(transfer.num_nodes > 1 for transfer in sent) else "data sheet"


def _speed(
    time: "StepTime | None",
    spec: ModelSpec,
    config: RunConfig,
    gpu: Gpu | None,
    software: "Software | None",
    num_gpus: int,
) -> dict[str, Any]:
    if time is None:
        names = (
            "step_seconds",
            "step_low_seconds",
            "step_high_seconds",
            "parts_seconds",
            *("mfu", "bottleneck", "misaligned_seconds", "tokens_per_second", "tokens_per_second_per_gpu"),
        )
        return dict.fromkeys(names)
    from slm_toolkit.predict.speed.step import bottleneck_of

    seconds, rate = time.step_seconds, time.tokens_per_second
    weights = weights_of(spec, adapters_of(spec, config))
    return {
        "step_seconds": seconds,
        "step_low_seconds": seconds / software.high,
        "step_high_seconds": seconds / software.low,
        "parts_seconds": time.parts_seconds,
        "misaligned_seconds": time.misaligned_seconds,
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": rate / num_gpus,
        "mfu": None
        if config.numerics == "fp32"  # of which we know no peak with tensor cores off
        else model_flops_utilization(
            spec,
            seq_len=config.seq_len,
            gpu=gpu,
            tokens_per_second_per_gpu=rate / num_gpus,
            adapter_params=weights.trained if weights.is_frozen else None,
        ),
        "bottleneck": bottleneck_of(time),
    }


def _cost(time: "StepTime | None", price: "Price | None", num_gpus: int) -> dict[str, Any]:
    per_million = per_usd = None
    if time is not None and price is not None:
        from slm_toolkit.predict.cost import tokens_per_usd, usd_per_million_tokens

        paid = {
            "tokens_per_second": time.tokens_per_second,
            "usd_per_gpu_hour": price.usd_per_gpu_hour,
            "num_gpus": num_gpus,
        }
        per_million, per_usd = usd_per_million_tokens(**paid), tokens_per_usd(**paid)
    return {
        "usd_per_gpu_hour": price.usd_per_gpu_hour if price else None,
        "price_source": price.source if price else None,
        "usd_per_million_tokens": per_million,
        "tokens_per_usd": per_usd,
    }
