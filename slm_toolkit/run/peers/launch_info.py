"""What `accelerate launch` was asked for, seen from inside a process that it started."""

import functools
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import psutil

from slm_toolkit.base.secrets import without_secrets
from slm_toolkit.launch.command_line import launch_arguments, option
from slm_toolkit.strategy.deepspeed_json import deepspeed_config_path
from slm_toolkit.strategy.groups import check_groups, not_run_yet, with_group_options
from slm_toolkit.strategy.sharding import PARALLEL_SIZES
from slm_toolkit.strategy.strategy import Strategy, on_nodes, read_strategy


@dataclass(frozen=True)
class Launch:
    """The strategy asked for, and how this process came to be."""

    strategy: Strategy
    num_processes: int
    "ranks asked for, by `--num_processes` or the YAML"
    command: tuple[str, ...]
    "as typed, from `accelerate` on; empty where no launcher was found"

    @property
    def mixed_precision(self) -> str | None:
        """What the launcher's option, the files or the environment ask of accelerate; None: nothing."""
        if asked := option(self.command, "mixed_precision") or self.strategy.mixed_precision:
            return asked.lower()
        in_environment = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        return None if in_environment == "no" else in_environment  # the launcher writes no where nobody asks

    def command_for(self, num_processes: int) -> str:
        """The same command, to paste, for another number of processes."""
        words = list(self.command)
        for index, word in enumerate(words):
            name = word.partition("=")[0].replace("-", "_")
            if name == "__num_processes":
                del words[index : index + (1 if "=" in word else 2)]
                break
        at = words.index("launch") + 1
        return shlex.join([*words[:at], "--num_processes", str(num_processes), *words[at:]])


def find_launch() -> Launch:
    """Look for `accelerate launch` among the parent processes and read the YAML it was given.

    A process that torchrun or plain python started has its strategy from the environment alone.
    Raises ValueError for a YAML that asks for what can't be.
    """
    for parent in psutil.Process().parents():
        try:
            words, folder = parent.cmdline(), parent.cwd()
        except (psutil.AccessDenied, psutil.NoSuchProcess):  # another user's process is not our launcher
            continue
        arguments = launch_arguments(words)
        if arguments is None:
            continue
        command = ("accelerate", "launch", *without_secrets(arguments))
        config_file = option(command, "config_file")
        if config_file is None:
            return Launch(_strategy_from_environment(), _world_size(), command)
        strategy = read_strategy(Path(folder, config_file))
        strategy = with_group_options(strategy, functools.partial(option, command))
        machines = int(option(command, "num_machines") or strategy.num_machines)
        if machines > 1:  # without a machine's own number: the record is of them all
            strategy = on_nodes(strategy, machines)
        asked = option(command, "num_processes")
        return Launch(strategy, int(asked) if asked else strategy.num_processes, command)
    return Launch(_strategy_from_environment(), _world_size(), ())


def absolute_deepspeed_config(strategy: Strategy) -> None:
    """Let accelerate find a `deepspeed_config_file` that lies beside the YAML, not in the working folder."""
    named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if named and strategy.path and (path := deepspeed_config_path(named, Path(strategy.path))):
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)


def check_environment(launch: Launch) -> None:
    """Raises ValueError where the launcher did not do what its YAML asks for: then nothing would be sharded.

    `accelerate launch --cpu`, for one, starts a single process whatever the YAML says. Raises it also for
    groups of ranks that slm_toolkit does not run, whether the YAML, an option or a variable asks for them.
    """
    check_groups(launch.strategy, num_ranks=launch.num_processes)
    if unknown := not_run_yet(_sizes_from_environment()):
        raise ValueError(f"PARALLELISM_CONFIG_* in the environment: {unknown[0]}\nhint: unset it")
    started = _strategy_from_environment()
    engine = "ddp" if started.is_single and launch.num_processes == 1 else started.engine
    ddp_of_one = launch.strategy.is_replicated and engine == "ddp"
    if started.num_processes == launch.num_processes and (engine == launch.strategy.engine or ddp_of_one):
        return
    hint = "launch with `accelerate launch --config_file FILE -m slm_toolkit.train`, without --cpu"
    if launch.strategy.num_machines > 1:
        hint = "the same --num_processes, of all machines together, and --num_machines on every machine"
    raise ValueError(
        f"{launch.strategy.path or launch.strategy.name} asks for {launch.strategy.engine} "
        f"on {launch.num_processes} processes, "
        f"the launcher started {started.engine} on {started.num_processes}: it would not shard\n"
        f"hint: {hint}"
    )


def check_devices(launch: Launch, *, num_gpus: int, local_processes: int) -> None:
    """Raises ValueError, with the command to paste, where this machine has fewer GPUs than ranks to serve.

    A machine without any GPU is no error: its ranks are CPU processes.
    """
    if launch.strategy.is_fsdp1 and num_gpus == 0:
        raise ValueError(
            f"{launch.strategy.path} asks for FSDP1, which needs a GPU\n"
            "hint: write `fsdp_version: 2` under fsdp_config; without that key accelerate means 1"
        )
    if num_gpus == 0 or local_processes <= num_gpus:
        return
    num_fit = num_gpus * launch.strategy.num_machines
    paste = f": {launch.command_for(num_fit)}" if launch.command else f" with {num_fit} processes"
    noun = "GPU" if num_gpus == 1 else "GPUs"
    raise ValueError(
        f"{local_processes} processes but {num_gpus} {noun} on this machine\nhint: launch it as{paste}"
    )


def _sizes_from_environment() -> dict[str, int]:
    """accelerate's sizes of groups as its launcher hands them on; none where it would not read them."""
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return {}
    return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in PARALLEL_SIZES}


def _world_size() -> int:
    """Raises ValueError for a variable that no launcher set."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) <= 9):
        raise ValueError(f"WORLD_SIZE is {text!r} in the environment\nhint: launchers set it; unset it here")
    return int(text)


def _strategy_from_environment() -> Strategy:
    """What the variables that accelerate's launcher sets stand for."""
    env = os.environ
    num_processes = _world_size()
    if env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        from accelerate.utils import DeepSpeedPlugin

        config = DeepSpeedPlugin().deepspeed_config
        config.pop("steps_per_print", None)  # accelerate writes infinity, which JSON has no word for
        stage = config.get("zero_optimization", {}).get("stage", 0)
        path = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        return Strategy(
            f"ds_zero{stage}", "deepspeed", num_processes, stage, path=path, deepspeed_config=config
        )
    if env.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        if env.get("FSDP_VERSION", "1") != "2":
            return Strategy("fsdp1", "fsdp1", num_processes)
        reshard = env.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
        name = "fsdp_full_shard" if reshard else "fsdp_shard_grad_op"
        return Strategy(name, "fsdp2", num_processes, reshard_after_forward=reshard)
    return Strategy(
        "ddp" if num_processes > 1 else "single", "ddp" if num_processes > 1 else "single", num_processes
    )
