"""A training command, taken apart or put together: launcher, script, the arguments that say how to shard."""

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
"stands for the user's script where the source names none"
_BARE_OPTIONS = (  # of torchrun and of deepspeed: they take no value
    *("--standalone", "--module", "-m", "--no_python", "--run_path", "--virtual_local_rank"),
    *("--no_local_rank", "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--bind_cores_to_rank"),
)
_NUM_PER_NODE = ("--nproc_per_node", "--num_gpus", "--num_accelerators")
_NUM_NODES = ("--nnodes", "--num_nodes")
_AS_ACCELERATE = {"--standalone": "accelerate looks for a free port itself"}


@dataclass
class CommandSource:
    """What the words of a command say."""

    launch: dict[str, tuple[Any, str]] = field(default_factory=dict)
    "accelerate's keys, each with its value and the option that said it"
    more: list[Setting] = field(default_factory=list)
    "of deepspeed_config, parallelism_config and fsdp_config, said by the launcher or the environment"
    arguments: dict[str, Any] = field(default_factory=dict)
    "TrainingArguments that say how to shard"
    script: list[str] = field(default_factory=list)
    "the script and its other arguments"
    environment: list[str] = field(default_factory=list)
    "NAME=value words that have nothing to do with sharding"
    rows: list[KeyAccount] = field(default_factory=list)


def command_source(words: list[str]) -> CommandSource:
    """Raises ValueError for a command that is no launch of a script with TrainingArguments."""
    if len(words) == 1:
        try:
            words = shlex.split(words[0])
        except ValueError as error:  # a quote that is not closed
            raise ValueError(
                f"the command can't be taken apart: {error}\nhint: quote it as a shell would"
            ) from None
    found = CommandSource()
    rest = _environment(words, found)
    found.environment = without_secrets(found.environment)
    if not rest:
        raise ValueError(
            "a command without a script or an argument\nhint: slm convert --to FORM -- torchrun ..."
        )
    if not rest[0].startswith("-"):
        rest = _launcher(rest, found)
        found.script, rest = rest[: _script_length(rest)], rest[_script_length(rest) :]
    _arguments(rest, found)
    found.script = without_secrets(found.script)
    return found


def script_of(words: Iterable[str]) -> list[str]:
    """The script and its arguments; a name in its place where the source has none."""
    found = list(words)
    return found if found and not (found[0].startswith("--") and found[0] != "--module") else [SCRIPT, *found]


def launch_values(settings: Iterable[Setting]) -> dict[str, Any]:
    """What accelerate's launcher is told."""
    return {s.path[0]: s.value for s in settings if s.section == "launch" and s.value is not None}


def torchrun_options(values: dict[str, Any]) -> dict[str, str]:
    """torchrun's option for each of accelerate's keys that has one here; on one machine few do."""
    num, nodes = values.get("num_processes"), values.get("num_machines") or 1
    options = {"num_processes": f"--nproc_per_node {'N' if num is None else num // nodes}"}
    port = values.get("main_process_port")
    if nodes == 1:
        return options if port is None else {**options, "main_process_port": f"--master_port {port}"}
    if (backend := values.get("rdzv_backend", "static")) == "static":
        said = {key: option for key, option in TORCHRUN.items() if key in values}
        return options | {key: f"{option} {values[key]}" for key, option in said.items()}
    endpoint = ":".join(str(values[key]) for key in ("main_process_ip", "main_process_port") if key in values)
    options |= {"num_machines": f"--nnodes {nodes}", "rdzv_backend": f"--rdzv_backend {backend}"}
    return options | dict.fromkeys(("main_process_ip", "main_process_port"), f"--rdzv_endpoint {endpoint}")


def torchrun_command(
    settings: Iterable[Setting], environment: list[str], script: list[str], arguments: list[str]
) -> list[str]:
    """`torchrun` (or python, for one process) with what accelerate's launcher would have been told."""
    values = launch_values(settings)
    if values.get("num_processes") == 1:
        return [*environment, "python", *script, *arguments]
    options = dict.fromkeys(torchrun_options(values).values())
    return [*environment, "torchrun", *(word for o in options for word in o.split()), *script, *arguments]


def _environment(words: list[str], found: CommandSource) -> list[str]:
    """Takes the NAME=value words off the front."""
    keys = {variable: key for key, variable in VARIABLES.items()}
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"\w+", name):
            return words[index:]
        key = keys.get(name)
        if name == USE_GROUPS:
            continue
        if key is None:
            found.environment.append(word)
        elif key.startswith("parallelism_config_"):
            found.more.append(Setting("groups", (key,), _count(value, name), name, _count(value, name)))
        elif key.startswith("fsdp_"):
            is_truth = key.endswith("_offload")
            found.more.append(Setting("fsdp", (key,), truth(value, name) if is_truth else value, name, value))
        else:
            found.launch[key] = (value if key == "gpu_ids" else truth(value, name), name)
    return []


