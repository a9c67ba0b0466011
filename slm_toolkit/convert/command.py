"""Parse and build training commands: launcher, script, and the arguments that define sharding."""

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from slm_toolkit.base.secrets import without_secrets
from slm_toolkit.convert.settings import KeyAccount, Setting, truth
from slm_toolkit.convert.trainer_keys import (
    ARGUMENTS_READ,
    BARE,
    DEEPSPEED_LAUNCHER,
    TORCHRUN,
    USE_GROUPS,
    VARIABLES,
)

SCRIPT = "train.py"
"placeholder for the user's script if the source names none"
_BARE_OPTIONS = (  # options of torchrun and deepspeed without a value
    *("--standalone", "--module", "-m", "--no_python", "--run_path", "--virtual_local_rank"),
    *("--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--bind_cores_to_rank"),
)
_NUM_PER_NODE = ("--nproc_per_node", "--num_gpus", "--num_accelerators")
_NUM_NODES = ("--nnodes", "--num_nodes")
_AS_ACCELERATE = {"--standalone": "accelerate finds a free port itself"}


@dataclass
class CommandSource:
    """A parsed command."""

    launch: dict[str, tuple[Any, str]] = field(default_factory=dict)
    "accelerate's keys, each with its value and the option that set it"
    more: list[Setting] = field(default_factory=list)
    "settings of deepspeed_config, parallelism_config and fsdp_config, from the launcher or the environment"
    arguments: dict[str, Any] = field(default_factory=dict)
    "TrainingArguments that define sharding"
    script: list[str] = field(default_factory=list)
    "the script and its other arguments"
    environment: list[str] = field(default_factory=list)
    "NAME=value words that have nothing to do with sharding"
    rows: list[KeyAccount] = field(default_factory=list)


def command_source(words: list[str]) -> CommandSource:
    """Parse a command. Raises ValueError unless it launches a script with TrainingArguments."""
    if len(words) == 1:
        try:
            words = shlex.split(words[0])
        except ValueError as error:  # a quote that is not closed
            raise ValueError(f"can't parse the command: {error}\nhint: quote it as a shell would") from None
    source = CommandSource()
    rest = _environment(words, source)
    source.environment = without_secrets(source.environment)
    if not rest:
        raise ValueError(
            "the command has no script and no argument\nhint: slm convert --to FORM -- torchrun ..."
        )
    if not rest[0].startswith("-"):
        rest = _launcher(rest, source)
        source.script, rest = rest[: _script_length(rest)], rest[_script_length(rest) :]
    _arguments(rest, source)
    source.script = without_secrets(source.script)
    return source


def script_of(words: Iterable[str]) -> list[str]:
    """Return the script and its arguments, with SCRIPT as the script if the source names none."""
    script = list(words)
    has_none = not script or (script[0].startswith("--") and script[0] != "--module")
    return [SCRIPT, *script] if has_none else script


def launch_values(settings: Iterable[Setting]) -> dict[str, Any]:
    """Return the settings of accelerate's launcher, by key."""
    return {s.path[0]: s.value for s in settings if s.section == "launch" and s.value is not None}


def torchrun_options(values: dict[str, Any]) -> dict[str, str]:
    """Return torchrun's option for each of accelerate's keys; on one machine few keys need one."""
    num, nodes = values.get("num_processes"), values.get("num_machines") or 1
    options = {"num_processes": f"--nproc_per_node {'N' if num is None else num // nodes}"}
    port = values.get("main_process_port")
    if nodes == 1:
        return options if port is None else {**options, "main_process_port": f"--master_port {port}"}
    if (backend := values.get("rdzv_backend", "static")) == "static":
        return options | {key: f"{option} {values[key]}" for key, option in TORCHRUN.items() if key in values}
    endpoint = ":".join(str(values[key]) for key in ("main_process_ip", "main_process_port") if key in values)
    options |= {"num_machines": f"--nnodes {nodes}", "rdzv_backend": f"--rdzv_backend {backend}"}
    return options | dict.fromkeys(("main_process_ip", "main_process_port"), f"--rdzv_endpoint {endpoint}")


def torchrun_command(
    settings: Iterable[Setting], environment: list[str], script: list[str], arguments: list[str]
) -> list[str]:
    """Return a command for `torchrun` (python for one process) with the settings of accelerate's launcher."""
    values = launch_values(settings)
    if values.get("num_processes") == 1:
        return [*environment, "python", *script, *arguments]
    options = dict.fromkeys(torchrun_options(values).values())
    return [*environment, "torchrun", *(word for o in options for word in o.split()), *script, *arguments]


def _environment(words: list[str], source: CommandSource) -> list[str]:
    """Read the NAME=value words in front into `source`; return the other words."""
    keys = {variable: key for key, variable in VARIABLES.items()}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"\w+", name):
            return words[index:]
        key = keys.get(name)
        if name == USE_GROUPS:
            continue
        if key is None:
            source.environment.append(word)
        elif key.startswith("parallelism_config_"):
            source.more.append(Setting("groups", (key,), _count(value, name), name, _count(value, name)))
        elif key.startswith("fsdp_"):
            setting_value = truth(value, name) if key.endswith("_offload") else value
            source.more.append(Setting("fsdp", (key,), setting_value, name, value))
        else:
            source.launch[key] = (value if key == "gpu_ids" else truth(value, name), name)
    return []


