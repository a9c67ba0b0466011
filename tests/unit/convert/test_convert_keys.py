"""What becomes of each key of an FSDP section and of a DeepSpeed JSON."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import FSDP2
from conversions import converted, row, write

FSDP_CASES = [  # lines under fsdp_config; the key asked about; what becomes of it; where
    (
        "fsdp_offload_params: true",
        "fsdp_offload_params",
        "carried",
        "zero_optimization.offload_param.device: cpu",
    ),
    (
        "fsdp_offload_params: 'True'\n  fsdp_reshard_after_forward: false",
        *("fsdp_offload_params", "nearest", "zero_optimization.offload_optimizer.device: cpu"),
    ),
    (
        "fsdp_reshard_after_forward: false",
        "fsdp_reshard_after_forward",
        "nearest",
        "zero_optimization.stage: 2",
    ),
    ("fsdp_activation_checkpointing: true", "fsdp_activation_checkpointing", "no counterpart", ""),
    (
        "fsdp_cpu_ram_efficient_loading: true",
        "fsdp_cpu_ram_efficient_loading",
        "nearest",
        "zero3_init_flag: true",
    ),
    (
        "fsdp_cpu_ram_efficient_loading: true\n  fsdp_reshard_after_forward: false",
        *("fsdp_cpu_ram_efficient_loading", "no counterpart", ""),
    ),
    ("fsdp_state_dict_type: FULL_STATE_DICT", "fsdp_state_dict_type", "nearest", "on_model_save: true"),
    ("fsdp_min_num_params: 1000", "fsdp_min_num_params", "no counterpart", ""),
    ("fsdp_ignored_modules: lm_head", "fsdp_ignored_modules", "no counterpart", ""),
    ("fsdp_use_orig_params: true", "fsdp_use_orig_params", "ignored", ""),
    ("fsdp_offload: true", "fsdp_offload", "ignored", ""),  # misspelt: accelerate reads no such key
]


@pytest.mark.parametrize(("lines", "key", "fate", "to"), FSDP_CASES)
def test_fsdp_to_zero(lines: str, key: str, fate: str, to: str, tmp_path: Path) -> None:
    source = write(tmp_path, f"{FSDP2}  {lines}\nnum_processes: 2\n")
    found = row(converted(source, to="accelerate_deepspeed"), f"fsdp_config.{key}")
    assert found.fate == fate
    assert to in ", ".join(found.to)
    assert bool(found.to) == bool(to)


ZERO_CASES = [  # a JSON; the key asked about; what becomes of it; where
    ({"stage": 1}, "stage", "nearest", "fsdp_reshard_after_forward: false"),
    ({"stage": 3, "zero_quantized_weights": True}, "zero_quantized_weights", "no counterpart", ""),
    ({"stage": 3, "zero_quantized_weights": False}, "zero_quantized_weights", "default", ""),
    ({"stage": 3, "overlap_comm": True}, "overlap_comm", "default", ""),
    ({"stage": 3, "overlap_comm": False}, "overlap_comm", "no counterpart", ""),
    ({"stage": 3, "stage3_max_reuse_distance": 10**9}, "stage3_max_reuse_distance", "no counterpart", ""),
    ({"stage": 3, "zero_hpz_partition_size": 1}, "zero_hpz_partition_size", "default", ""),
    ({"stage": 3, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size", "default", ""),
    (
        {"stage": 3, "zero_hpz_partition_size": 4},
        "zero_hpz_partition_size",
        "nearest",
        "dp_replicate_size: 2",
    ),
    (
        {"stage": 3, "offload_param": {"device": "cpu"}},
        "offload_param.device",
        "nearest",
        "fsdp_offload_params: true",
    ),
    ({"stage": 2, "offload_optimizer": {"device": "none"}}, "offload_optimizer.device", "default", ""),
    (
        {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/d"}},
        *("offload_optimizer.nvme_path", "no counterpart", ""),
    ),
    (
        {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        *("stage3_gather_16bit_weights_on_model_save", "carried", "fsdp_state_dict_type: SHARDED_STATE_DICT"),
    ),
]


@pytest.mark.parametrize(("zero", "key", "fate", "to"), ZERO_CASES)
def test_zero_to_fsdp(zero: dict[str, Any], key: str, fate: str, to: str, tmp_path: Path) -> None:
    source = write(tmp_path, json.dumps({"zero_optimization": zero}), "mine.json")
    found = row(converted(source, to="accelerate_fsdp", num_processes=8), f"zero_optimization.{key}")
    assert found.fate == fate
    assert to in ", ".join(found.to)
    assert bool(found.to) == bool(to)


def test_numbers_of_a_json_that_the_script_decides_are_named(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    }
    source = write(tmp_path, json.dumps(config), "mine.json")
    fsdp = converted(source, to="accelerate_fsdp", num_processes=2)
    assert yaml.safe_load(fsdp.files["mine_as_fsdp.yaml"])["mixed_precision"] == "bf16"
    fates = {
        key: row(fsdp, key).fate
        for key in ("gradient_clipping", "optimizer.params.lr", "gradient_accumulation_steps")
    }
    assert list(fates.values()) == ["no counterpart", "no counterpart", "default"]
