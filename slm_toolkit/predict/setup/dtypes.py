"""Dtypes: the bytes of each kind of tensor, as `--numerics`, the engine and a DeepSpeed JSON choose them."""

from dataclasses import dataclass

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.strategy.strategy import Strategy

BF16, AUTOCAST, FP32 = "bf16", "autocast", "fp32"
"""how a step computes: bf16 weights and residual stream; fp32 ones under bf16 autocast (accelerate's DDP);
all fp32"""


@dataclass(frozen=True)
class Dtypes:
    """Bytes per element; 0 where there is no such tensor."""

    parameter: int
    master: int
    moments: int
    "both of Adam's together"
    compute: int
    "gathered or cast parameters, as matrix products take them"
    gradient: int
    "as backward gives them"
    reduced: int
    "in the collectives"
    kept_gradient: int
    "as the optimizer takes them"


def dtypes_of(strategy: Strategy, config: RunConfig) -> Dtypes:
    """Dtypes that flags and the DeepSpeed JSON choose. Raises ValueError where no closed form covers them."""
    fp32_reduction = config.reduce_dtype == "fp32" or _accumulates_in_fp32(strategy)
    return engine_dtypes(config.numerics, strategy.engine, fp32_reduction=fp32_reduction)


def _accumulates_in_fp32(strategy: Strategy) -> bool:
    """Whether a DeepSpeed JSON asks for fp32 gradients under bf16 weights. Raises ValueError for ZeRO-1."""
    if strategy.deepspeed is None or not strategy.deepspeed.accumulates_in_fp32:
        return False
    if strategy.zero_stage == 1:
        raise ValueError(
            f"{strategy.path}: grad_accum_dtype fp32 makes ZeRO-1 another optimizer: no closed form for it\n"
            "hint: rehearse it: --rehearse N"
        )
    return True


def engine_dtypes(numerics: str, engine: str, *, fp32_reduction: bool) -> Dtypes:
    """What `run/engine/engine.py` makes of `--numerics` under each engine (the README's table, "probed")."""
    if numerics == "fp32":
        own_master = 4 if engine == "deepspeed" else 0
        return Dtypes(4, own_master, 8, 4, 4, 4, 4)
    if engine == "deepspeed" and fp32_reduction:  # grad_accum_dtype: what is kept is fp32, too
        own_master = 2 if numerics == "pure_bf16" else 4
        return Dtypes(2, own_master, 2 * own_master, 2, 2, 4, 4)
    if numerics == "pure_bf16":
        own_master = 2 if engine == "deepspeed" else 0
        return Dtypes(2, own_master, 4, 2, 2, 4 if fp32_reduction else 2, 2)
    if numerics == "aligned" or engine == "deepspeed":
        return Dtypes(2, 4, 8, 2, 2, 4 if fp32_reduction else 2, 2)
    if engine in ("fsdp1", "fsdp2"):  # fp32 shards, gathered in bf16
        return Dtypes(4, 0, 8, 2, 2, 2, 4)
    return Dtypes(4, 0, 8, 2, 4, 4, 4)  # autocast over fp32


def compute_of(numerics: str, engine: str) -> str:
    """How matrix products and the residual stream run: BF16, AUTOCAST or FP32."""
    if numerics == "fp32":
        return FP32
    return AUTOCAST if numerics == "stock" and engine in ("single", "ddp") else BF16
