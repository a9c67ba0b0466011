"""The table of docs/doctor_and_convert.md, from the one that `slm convert` uses."""

import re
from typing import Any

from slm_toolkit.convert.tables import INIT_FLAG, PAIRS, Pair


def pairs_table() -> str:
    """Return the pairs of settings that convert both ways, as Markdown."""
    pairs = [
        (
            _setting_text(pair.fsdp, pair.fsdp_value),
            _setting_text(pair.zero, pair.zero_value) + _stages_text(pair),
            pair.note or "nothing",
        )
        for pair in PAIRS
        if pair.way == "both"
    ]
    lines = [("FSDP2", "ZeRO", "what differs"), ("---",) * 3, *pairs]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _setting_text(key: str, value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    short = re.sub(r"^(fsdp_config|deepspeed_config|json)\.(zero_optimization\.)?", "", key)
    return f"`{short}: {text}`"


def _stages_text(pair: Pair) -> str:
    """Return the stages that a pair needs."""
    is_any = pair.zero.endswith(".stage") or len(pair.stages) > 2 or pair.zero == INIT_FLAG
    return "" if is_any else f" (stage {' and '.join(map(str, pair.stages))})"
