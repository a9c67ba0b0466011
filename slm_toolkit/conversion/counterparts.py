"""What FSDP and ZeRO call the same thing.

Keys are those of accelerate 1.15's YAML and of DeepSpeed 0.19's JSON. Bytes are per parameter and rank, in
bf16 with fp32 master weights and Adam on N ranks, as the README counts them.
"""

from dataclasses import dataclass
from typing import Any

ANY = "K"
"a value that both sides write alike"
ZERO = "zero_optimization."
GATHER = ZERO + "stage3_gather_16bit_weights_on_model_save"
INIT_FLAG = "zero3_init_flag"
"of the accelerate YAML's deepspeed_config; every other ZeRO key here is the JSON's"


@dataclass(frozen=True)
class Pair:
    """One value of an FSDP key and the value of a ZeRO key that stands for it."""

    fsdp: str
    fsdp_value: Any
    zero: str
    zero_value: Any
    note: str = ""
    is_same: bool = True
    "False: the nearest there is; the note says what differs"
    stages: tuple[int, ...] = (1, 2, 3)
    way: str = "both"
    "to_zero, to_fsdp or both"


_HOST = "AdamW runs on the CPU under both: PyTorch's under FSDP, DeepSpeed's vectorised one under ZeRO"
_STAGE_2 = (
    "ZeRO-2 keeps whole parameters between steps, too: 2 + 14/N bytes per parameter for 16/N; during a step "
    "both hold them whole; the traffic is alike"
)
_STAGE_1 = (
    "FSDP has no such stage: it splits parameters and gradients as well, 16/N bytes per parameter for 2 + "
    "14/N"
)
_HPZ = (
    "hpZ has one copy of gradients and optimizer state on all N ranks and a second one of the parameters on "
    "each K: 16/N + 2/K bytes per parameter for 16/K; it gathers over all ranks in forward and within the K "
    "in backward, hybrid shard within the K in both, and sends gradients over the rest"
)
_LOADING = (
    "under FSDP rank 0 loads the whole model and sends the others their part; under ZeRO-3 every rank makes "
    "each layer and keeps its part: weights drawn from a seed come out as others, loaded ones don't"
)
_GATHERED = (
    "ZeRO's checkpoints are one file per rank whatever is asked; the key decides whether whole 16-bit "
    "weights are written when the model is saved"
)
SAVED = (
    "accelerate's get_state_dict gathers whole weights under FSDP2 with either type; the Trainer's "
    "save_model does so with FULL_STATE_DICT only"
)
_NUMERICS = (
    "fp32 masters under both; the dtypes of residuals, loss and reduction are the engine's: see the README"
)

PAIRS = (
    Pair(
        "fsdp_reshard_after_forward",
        True,
        ZERO + "stage",
        3,
        "16/N bytes per parameter, the same traffic",
        stages=(3,),
    ),
    Pair("fsdp_reshard_after_forward", False, ZERO + "stage", 2, _STAGE_2, is_same=False, stages=(2,)),
    Pair("fsdp_reshard_after_forward", False, ZERO + "stage", 1, _STAGE_1, False, (1,), "to_fsdp"),
    Pair("fsdp_offload_params", True, ZERO + "offload_optimizer.device", "cpu", _HOST, stages=(3,)),
    Pair("fsdp_offload_params", True, ZERO + "offload_param.device", "cpu", _HOST, stages=(3,)),
    Pair(
        *("fsdp_offload_params", True, ZERO + "offload_optimizer.device", "cpu"),
        "ZeRO-1 and 2 keep the parameters on the GPU, 2 bytes each, and copy them once per step; "
        "FSDP keeps them in host RAM and copies them whenever it gathers them; " + _HOST,
        is_same=False,
        stages=(1, 2),
    ),
    Pair(
        *("fsdp_offload_params", True, ZERO + "offload_optimizer.device", "nvme"),
        "FSDP has no disk: host RAM instead, 16 bytes per parameter over all ranks",
        *(False, (1, 2, 3), "to_fsdp"),
    ),
    Pair(
        *("fsdp_offload_params", True, ZERO + "offload_param.device", "nvme"),
        "FSDP has no disk: host RAM instead, 16 bytes per parameter over all ranks",
        *(False, (3,), "to_fsdp"),
    ),
    Pair("parallelism_config_dp_shard_size", ANY, ZERO + "zero_hpz_partition_size", ANY, _HPZ, False, (3,)),
    Pair("fsdp_cpu_ram_efficient_loading", True, INIT_FLAG, True, _LOADING, is_same=False, stages=(3,)),
    Pair("fsdp_cpu_ram_efficient_loading", False, INIT_FLAG, False, stages=(3,)),
    Pair(
        *("fsdp_state_dict_type", "FULL_STATE_DICT", GATHER, True),
        *(_GATHERED, False, (3,)),
    ),
    Pair(
        *("fsdp_state_dict_type", "SHARDED_STATE_DICT", GATHER, False),
        *(SAVED, True, (3,), "to_fsdp"),
    ),
    Pair("mixed_precision", "bf16", "bf16.enabled", True, _NUMERICS, stages=(0, 1, 2, 3)),
    Pair("mixed_precision", "fp16", "fp16.enabled", True, _NUMERICS, stages=(0, 1, 2, 3)),
)


def pairs_to_zero(key: str, value: Any, stage: int) -> list[tuple[str, Any, Pair]]:
    """Keys and values of a ZeRO configuration of that stage that stand for an FSDP setting."""
    found = [p for p in PAIRS if p.fsdp == key and p.way != "to_fsdp" and stage in p.stages]
    return [
        (p.zero, value if p.zero_value == ANY else p.zero_value, p) for p in found if _is(value, p.fsdp_value)
    ]


def pairs_to_fsdp(key: str, value: Any, stage: int) -> list[tuple[str, Any, Pair]]:
    """Keys and values of an FSDP configuration that stand for a ZeRO setting of that stage."""
    found = [p for p in PAIRS if p.zero == key and p.way != "to_zero" and stage in p.stages]
    return [
        (p.fsdp, value if p.fsdp_value == ANY else p.fsdp_value, p) for p in found if _is(value, p.zero_value)
    ]


def _is(value: Any, wanted: Any) -> bool:
    return wanted == ANY or (type(value) is type(wanted) and value == wanted)
