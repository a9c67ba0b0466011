"""Print the tables of docs/doctor_and_convert.md: `python -m slm_toolkit.convert.tables`."""

from typing import Any

from slm_toolkit.convert.engines import (
    FSDP_ALONE,
    INIT_FLAG,
    PAIRS,
    PLUGIN_ALONE,
    ZERO,
    ZERO_ALONE,
    Alone,
    Pair,
)
from slm_toolkit.convert.trainer_keys import DEEPSPEED_ARGUMENTS, FSDP_KEYS, TORCHRUN, USE_GROUPS, VARIABLES


def tables() -> dict[str, str]:
    """Return each table as Markdown, by its heading."""
    return {
        "Pairs": _markdown(
            ("FSDP2", "ZeRO", "what differs"),
            [
                (
                    _setting_text(p.fsdp, p.fsdp_value),
                    _setting_text(p.zero, p.zero_value) + _stages_text(p),
                    p.note or "nothing",
                )
                for p in PAIRS
            ],
        ),
        "FSDP2 alone": _one_sided(FSDP_ALONE, "ZeRO"),
        "ZeRO alone": _one_sided((*ZERO_ALONE, *PLUGIN_ALONE), "FSDP2"),
        "FSDP2 in accelerate and in transformers": _markdown(
            ("accelerate's `fsdp_config`", "if absent", "TrainingArguments' `fsdp_config`", "if absent"),
            [
                (
                    f"`{key.accelerate}`",
                    _value_text(key.launch_default),
                    f"`{key.trainer}`"
                    if key.trainer
                    else f"`{VARIABLES[key.accelerate]}=...` before the command",
                    _value_text(key.trainer_default),
                )
                for key in FSDP_KEYS
            ],
        ),
        "The launcher": _markdown(
            ("accelerate YAML", "without accelerate's launcher"),
            [
                ("`num_processes`", "`torchrun --nproc_per_node`: processes of one machine"),
                *((f"`{key}`", f"`torchrun {option}`") for key, option in TORCHRUN.items()),
                ("`mixed_precision: bf16`, `fp16`", "`--bf16`, `--fp16`"),
                ("`dynamo_config`", "`--torch_compile`, `--torch_compile_backend`, `--torch_compile_mode`"),
                *(
                    (f"`{key}`", _variable_text(key, name))
                    for key, name in VARIABLES.items()
                    if key[:5] != "fsdp_"
                ),
            ],
        ),
        "DeepSpeed's numbers": _markdown(
            ("DeepSpeed JSON", "TrainingArguments"),
            [
                (f"`{key}`", ", ".join(f"`{name}`" for name in names))
                for key, names in DEEPSPEED_ARGUMENTS.items()
            ],
        ),
    }


def _one_sided(rows: tuple[Alone, ...], other: str) -> str:
    cells = [(_key_text(row.key), _values_text(row.as_other), row.note) for row in rows]
    return _markdown(("key", f"value that matches {other}", "under " + other), cells)


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _setting_text(key: str, value: Any) -> str:
    return f"`{key.removeprefix(ZERO)}: {str(value).lower() if isinstance(value, bool) else value}`"


def _stages_text(pair: Pair) -> str:
    """Return the stages that a pair needs, and its direction if it converts only one way."""
    is_any = pair.zero == f"{ZERO}stage" or len(pair.stages) > 2 or pair.zero == INIT_FLAG
    stages = "" if is_any else f" (stage {' and '.join(map(str, pair.stages))})"
    return stages + {"both": "", "to_fsdp": ", to FSDP2 only", "to_zero": ", to ZeRO only"}[pair.way]


def _key_text(key: str) -> str:
    if not key:
        return "all other keys"
    if key.endswith("."):
        return f"other keys of `{key.rstrip('.')}`"
    return f"`{key.removeprefix(ZERO)}`"


def _value_text(value: Any) -> str:
    return "-" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _values_text(values: tuple[Any, ...]) -> str:
    return ", ".join(dict.fromkeys(_value_text(value) for value in values if value is not None)) or "-"


def _variable_text(key: str, name: str) -> str:
    return f"`{USE_GROUPS}=true {name}=...`" if key.startswith("parallelism") else f"`{name}=...`"


if __name__ == "__main__":
    print("\n\n".join(f"{heading}\n\n{table}" for heading, table in tables().items()))
