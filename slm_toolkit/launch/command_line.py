"""The words of a launch: our script's flags, checked before torch is imported, and accelerate's options."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None

from slm_toolkit.base.errors import user_errors
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.dataset_files import is_saved_dataset, local_files
from slm_toolkit.config.flags import training_config
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.from_config import check_trainable
from slm_toolkit.model.names import check_adapter_base, find_model, is_hub_id
from slm_toolkit.record.run_record import installed_versions
from slm_toolkit.strategy.strategy import Strategy, contradictions, on_nodes

_FEWEST_OPEN_FILES = 64
"twice what two ranks need on a CPU; with too few, torch's ranks wait an hour for each other without a word"


def check_command_line(words: list[str]) -> None:
    """End with one line and exit code 2 for what `check_training` finds; `--help` ends here, too."""
    with user_errors():
        check_training([training_config(words)])


def check_training(configs: list[RunConfig], strategies: Sequence[Strategy] = ()) -> None:
    """Raises ValueError for flags that make no sense, alone or under a strategy, and for models, datasets and
    tokenizers that are not there. The hub is not asked: what may be a hub id passes."""
    _check_open_files()
    configs = [config.with_defaults(has_gpu=False) for config in configs]  # the machine decides nothing here
    problems = [problem for config in configs for problem in config.problems()]
    problems += [
        problem for config in configs for each in strategies for problem in contradictions(each, config)
    ]
    if problems:
        hint = "`--help all` explains each flag"
        if any("the DeepSpeed JSON says" in problem for problem in problems):
            hint = 'write "auto" in the JSON, and let the flags say it'
        raise ValueError("\n".join(dict.fromkeys(problems)) + f"\nhint: {hint}")
    specs = {name: find_model(name) for name in {config.model for config in configs} if _is_here(name)}
    for spec in specs.values():
        check_trainable(spec)
    for config in configs:
        if config.model in specs:
            check_adapter_base(config, specs[config.model])
    if any(config.push_to_hub for config in configs):
        _check_hub_token()
    if configs[0].rehearse is None:  # a rehearsal may name the cluster's files
        _check_files(configs[0])


def _check_open_files() -> None:
    if resource is None:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FEWEST_OPEN_FILES:  # below 0: no limit
        raise ValueError(f"only {soft} files may be open at once in this shell\nhint: `ulimit -n 1024`")


def _check_hub_token() -> None:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise ValueError("--push_to_hub with HF_HUB_OFFLINE\nhint: unset HF_HUB_OFFLINE")
    if get_token() is None:
        raise ValueError("--push_to_hub without a token\nhint: `hf auth login`, or set HF_TOKEN")


def _is_here(model: str) -> bool:
    """False for what only the hub can know: `org/name` where no such file or folder is here."""
    return not is_hub_id(model) or model.endswith(".json") or exists(typed_path(model))


def _check_files(config: RunConfig) -> None:
    for source in (*config.sources, *config.eval_sources):
        if source.path != SYNTHETIC and not is_saved_dataset(source.path):
            local_files(source.path)
    name = config.tokenizer_name or "byte"
    if (name[0] in "./~" or name.count("/") > 1) and not exists(typed_path(name)):
        raise ValueError(f"no such tokenizer folder: {name}\nhint: --tokenizer_name byte needs none")


# `accelerate launch`: the launcher's own options, and those of its script.

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
