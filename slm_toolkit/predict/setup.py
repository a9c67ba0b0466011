"""Setup: a configuration on certain GPUs, as it is launched."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import Gpu
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.predict.bottleneck import aligned_sibling, describe_alignment, hw_sibling, misaligned_widths
from slm_toolkit.predict.deepspeed_estimator import ESTIMATOR_VERSION, deepspeed_needs
from slm_toolkit.predict.deployment import Site
from slm_toolkit.predict.estimate import Estimate, estimate
from slm_toolkit.predict.memory.host import fsdp1_sharding, placement_of
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.strategy import Strategy


def strategy_as_launched(strategy: Strategy) -> Strategy:
    """FSDP1 says by another key what FSDP2 calls reshard_after_forward."""
    if strategy.engine != "fsdp1":
        return strategy
    keeps = fsdp1_sharding(strategy) in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
    return dataclasses.replace(strategy, reshard_after_forward=not keeps)


def config_as_launched(config: RunConfig, strategy: Strategy) -> RunConfig:
    """FSDP's own checkpointing, and in `stock` the JSON's accumulation."""
    changes: dict[str, Any] = {}
    fsdp = (strategy.accelerate_config or {}).get("fsdp_config") or {}
    if str(fsdp.get("fsdp_activation_checkpointing")).lower() == "true":
        changes["gradient_checkpointing"] = "full"
    steps = (strategy.deepspeed_config or {}).get("gradient_accumulation_steps", "auto")
    if config.numerics == "stock" and steps != "auto":
        changes["gradient_accumulation_steps"] = int(steps)
    return dataclasses.replace(config, **changes) if changes else config


@dataclass(frozen=True)
class Setting:
    """A configuration on certain GPUs."""

    spec: ModelSpec
    config: RunConfig
    strategy: Strategy
    gpu: Gpu
    num_gpus: int
    gpus_per_node: int
    site: Site
    software: str = "2026"

    def estimate(self, spec: ModelSpec | None = None, config: RunConfig | None = None) -> Estimate:
        """Of this setting, or of another model or configuration in its place."""
        per_node = min(self.num_gpus, self.gpus_per_node)
        fitted = fit_groups(self.strategy, num_ranks=self.num_gpus, ranks_per_node=per_node)
        strategy = strategy_as_launched(fitted)
        return estimate(
            spec or self.spec,
            strategy,
            placement_of(fitted),
            config_as_launched(config or self.config, strategy),
            num_gpus=self.num_gpus,
            gpus_per_node=per_node,
            gpu=self.gpu,
            deepspeed_needs=deepspeed_needs,
            deepspeed_version=ESTIMATOR_VERSION,
            software=self.software,
            site=self.site,
        )


@dataclass(frozen=True)
class AlignmentGain:
    """What widths that tensor cores like give on one GPU type."""

    gpu: str
    sibling: str
    "the model, and what is other in it"
    speedup: float


def alignment_gain(setting: Setting) -> AlignmentGain | None:
    """Against the preset's hardware-friendly sibling, else the same shape rounded; None where all is well,
    and for weights that are there already.

    Tokens per second of both; the siblings' parameters differ by up to 11 % (slm-100m), which is in it.
    """
    spec = setting.spec
    if not misaligned_widths(spec) or setting.config.peft != "none":
        return None
    sibling = hw_sibling(spec) or aligned_sibling(spec)
    before, after = setting.estimate(), setting.estimate(sibling)
    if before.tokens_per_second is None or after.tokens_per_second is None:
        return None
    changed = describe_alignment(spec, sibling)
    name = f"{sibling.name} ({changed})" if sibling.name != spec.name else changed
    return AlignmentGain(setting.gpu.name, name, after.tokens_per_second / before.tokens_per_second)