def _count(text: str, name: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= len(text) <= 9):
        raise ValueError(f"{name} is {text!r}\nhint: a whole number of ranks")
    return int(text)


def _launcher(words: list[str], found: CommandSource) -> list[str]:
    """Takes the launcher and its options off the front."""
    name = words[0].rsplit("/", 1)[-1]
    if name.startswith("accelerate"):
        raise ValueError("accelerate launch has its settings in a YAML\nhint: slm convert THE.yaml --to ...")
    if name.endswith(".py"):
        return words
    if re.fullmatch(r"python[\d.]*", name):
        if words[1:3] not in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
            found.launch["num_processes"] = (1, name)
            return words[1:]
        words = words[2:]
    elif name not in ("torchrun", "deepspeed"):
        raise ValueError(
            f"{words[0]} is no launcher that is known\nhint: torchrun, deepspeed, python, or arguments alone"
        )
    options, rest = _options(words[1:])
    numbers: dict[str, tuple[int, str]] = {}
    for option, value in options:
        _option(option, value, numbers, found)
    if "per_node" in numbers:
        per_node, source = numbers["per_node"]
        nodes, of_nodes = numbers.get("nodes", (1, ""))
        found.launch["num_processes"] = (per_node * nodes, f"{source} x {of_nodes}" if of_nodes else source)
    if "nodes" in numbers:
        found.launch["num_machines"] = numbers["nodes"]
    return rest


def _options(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Options and values of a launcher, up to the script; `-m` stays with the module that it goes before."""
    options, index = [], 0
    while index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "--module"):
        option, equals, value = words[index].partition("=")
        option = "--" + option[2:].replace("-", "_") if option.startswith("--") else option
        takes_next = not equals and option not in _BARE_OPTIONS and index + 1 < len(words)
        options.append((option, words[index + 1] if takes_next else value))
        index += 2 if takes_next else 1
    return options, words[index:]


def _option(option: str, value: str, numbers: dict[str, tuple[int, str]], found: CommandSource) -> None:
    keys = {name: key for key, name in TORCHRUN.items() if key != "num_machines"}
    if option in _NUM_PER_NODE and value.isdigit():
        numbers["per_node"] = (_count(value, option), option)
    elif option in _NUM_NODES:
        low, _, high = value.partition(":")
        if not low.isdigit() or high not in ("", low):
            raise ValueError(
                f"{option} {value}: accelerate's YAML takes one number of machines\nhint: {option} {low}"
            )
        numbers["nodes"] = (_count(low, option), option)
    elif option in keys:
        found.launch[keys[option]] = (int(value) if value.isdigit() else value, option)
    elif option == "--rdzv_backend":
        found.launch["rdzv_backend"] = (value, option)
    elif option == "--rdzv_endpoint":
        host, _, port = value.partition(":")
        found.launch["main_process_ip"] = (host, option)
        if port.isdigit():
            found.launch["main_process_port"] = (int(port), option)
        found.launch["same_network"] = (False, option)  # only then accelerate hands torchrun an endpoint
    elif option in DEEPSPEED_LAUNCHER:
        found.more.append(Setting("plugin", (DEEPSPEED_LAUNCHER[option],), value, option, value))
    elif option in _AS_ACCELERATE:
        found.rows.append(KeyAccount(option, True, "default", (), _AS_ACCELERATE[option]))
    else:
        why = "no key of accelerate's YAML; `accelerate launch` itself may take the option"
        found.rows.append(KeyAccount(option, value or True, "no counterpart", (), why))


def _script_length(words: list[str]) -> int:
    """1 for a file, 2 for `-m module`."""
    return min(len(words), 2 if words and words[0] in ("-m", "--module") else 1)


def _arguments(words: list[str], found: CommandSource) -> None:
    """Reads the arguments that say how to shard; the script keeps all but those that name an engine."""
    index = 0
    while index < len(words):
        name, equals, value = words[index].partition("=")
        key = name[2:].replace("-", "_") if name.startswith("--") else ""
        index += 1
        if key not in ARGUMENTS_READ:
            found.script.append(words[index - 1])
            continue
        follows = index < len(words) and not words[index].startswith("--")
        if not equals and not follows and key not in BARE:
            raise ValueError(f"--{key} without a value\nhint: transformers wants one")
        if equals or not follows:
            found.arguments[key] = value if equals else True
        else:
            found.arguments[key] = words[index]
            index += 1
        if key not in ("fsdp", "fsdp_config", "deepspeed"):
            found.script += [f"--{key}", str(found.arguments[key])]
