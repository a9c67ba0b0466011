"""Parses the command line of a launch: our script's flags, and the options of `accelerate launch`."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None

from slm_toolkit.base.errors import user_errors
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.dataset_files import is_saved_dataset, local_files
from slm_toolkit.config.flags import MODULE, training_config
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.names import check_adapter_base, find_model, is_hub_id
from slm_toolkit.record.run_record import installed_versions
from slm_toolkit.strategy.checked_run import all_of, run_problems
from slm_toolkit.strategy.strategy import Strategy, on_nodes

_FEWEST_OPEN_FILES = 64
"twice the need of two ranks on a CPU; with too few, torch's ranks silently wait an hour for each other"


def check_command_line(words: list[str]) -> None:
    """Exit with a message and code 2 if `check_training` finds a problem. `--help` exits here, too."""
    with user_errors():
        check_training([training_config(words)])


def check_training(configs: list[RunConfig], strategies: Sequence[Strategy] = ()) -> None:
    """Raise ValueError for invalid flags, flags that contradict a strategy, and missing files.

    Checks models, datasets and tokenizers on disk only; a name that may be a hub id is accepted.
    """
    check_surroundings()
    check_versions()
    problems, specs = [], {}
    for config in (config.with_defaults(has_gpu=False) for config in configs):  # no check depends on a GPU
        for strategy in strategies or [None]:
            problems += run_problems(config, strategy)
        if not problems and _is_local(config.model):
            specs[config] = find_model(config.model)
    if problems:
        raise all_of(problems)
    for config, spec in specs.items():
        if problems := kernel_problems(spec, config):
            raise all_of(problems)
        check_adapter_base(config, spec)
    if configs[0].rehearse is None:  # a rehearsal may name the cluster's files
        _check_files(configs[0])


def check_surroundings() -> None:
    """Raise ValueError for limits and variables that break a launch."""
    soft = _FEWEST_OPEN_FILES if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= soft < _FEWEST_OPEN_FILES:  # below 0: no limit
        raise ValueError(
            f"this shell allows only {soft} open files at a time\nhint: raise the limit with `ulimit -n 1024`"
        )
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if not threads.strip().isdecimal():
        raise ValueError(f"OMP_NUM_THREADS is {threads!r}\nhint: set it to a whole number, or unset it")


def check_versions() -> None:
    """Raise ValueError for libraries outside their declared versions, unless SLM_ANY_VERSION is 1."""
    if os.environ.get("SLM_ANY_VERSION") == "1":
        return
    from packaging.specifiers import SpecifierSet  # takes 15 ms

    installed, declared = installed_versions(), []
    with suppress(PackageNotFoundError):  # a checkout that is not installed
        declared = [text.partition(";")[0] for text in requires("slm-toolkit") if "extra ==" not in text]
    named = [re.match(r"([\w-]+)(.*)", text).groups() for text in declared]
    wrong = [
        f"{package}{versions}, not {installed[package]}"
        for package, versions in named
        if package in installed and not SpecifierSet(versions).contains(installed[package], prereleases=True)
    ]
    if wrong:
        raise ValueError(
            f"slm_toolkit needs {', '.join(wrong)}\n"
            "hint: install what is needed; SLM_ANY_VERSION=1 tries what is installed"
        )


def _is_local(model: str) -> bool:
    """Return False if only the hub can have the model: `org/name` without such a file or folder."""
    return not is_hub_id(model) or model.endswith(".json") or exists(typed_path(model))


def _check_files(config: RunConfig) -> None:
    for source in (*config.sources, *config.eval_sources):
        if source.path != SYNTHETIC and not is_saved_dataset(source.path):
            local_files(source.path)
    name = config.tokenizer_name or "byte"
    if (name[0] in "./~" or name.count("/") > 1) and not exists(typed_path(name)):
        raise ValueError(f"no such tokenizer folder: {name}\nhint: --tokenizer_name byte needs no folder")


# `accelerate launch`: the launcher's own options, and those of its script.

_LAUNCHING_MODULES = ("accelerate.commands.launch", "slm_toolkit.launch.launcher")


def launch_arguments(words: list[str]) -> list[str] | None:
    """Return the words after `accelerate launch` in a command line; None for any other command."""
    for index, word in enumerate(words):
        if Path(word).name == "accelerate" and words[index + 1 : index + 2] == ["launch"]:
            return words[index + 2 :]
        if Path(word).name == "accelerate-launch" or word in _LAUNCHING_MODULES:
            return words[index + 1 :]
    return None


def arguments_of(words: Sequence[str]) -> list[str] | None:
    """Return the words after `-m slm_toolkit.train`; None if another script is launched."""
    split = next((index for index, word in enumerate(words) if word in _MODULE), len(words))
    return list(words[split + 2 :]) if list(words[split + 1 : split + 2]) == [MODULE] else None


def option(command: tuple[str, ...], name: str) -> str | None:
    """Return the value of an option of the launcher; words after the script belong to the script."""
    for index, word in enumerate(command):
        if word in _MODULE:
            return None
        key, equals, value = word.partition("=")
        if key.replace("-", "_") == f"__{name}":
            return value if equals else " ".join(command[index + 1 : index + 2])
    return None


def shared_launch_facts(command: tuple[str, ...], strategy: Strategy | None) -> dict[str, Any]:
    """Return, as JSON values, the facts that must be equal on all machines of a launch.

    They include everything but each machine's rank and addresses. The YAML is compared by content. If a
    script is not given by -m, its options count as options of the launcher.
    """
    split = next((index for index, word in enumerate(command) if word in _MODULE), len(command))
    launcher = _by_flag(command[:split]).items()
    arguments = arguments_of(command)
    facts = {
        "launcher": {name: value for name, value in launcher if name not in _OF_MACHINE},
        "script": _by_flag(command[split + 1 :]) if arguments is None else asdict(training_config(arguments)),
        "versions": installed_versions(),
    }
    if strategy is not None and strategy.accelerate_config is not None:
        config = on_nodes(strategy, strategy.num_machines).accelerate_config
        deepspeed = {**(config.get("deepspeed_config") or {}), "deepspeed_config_file": None}
        facts["YAML"] = {**config, "deepspeed_config": deepspeed}
        facts["DeepSpeed JSON"] = strategy.deepspeed_config
    return json.loads(json.dumps(facts, default=str))


_MODULE = ("-m", "--module")
_OF_MACHINE = ("config_file", "machine_rank", "main_process_ip", "main_process_port", "rdzv_conf")
"the launcher's options that may differ between machines"


def _by_flag(words: Iterable[str]) -> dict[str, str]:
    """Parse `--seed 1 --json` as {"seed": "1", "json": ""}; words before the first flag are under ""."""
    values: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            values[name] = value
        else:
            values[name] = f"{values.get(name, '')} {word}".strip()
    return values
