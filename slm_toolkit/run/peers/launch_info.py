"""Find out, inside a rank, with which strategy and arguments `accelerate launch` started it."""

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from slm_toolkit.base.secrets import without_secrets
from slm_toolkit.launch.command_line import launch_arguments, option
from slm_toolkit.strategy.checked_run import check_groups, not_run_yet
from slm_toolkit.strategy.deepspeed_json import deepspeed_config_path
from slm_toolkit.strategy.groups import with_group_options
from slm_toolkit.strategy.settings import PARALLEL_SIZES
from slm_toolkit.strategy.strategy import Strategy, on_nodes, read_strategy


@dataclass(frozen=True)
class Launch:
    """The requested strategy, and the command that started this process."""

    strategy: Strategy
    num_processes: int
    "requested ranks: `--num_processes`, or else the YAML's"
    command: tuple[str, ...]
    "as typed, from `accelerate` on; empty if no launcher was found"

    @property
    def mixed_precision(self) -> str | None:
        """The mixed precision from the launcher's option, the files or the environment; None if unset."""
        if requested := option(self.command, "mixed_precision") or self.strategy.mixed_precision:
            return requested.lower()
        in_environment = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
        return None if in_environment == "no" else in_environment  # "no" is also the launcher's default


def find_launch() -> Launch:
    """Find `accelerate launch` among the parent processes and read its YAML.

    If torchrun or plain python started this process, the strategy comes from the environment alone.
    Raises ValueError if the YAML asks for something impossible.
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
        if machines > 1:  # drop the YAML's machine_rank: the record describes all machines
            strategy = on_nodes(strategy, machines)
        num_processes = option(command, "num_processes")
        return Launch(strategy, int(num_processes or strategy.num_processes), command)
    return Launch(_strategy_from_environment(), _world_size(), ())


def absolute_deepspeed_config(strategy: Strategy) -> None:
    """Let accelerate find a `deepspeed_config_file` in the YAML's folder, not only in the working folder."""
    named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if named and strategy.path and (path := deepspeed_config_path(named, Path(strategy.path))):
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)


def check_environment(launch: Launch) -> None:
    """Raise ValueError if the launcher ignored its YAML, because then nothing would be sharded.

    For example, `accelerate launch --cpu` starts a single process whatever the YAML says. Also raise it for
    groups of ranks that slm_toolkit does not run, whoever asks for them.
    """
    check_groups(launch.strategy, num_ranks=launch.num_processes)
    if unknown := not_run_yet(_sizes_from_environment()):
        raise ValueError(f"PARALLELISM_CONFIG_* in the environment: {unknown[0]}\nhint: unset it")
    started, asked = _strategy_from_environment(), launch.strategy
    engine = "ddp" if started.is_single and launch.num_processes == 1 else started.engine
    is_asked = engine == asked.engine or (asked.is_replicated and engine == "ddp")
    if started.num_processes != launch.num_processes or not is_asked:
        raise ValueError(
            f"{asked.path or asked.name} asks for {asked.engine} on {launch.num_processes} processes, but "
            f"the launcher started {started.engine} on {started.num_processes}: nothing would be sharded\n"
            "hint: launch without --cpu, and with the same --num_machines and --num_processes everywhere"
        )


def check_devices(launch: Launch, *, num_gpus: int, local_processes: int) -> None:
    """Raise ValueError if this machine has GPUs but fewer than local ranks.

    A machine without a GPU is fine: its ranks run on the CPU.
    """
    if launch.strategy.is_fsdp1 and num_gpus == 0:
        raise ValueError(
            f"{launch.strategy.path} asks for FSDP1, which needs a GPU\n"
            "hint: write `fsdp_version: 2` under fsdp_config; without that key accelerate means 1"
        )
    if num_gpus == 0 or local_processes <= num_gpus:
        return
    raise ValueError(
        f"{local_processes} processes, but this machine has {num_gpus} GPU{'s' * (num_gpus > 1)}\n"
        f"hint: launch with --num_processes {num_gpus * launch.strategy.num_machines}"
    )


def _sizes_from_environment() -> dict[str, int]:
    """Return the group sizes that the launcher passes to accelerate; empty if accelerate ignores them."""
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return {}
    return {name: int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1")) for name in PARALLEL_SIZES}


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ValueError(f"WORLD_SIZE is {text!r} in the environment\nhint: only launchers set it; unset it")
    return int(text)


def _strategy_from_environment() -> Strategy:
    """Return the strategy that accelerate's launcher put into environment variables."""
    env = os.environ
    num_processes = _world_size()
    if env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        from accelerate.utils import DeepSpeedPlugin

        config = DeepSpeedPlugin().deepspeed_config
        config.pop("steps_per_print", None)  # accelerate writes infinity, which JSON can't represent
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
    name = "ddp" if num_processes > 1 else "single"
    return Strategy(name, name, num_processes)
