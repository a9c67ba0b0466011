"""`real_configs.py FOLDER`: what accelerate, transformers and DeepSpeed make of the files there, as JSON."""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers.integrations import unset_hf_deepspeed_config

OWN = dict(os.environ)


def fsdp_facts(plugin: FullyShardedDataParallelPlugin) -> dict[str, Any]:
    return {
        "version": plugin.fsdp_version,
        "reshard": plugin.reshard_after_forward,
        "offload": type(plugin.cpu_offload).__name__,
        "wrap": getattr(plugin.auto_wrap_policy, "__name__", None),
        "state_dict": plugin.state_dict_type.name,
        "ram_efficient": bool(plugin.cpu_ram_efficient_loading),
        "checkpointing": bool(plugin.activation_checkpointing),
    }


def deepspeed_facts(plugin: DeepSpeedPlugin) -> dict[str, Any]:
    zero = plugin.deepspeed_config["zero_optimization"]
    model = DeepSpeedZeroConfig(**{key: value for key, value in zero.items() if value != "auto"})
    return {
        "stage": plugin.zero_stage,
        "init": plugin.zero3_init_flag,
        "optimizer": model.offload_optimizer and str(model.offload_optimizer.device),
        "param": model.offload_param and str(model.offload_param.device),
    }


def of_yaml(path: Path) -> dict[str, Any]:
    """What `accelerate launch` would tell the ranks, and what these would make of it."""
    load_config_from_file(str(path))
    words = ["--config_file", str(path), "--main_process_port", "0", "script.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        _, env = prepare_deepspeed_cmd_env(args)
    else:
        env = prepare_multi_gpu_env(args)
    os.environ.update(env)
    facts: dict[str, Any] = {"ranks": args.num_processes}
    if args.use_deepspeed:
        facts |= deepspeed_facts(DeepSpeedPlugin())
    elif args.use_fsdp:
        facts |= fsdp_facts(FullyShardedDataParallelPlugin())
    return facts


def of_file(path: Path) -> dict[str, Any]:
    """An error of the library is a fact, too."""
    os.environ.clear()
    os.environ.update(OWN)
    try:
        return of_yaml(path)
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        return {"error": str(error)}
    finally:
        unset_hf_deepspeed_config()


if __name__ == "__main__":
    found = {path.name: of_file(path) for path in sorted(Path(sys.argv[1]).iterdir())}
    found["ClusterConfig"] = [field.name for field in dataclasses.fields(ClusterConfig)]
    print(json.dumps(found))