def _count(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9):
        raise ValueError(f"{name} is {text!r}\nhint: use a whole number of ranks")
    return int(text)


def _launcher(words: list[str], source: CommandSource) -> list[str]:
    """Read the launcher and its options into `source`; return the script and its arguments."""
    name = words[0].rsplit("/", 1)[-1]
    if name.startswith("accelerate"):
        raise ValueError(
            "accelerate launch reads its settings from a YAML\nhint: slm convert THE.yaml --to ..."
        )
    if name.endswith(".py"):
        return words
    if re.fullmatch(r"python[\d.]*", name):
        if words[1:3] not in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            source.launch["num_processes"] = (1, name)
            return words[1:]
        words = words[2:]
    elif name not in ("torchrun", "deepspeed"):
        raise ValueError(
            f"unknown launcher {words[0]}\nhint: use torchrun, deepspeed, python, or arguments alone"
        )
    options, rest = _options(words[1:])
    numbers: dict[str, tuple[int, str]] = {}
    for option, value in options:
        _option(option, value, numbers, source)
    if "per_node" in numbers:
        per_node, per_node_option = numbers["per_node"]
        nodes, nodes_option = numbers.get("nodes", (1, ""))
        options_used = f"{per_node_option} x {nodes_option}" if nodes_option else per_node_option
        source.launch["num_processes"] = (per_node * nodes, options_used)
    if "nodes" in numbers:
        source.launch["num_machines"] = numbers["nodes"]
    return rest


def _options(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Split off a launcher's options and values; return them, and the rest from the script (or `-m`) on."""
    options, index = [], 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "--module"):
        option, equals, value = words[index].partition("=")
        option = "--" + option[2:].replace("-", "_") if option.startswith("--") else option
        takes_next = not equals and option not in _BARE_OPTIONS and index + 1 < len(words)
        options.append((option, words[index + 1] if takes_next else value))
        index += 2 if takes_next else 1
    return options, words[index:]


def _option(option: str, value: str, numbers: dict[str, tuple[int, str]], source: CommandSource) -> None:
    keys = {name: key for key, name in TORCHRUN.items() if key != "num_machines"}
    if option in _NUM_PER_NODE and value.isdigit():
        numbers["per_node"] = (_count(value, option), option)
    elif option in _NUM_NODES:
        low, _, high = value.partition(":")
        if not low.isdigit() or high not in ("", low):
            raise ValueError(
                f"{option} {value}: accelerate's YAML takes one number of machines\nhint: use {option} {low}"
            )
        numbers["nodes"] = (_count(low, option), option)
    elif option in keys:
        source.launch[keys[option]] = (int(value) if value.isdigit() else value, option)
    elif option == "--rdzv_backend":
        source.launch["rdzv_backend"] = (value, option)
    elif option == "--rdzv_endpoint":
        host, _, port = value.partition(":")
        source.launch["main_process_ip"] = (host, option)
        if port.isdigit():
            source.launch["main_process_port"] = (int(port), option)
        source.launch["same_network"] = (False, option)  # accelerate passes on an endpoint only then
    elif option in DEEPSPEED_LAUNCHER:
        source.more.append(Setting("plugin", (DEEPSPEED_LAUNCHER[option],), value, option, value))
    elif option in _AS_ACCELERATE:
        source.rows.append(KeyAccount(option, True, "default", (), _AS_ACCELERATE[option]))
    else:
        why = "accelerate's YAML has no such key; `accelerate launch` itself may accept the option"
        source.rows.append(KeyAccount(option, value or True, "no counterpart", (), why))


def _script_length(words: list[str]) -> int:
    """Return the number of words that name the script: 1 for a file, 2 for `-m module`."""
    return min(len(words), 2 if words and words[0] in ("-m", "--module") else 1)


def _arguments(words: list[str], source: CommandSource) -> None:
    """Read the arguments that define sharding; the script keeps all arguments except fsdp and deepspeed."""
    index = 0
    while index < len(words):
        name, equals, value = words[index].partition("=")
        key = name[2:].replace("-", "_") if name.startswith("--") else ""
        index += 1
        if key not in ARGUMENTS_READ:
            source.script.append(words[index - 1])
            continue
        follows = index < len(words) and not words[index].startswith("--")
        if not equals and not follows and key not in BARE:
            raise ValueError(f"--{key} has no value\nhint: transformers needs a value for it")
        if equals or not follows:
            source.arguments[key] = value if equals else True
        else:
            source.arguments[key] = words[index]
            index += 1
        if key not in ("fsdp", "fsdp_config", "deepspeed"):
            source.script += [f"--{key}", str(source.arguments[key])]
