"""Read and check the DeepSpeed settings of an accelerate YAML."""

from pathlib import Path
from typing import Any

from slm_toolkit.base.secrets import check_no_secrets
from slm_toolkit.base.typed_files import converted
from slm_toolkit.base.user_files import is_file, json_of, read_text, typed_path
from slm_toolkit.strategy.settings import DeepSpeedSettings, value_at

# YAML keys that accelerate refuses if the YAML also names a DeepSpeed JSON, and the JSON's keys for the same
# settings: accelerate 1.15, utils/dataclasses.py, DeepSpeedPlugin.
KEYS_OF_THE_JSON = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}

# keys that only a DeepSpeed JSON has; in TrainingArguments bf16 and fp16 are true or false
_MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "bf16", "fp16")


def is_deepspeed_config(settings: dict[str, Any]) -> bool:
    """Return True if a file's settings are DeepSpeed's, not accelerate's or transformers'."""
    marks = [key for key in _MARKS if key in settings and not isinstance(settings[key], bool)]
    return bool(marks) and "distributed_type" not in settings


def deepspeed_config_path(named: str, yaml_path: Path) -> Path | None:
    """Find a `deepspeed_config_file`: in the working folder (as accelerate does), else near the YAML."""
    candidates = (typed_path(named), yaml_path.parent / named, yaml_path.parent.parent / named)
    return next((candidate.resolve() for candidate in candidates if is_file(candidate)), None)


def read_deepspeed_config(
    section: dict[str, Any], path: Path, *, mixed_precision: object, content: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the DeepSpeed settings of a YAML's `deepspeed_config` section.

    `content` is the content of the JSON that the section names, if already read. Raises ValueError if the
    JSON is missing or not valid, or if a setting is in both files.
    """
    named = section.get("deepspeed_config_file")
    if named is None:  # the YAML itself contains the settings
        config = settings_of_yaml(section)
        _check_types(config, path)
        return config
    json_path = deepspeed_config_path(str(named), path)
    if json_path is None:
        raise ValueError(
            f"{path}: deepspeed_config_file {named!r} not found in this folder or near the YAML\n"
            "hint: `slm configs --copy DIR` writes both folders"
        )
    hint = "compare with ds_configs/zero2.json"
    config = json_of(read_text(json_path, hint=hint), json_path, hint=hint) if content is None else content
    _check_types(config, json_path)
    check_no_secrets(config, json_path)
    twice = [
        f"{path}: {key} {section[key]!r} contradicts {json_path.name}, "
        f"where {'.'.join(json_keys)} is {value_at(config, json_keys)!r}"
        for key, json_keys in KEYS_OF_THE_JSON.items()
        if key in section
    ]
    if mixed_precision is not None:
        twice.append(f"{path}: mixed_precision {mixed_precision!r} together with {json_path.name}")
    if twice:
        raise ValueError("\n".join(twice) + "\nhint: accelerate refuses them: keep them in the JSON only")
    return config


def settings_of_yaml(section: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed settings that accelerate makes of a YAML that names no JSON."""
    config: dict[str, Any] = {"zero_optimization": {"stage": 2}}  # accelerate's default
    for name, (*above, key) in KEYS_OF_THE_JSON.items():
        if name in section:
            content = config
            for part in above:
                content = content.setdefault(part, {})
            content[key] = section[name]
    return config


def _check_types(config: Any, path: Path) -> None:
    try:
        converted(config, DeepSpeedSettings)
    except ValueError as error:
        hint = "compare with ds_configs/zero3.json: a stage is 0 to 3, a device none, cpu or nvme"
        raise ValueError(f"{path}: {error}\nhint: {hint}") from None
