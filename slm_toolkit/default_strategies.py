"""The strategies of a command that names none: the studied six, but for those that can't take its flags."""

import dataclasses
from typing import Any

from slm_toolkit.flags import every_config
from slm_toolkit.strategy import STUDIED_STRATEGIES, Strategy, contradictions, find_strategy, notes_on


def strategies_asked(
    names: list[str] | None, given: dict[str, Any], *, has_gpu: bool
) -> tuple[list[Strategy], list[str]]:
    """What `--strategy` names; without it the six. Also lines on what is left out, and on DeepSpeed JSONs.

    given: field name of RunConfig to a value or a list of values. Where none of the six can take them all are
    returned, for the command to say what is wrong.
    """
    if names is not None:
        named = [find_strategy(name) for name in dict.fromkeys(names)]
        return named, notes_on(named)
    configs = [config.with_defaults(has_gpu=has_gpu) for config in every_config(given)]
    kept, left_out = [], []
    for strategy in map(find_strategy, STUDIED_STRATEGIES):
        named = dataclasses.replace(strategy, path=None)  # nobody has named its file
        if found := [problem for config in configs for problem in contradictions(named, config)]:
            left_out.append(f"left out: {found[0]}")
        else:
            kept.append(strategy)
    return (kept, left_out) if kept else ([find_strategy(name) for name in STUDIED_STRATEGIES], [])
