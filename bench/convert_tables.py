"""The tables of docs/doctor_and_convert.md, from those that `slm convert` uses."""

import re
from typing import Any

from slm_toolkit.convert.tables import FSDP_ALONE, INIT_FLAG, PAIRS, ZERO_ALONE, Pair


def tables() -> dict[str, str]:
    """Return each table as Markdown, by its heading."""
    pairs = [
        (
            _setting_text(pair.fsdp, pair.fsdp_value),
            _setting_text(pair.zero, pair.zero_value) + _stages_text(pair),
            pair.note or "nothing",
        )
        for pair in PAIRS
    ]
    return {
        "Pairs": _markdown(("FSDP2", "ZeRO", "what differs"), pairs),
        "FSDP2 alone": _one_sided(FSDP_ALONE, "ZeRO"),
        "ZeRO alone": _one_sided(ZERO_ALONE, "FSDP2"),
    }


def _one_sided(rows: dict[str, tuple[Any, ...]], other: str) -> str:
    cells = []
    for keys, (note, *values) in rows.items():
        named = ", ".join(f"`{_short(key)}`" for key in keys.split())
        same = dict.fromkeys(f"`{_value_text(value)}`" for value in values if value is not None)
        cells.append((named, ", ".join(same) or "-", note))
    return _markdown(("key", f"value that matches {other}", "under " + other), cells)


def _markdown(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _setting_text(key: str, value: Any) -> str:
    return f"`{_short(key)}: {_value_text(value)}`"


def _short(key: str) -> str:
    """Return a key without its section, except the parts of an offload and of a dtype."""
    return re.sub(r"^(fsdp_config|deepspeed_config|json)\.(zero_optimization\.)?", "", key)


def _value_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _stages_text(pair: Pair) -> str:
    """Return the stages that a pair needs, and its direction if it converts only one way."""
    is_any = pair.zero.endswith(".stage") or len(pair.stages) > 2 or pair.zero == INIT_FLAG
    stages = "" if is_any else f" (stage {' and '.join(map(str, pair.stages))})"
    return stages + {"both": "", "to_fsdp": ", to FSDP2 only", "to_zero": ", to ZeRO only"}[pair.way]
