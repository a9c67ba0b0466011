"""The optimizer and scheduler sections of a DeepSpeed JSON, in whose place the script's flags decide."""

from typing import Any

from slm_toolkit.config.run_config import RunConfig

_SECTIONS = ("optimizer", "scheduler")
_FLAGS = {  # a key of `params`: the flags that say the same
    "lr": ("learning_rate",),
    "betas": ("adam_beta1", "adam_beta2"),
    "eps": ("adam_epsilon",),
    "weight_decay": ("weight_decay",),
    "warmup_max_lr": ("learning_rate",),
    "warmup_num_steps": ("warmup_steps",),
}
_REQUIRED = {"adam_w_mode": True, "bias_correction": True, "amsgrad": False}
"keys of the optimizer whose other values make another optimizer than the script's AdamW"
_CHANGES_NOTHING = ("torch_adam",)  # which of two implementations


def optimizer_problems(deepspeed: dict[str, Any], config: RunConfig) -> list[str]:
    """Why the flags can't stand for the optimizer and scheduler sections; empty where they can."""
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
            "the DeepSpeed JSON has an optimizer, and accelerate refuses it beside the script's own: remove "
            "the section, or leave out --numerics stock"
        ]
    kind, params = str(section.get("type")), section.get("params") or {}
    if kind.lower() not in ("adam", "adamw"):
        return [f"the DeepSpeed JSON's optimizer is {kind}, the script has AdamW only: remove the section"]
    known = (*_FLAGS, *_REQUIRED, *_CHANGES_NOTHING)
    return [
        f"the DeepSpeed JSON's optimizer has {key} {value!r}, which the script's AdamW has not: remove it"
        for key, value in params.items()
        if key not in known or value not in (_REQUIRED.get(key, value), "auto")
    ]


def without_optimizer(
    deepspeed: dict[str, Any], config: RunConfig, *, name: str
) -> tuple[dict[str, Any], str | None]:
    """The DeepSpeed settings without optimizer and scheduler, and a line on both, None if there is neither.

    The line names what was taken out of the JSON called `name`, and the flags that are used instead.
    """
    found = {section: deepspeed[section] for section in _SECTIONS if section in deepspeed}
    if not found:
        return deepspeed, None
    wanted: dict[str, str] = {}
    described = []
    for section, content in found.items():
        words = [section, str((content or {}).get("type", ""))]
        values = (content or {}).get("params") or {}
        said = {key: value for key, value in values.items() if value != "auto"}
        words.append(", ".join(_described(key, value, config, wanted) for key, value in said.items()))
        words.append('(all "auto")' * (bool(values) and not said))
        described.append(" ".join(filter(None, words)))
    line = f"note: taken out of {name}: {'; '.join(described)}. The flags decide, for all strategies alike: "
    used = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "warmup_steps")
    line += " ".join(f"--{flag} {getattr(config, flag):g}" for flag in used)
    line += f" --lr_scheduler_type {config.lr_scheduler_type}" * ("scheduler" in found)
    if wanted:
        line += f". The JSON's values: {' '.join(f'--{flag} {value}' for flag, value in wanted.items())}"
    return {key: value for key, value in deepspeed.items() if key not in found}, line


def _described(key: str, value: Any, config: RunConfig, wanted: dict[str, str]) -> str:
    """`lr 5e-05 (--learning_rate 0.0003 is used)`; adds the flag that would give the JSON's value."""
    flags = _FLAGS.get(key, ())
    values = value if isinstance(value, list) else [value]
    if len(values) != len(flags):
        return f"{key} {value}"
    other = {flag: one for flag, one in zip(flags, values, strict=True) if getattr(config, flag) != one}
    wanted.update({flag: str(one) for flag, one in other.items()})
    used = " ".join(f"--{flag} {getattr(config, flag):g}" for flag in other)
    return f"{key} {value}" + f" ({used} is used)" * bool(other)
