"""The tables of docs/doctor_and_convert.md, from those that `slm convert` uses."""

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
