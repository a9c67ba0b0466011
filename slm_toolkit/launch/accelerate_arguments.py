"""The words of an `accelerate launch` command: the launcher's own options, and those of its script."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slm_toolkit.record.run_record import installed_versions
from slm_toolkit.strategy.strategy import Strategy, on_nodes

_LAUNCHING_MODULES = ("accelerate.commands.launch", "slm_toolkit.launch.launcher")


def launch_arguments(words: list[str]) -> list[str] | None:
    """What follows `accelerate launch` in a command line; None where it is another command."""
    for index, word in enumerate(words):
        if Path(word).name == "accelerate" and words[index + 1 : index + 2] == ["launch"]:
            return words[index + 2 :]
        if Path(word).name == "accelerate-launch" or word in _LAUNCHING_MODULES:
            return words[index + 1 :]
    return None


def arguments_of(words: list[str], module: str) -> list[str] | None:
    """The words of the script after `-m module`; None where another script is launched."""
    split = next((index for index, word in enumerate(words) if word in _MODULE), len(words))
    return words[split + 2 :] if words[split + 1 : split + 2] == [module] else None


def option(command: tuple[str, ...], name: str) -> str | None:
    """The value of one of the launcher's own options; those after the script belong to the script."""
    for index, word in enumerate(command):
        if word in _MODULE:
            return None
        key, equals, value = word.partition("=")
        if key.replace("-", "_") == f"__{name}":
            return value if equals else " ".join(command[index + 1 : index + 2])
    return None


def said_alike(
    command: tuple[str, ...], strategy: Strategy | None, *, num_machines: int, num_processes: int
) -> dict[str, Any]:
    """What every machine of a launch must say alike, as JSON has it: all but its number and the addresses.

    The YAML counts by its content. Of a script that is not given by -m, its options are not told from the
    launcher's.
    """
    split = next((index for index, word in enumerate(command) if word in _MODULE), len(command))
    launcher = {name: value for name, value in _by_flag(command[:split]).items() if name not in _OF_MACHINE}
    said = {
        "num_machines": num_machines,
        "num_processes": num_processes,
        "launcher": {name: value for name, value in launcher.items() if name not in _SAID_APART},
        "script": _by_flag(command[split + 1 :]),
        "versions": installed_versions(),
    }
    if strategy is not None and strategy.accelerate_config is not None:
        config = on_nodes(strategy, num_machines).accelerate_config
        deepspeed = {**(config.get("deepspeed_config") or {}), "deepspeed_config_file": None}
        said["YAML"] = {**config, "num_processes": None, "deepspeed_config": deepspeed}
        said["DeepSpeed JSON"] = strategy.deepspeed_config
    return json.loads(json.dumps(said, default=str))


_MODULE = ("-m", "--module")
_OF_MACHINE = ("config_file", "machine_rank", "main_process_ip", "main_process_port", "rdzv_conf")
"the launcher's options that may differ from machine to machine"
_SAID_APART = ("num_machines", "num_processes")


def _by_flag(words: Iterable[str]) -> dict[str, str]:
    """`--seed 1 --json`: {"seed": "1", "json": ""}; what comes before the first flag is under ""."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = value
        else:
            found[name] = f"{found.get(name, '')} {word}".strip()
    return found
