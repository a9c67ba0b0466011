"""Remove the optimizer and scheduler from a DeepSpeed JSON, because the script's flags decide both."""

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
_CHANGES_NOTHING = ("torch_adam",)  # selects one of two implementations


def optimizer_problems(deepspeed: dict[str, Any], config: RunConfig) -> list[str]:
    """Return why the flags can't replace the optimizer and scheduler sections; empty if they can."""
    problems = []
    for name in _SECTIONS:
        content = deepspeed.get(name) or {}
        params = content.get("params") or {} if isinstance(content, dict) else content
        if not isinstance(params, dict):
            problems.append(f"the DeepSpeed JSON's {name} is {deepspeed[name]!r}, not settings: remove it")
    section = deepspeed.get("optimizer")
    if problems or not section:
        return problems
    if config.numerics == "stock":
        return [
            "the DeepSpeed JSON has an optimizer, but the script has its own, so accelerate refuses it: "
            "remove the section, or leave out --numerics stock"
        ]
    kind, params = str(section.get("type")), section.get("params") or {}
    if kind.lower() == "muon":
        return [f"the DeepSpeed JSON's optimizer is {kind}: remove the section, and give --optim muon"]
    if kind.lower() not in ("adam", "adamw"):
        return [
            f"the DeepSpeed JSON's optimizer is {kind}, but the script has AdamW and Muon: remove the section"
        ]
    known = (*_FLAGS, *_REQUIRED, *_CHANGES_NOTHING)
    return [
        f"the DeepSpeed JSON's optimizer has {key} {value!r}, which the script's AdamW can't do: remove it"
        for key, value in params.items()
        if key not in known or value not in (_REQUIRED.get(key, value), "auto")
    ]


def without_optimizer(
    deepspeed: dict[str, Any], config: RunConfig, *, name: str
) -> tuple[dict[str, Any], str | None]:
    """Return the DeepSpeed settings without optimizer and scheduler, and a line; None if there is neither.

    The line names what was removed from the JSON called `name`, and the flags that are used instead.
    """
    removed = {section: deepspeed[section] for section in _SECTIONS if section in deepspeed}
    if not removed:
        return deepspeed, None
    json_flags: dict[str, str] = {}
    described = []
    for section, content in removed.items():
        words = [section, str((content or {}).get("type", ""))]
        params = (content or {}).get("params") or {}
        values = {key: value for key, value in params.items() if value != "auto"}
        words.append(", ".join(_described(key, value, config, json_flags) for key, value in values.items()))
        words.append('(all "auto")' * (bool(params) and not values))
        described.append(" ".join(filter(None, words)))
    line = f"note: removed from {name}: {'; '.join(described)}. The flags decide for all strategies: "
    used = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_steps")
    line += " ".join(f"--{flag} {getattr(config, flag):g}" for flag in used)
    line += f" --lr_scheduler_type {config.lr_scheduler_type}" * ("scheduler" in removed)
    if json_flags:
        line += f". The JSON's values: {' '.join(f'--{flag} {value}' for flag, value in json_flags.items())}"
    return {key: value for key, value in deepspeed.items() if key not in removed}, line


def _described(key: str, value: Any, config: RunConfig, json_flags: dict[str, str]) -> str:
    """Return `lr 5e-05 (--learning_rate 0.0003 is used)`; add the JSON's value to `json_flags`."""
    flags = _FLAGS.get(key, ())
    values = value if isinstance(value, list) else [value]
    if len(values) != len(flags):
        return f"{key} {value}"
    differing = {
        flag: number for flag, number in zip(flags, values, strict=True) if getattr(config, flag) != number
    }
    json_flags.update({flag: str(number) for flag, number in differing.items()})
    used = " ".join(f"--{flag} {getattr(config, flag):g}" for flag in differing)
    return f"{key} {value}" + f" ({used} is used)" * bool(differing)
