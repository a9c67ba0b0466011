"""What accelerate's launcher, its plugins and DeepSpeed make of YAMLs: a JSON of answers by path.

python tests/contracts/launcher_says.py YAML...
"""

import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401 - its import patches what accelerate then finds
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from deepspeed.runtime.config import DeepSpeedConfig

_OF_LAUNCHES = ("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_")


def environment_of(path: str) -> dict[str, str]:
    """What `accelerate launch --config_file path` would hand to its ranks; raises what it would raise."""
    args = launch_command_parser().parse_args(["--config_file", path, "--main_process_port", "0", "train.py"])
    args, defaults, has_precision = _validate_launch_command(args)
    if args.use_deepspeed:
        fields = [*defaults.deepspeed_config, *(["mixed_precision"] if has_precision else [])]
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        return prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.multi_gpu:
        return prepare_multi_gpu_env(args)
    return {}


def plugin_of(variables: dict[str, str]) -> dict[str, Any]:
    """The plugin that a rank makes of it, and DeepSpeed's own reading of what the plugin holds."""
    if variables.get("ACCELERATE_USE_FSDP") == "true":
        plugin = FullyShardedDataParallelPlugin()
        names = ("reshard_after_forward", "sharding_strategy", "backward_prefetch", "use_orig_params")
        names += ("fsdp_version", "cpu_offload", "state_dict_type", "cpu_ram_efficient_loading")
        names += ("activation_checkpointing",)
        return {name: str(getattr(plugin, name)) for name in names}
    if variables.get("ACCELERATE_USE_DEEPSPEED") == "true":
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision("bf16")
        content = plugin.deepspeed_config
        sizes = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
        for key, value in sizes.items():
            content[key] = value if content.get(key, "auto") == "auto" else content[key]
        shown = json.loads(json.dumps(content, default=str))
        of_one_rank = content["train_micro_batch_size_per_gpu"] * content["gradient_accumulation_steps"]
        DeepSpeedConfig({**content, "train_batch_size": of_one_rank})
        return {"zero3_init_flag": plugin.zero3_init_flag, "config": shown}
    return {}


def answer(path: str) -> dict[str, Any]:
    before = dict(os.environ)
    try:
        variables = environment_of(path)
        own = {name: value for name, value in variables.items() if name.startswith(_OF_LAUNCHES)}
        os.environ.update(own)
        return {"refused": None, "variables": own, "plugin": plugin_of(own)}
    except Exception as error:  # whatever it is, a launch would end with it
        return {"refused": f"{type(error).__name__}: {error}"}
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    answers = {}
    for name in sys.argv[1:]:
        os.chdir(Path(name).parent)  # where accelerate looks for the JSON
        answers[name] = answer(name)
    print(json.dumps(answers))
