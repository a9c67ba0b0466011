"""Remove the optimizer and scheduler from a DeepSpeed JSON, because the script's flags decide both."""

import dataclasses
from pathlib import Path
from typing import Any

from slm_toolkit.config.run_config import RunConfig

_SECTIONS = ("optimizer", "scheduler")
_FLAGS = {  # a key of `params`: the equivalent flags
    "lr": ("learning_rate",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
    "weight_decay": ("weight_decay",),
    "warmup_max_lr": ("learning_rate",),
    "warmup_num_steps": ("warmup_steps",),
}
_REQUIRED = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
"optimizer keys, with the only value that matches the script's AdamW"


def optimizer_problems(deepspeed: dict[str, Any], config: RunConfig) -> list[str]:
    """Return why the flags can't replace the optimizer and scheduler sections; empty if they can."""
    problems = [
        f"the DeepSpeed JSON's {name} is {content!r}, not settings: remove it"
        for name in _SECTIONS
        if (content := deepspeed.get(name))
        and not (isinstance(content, dict) and isinstance(content.get("params") or {}, dict))
    ]
    section = deepspeed.get("optimizer")
    if problems or not section:
        return problems
    if config.numerics == "stock":
        return [
            "the DeepSpeed JSON has an optimizer, but the script has its own, so accelerate refuses it: "
            "remove the section, or leave out --numerics stock"
        ]
    kind, params = str(section.get("type")), section.get("params") or {}
    if kind.lower() not in ("adam", "adamw"):
        return [
            f"the DeepSpeed JSON's optimizer is {kind}, but the script has AdamW and Muon: remove the "
            "section, and choose with --optim"
        ]
    known = (*_FLAGS, *_REQUIRED, "torch_adam")  # torch_adam selects one of two implementations
    return [
        f"the DeepSpeed JSON's optimizer has {key} {value!r}, which the script's AdamW can't do: remove it"
        for key, value in params.items()
        if key not in known or value not in (_REQUIRED.get(key, value), "auto")
    ]


def as_flags_say(strategy: Any, config: RunConfig) -> tuple[Any, str | None]:
    """Return a Strategy without its JSON's optimizer and scheduler, and a line that names what was removed.

    The script creates the optimizer and sets the learning rate from its flags; the line has the JSON's values
    that differ. It is None if the JSON has neither section.
    """
    deepspeed = strategy.deepspeed_config or {}
    removed = {section: deepspeed[section] or {} for section in _SECTIONS if section in deepspeed}
    if not removed:
        return strategy, None
    differing = [
        f"--{flag} {number}"
        for content in removed.values()
        for key, value in (content.get("params") or {}).items()
        for flag, number in zip(
            _FLAGS.get(key, ()), value if isinstance(value, list) else [value], strict=False
        )
        if number not in ("auto", getattr(config, flag))
    ]
    kinds = ", ".join(f"{section} {content.get('type', '')}".strip() for section, content in removed.items())
    name = Path(strategy.deepspeed_config_file or strategy.path or strategy.name).name
    line = f"note: removed from {name}: {kinds}. The flags decide for all strategies"
    if differing:
        line += f". The JSON's values: {' '.join(differing)}"
    kept = {key: value for key, value in deepspeed.items() if key not in removed}
    return dataclasses.replace(strategy, deepspeed_config=kept), line
