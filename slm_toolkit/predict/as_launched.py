"""What a user's own YAML and JSON decide, whatever the flags say: an estimate must follow them."""

import dataclasses
from typing import Any

from slm_toolkit.config import RunConfig
from slm_toolkit.predict.host_memory import fsdp1_sharding
from slm_toolkit.strategy import Strategy


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
