"""Cases for `slm doctor`: what each shipped strategy is meant for, and files with a fault planted in them."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from faulty_files import HYBRID, Planted

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.doctor.case import Case, Host, read_files
from slm_toolkit.doctor.finding import REMOVE
from slm_toolkit.model.names import find_model
from slm_toolkit.strategy.strategy import config_dir


class Meant(NamedTuple):
    """What a strategy is for: a model that needs it, where its communication can hide."""

    model: str
    gpu: str
    num_gpus: int
    batch: int


# The training state of 2.2B parameters is 35 GB: whole it does not fit with room on 40 GB; that of 3B is 48
# GB, and halves of it do not fit on 24.
_LARGE = Meant("slm-2b-hw", "a100-40gb", 8, 8)
_TWO_NODES = Meant("slm-2b-hw", "a100-40gb", 16, 8)
_SMALL_CARDS = Meant("slm-3b", "l4", 2, 3)
MEANT = {
    "single": Meant("slm-1b-hw", "h100-80gb", 1, 8),
    "ddp": Meant("slm-1b-hw", "h100-80gb", 8, 8),
    **dict.fromkeys(("fsdp_full_shard", "fsdp_shard_grad_op", "ds_zero1", "ds_zero2", "ds_zero3"), _LARGE),
    **dict.fromkeys(("fsdp_hybrid_shard", "ds_zeropp", "ds_zeropp_quantized"), _TWO_NODES),
    **dict.fromkeys(("fsdp_full_shard_offload", "ds_zero2_offload", "ds_zero3_offload"), _SMALL_CARDS),
    "ds_zero3_nvme": _SMALL_CARDS,
}


def clean(base: str) -> Planted:
    """The shipped files of `base` as a user's own; groups of a hybrid shard follow the nodes in ours only."""
    sizes = {"dp_replicate_size": 2, "dp_shard_size": MEANT[base].num_gpus // 2}
    groups = {f"parallelism_config.parallelism_config_{name}": size for name, size in sizes.items()}
    return Planted("", base, groups if base == HYBRID else {})


def planted_case(planted: Planted, folder: Path) -> Case:
    """Real files with the fault in them, and all else as the strategy is meant."""
    meant = MEANT[planted.base]
    config = yaml.safe_load((config_dir("accel_configs") / f"{planted.base}.yaml").read_text())
    if (named := config.get("deepspeed_config", {}).get("deepspeed_config_file")) is not None:
        content = json.loads((config_dir("ds_configs") / Path(named).name).read_text())
        for key, value in planted.json.items():
            put(content, key.split("."), value)
        (folder / "mine.json").write_text(planted.more_text.get("json") or json.dumps(content, indent=2))
        config["deepspeed_config"]["deepspeed_config_file"] = "mine.json"
    for key, value in {**clean(planted.base).yaml, **planted.yaml}.items():
        put(config, key.split("."), value)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False) + planted.more_text.get("yaml", ""))
    changes = dict(planted.case)
    model = changes.pop("model", meant.model)
    flags = {"kernels": "loss", "per_device_train_batch_size": meant.batch, **planted.flags}
    case = Case(
        "mine",
        read_files(path),
        find_model(model),
        RunConfig(**flags).with_defaults(has_gpu=True),
        Host(**planted.host),
        num_gpus=meant.num_gpus,
        gpus_per_node=8,
        gpu_names=(meant.gpu,),
        gpus_given=True,
    )
    return dataclasses.replace(case, **changes)


def put(content: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        content = content.setdefault(key, {})
    if value is REMOVE:
        content.pop(keys[-1], None)
    else:
        content[keys[-1]] = value
