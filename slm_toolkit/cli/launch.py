"""`slm launch`: `accelerate launch` with clear errors and exit codes; several machines meet first."""

import argparse
import json
import os
import shlex
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import shown, user_errors
from slm_toolkit.config.flags import flags_of, training_config
from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.hardware.gpus import gpus_here
from slm_toolkit.launch.command_line import (
    arguments_of,
    check_surroundings,
    check_training,
    option,
    shared_launch_facts,
)
from slm_toolkit.launch.processes import SAFE_PATH, safe_environment
from slm_toolkit.launch.rendezvous import (
    FACTS_VARIABLE,
    PATIENCE_SECONDS,
    PATIENCE_VARIABLE,
    listen,
    own_addresses,
    patience_seconds,
)
from slm_toolkit.model.names import check_hub_names, find_model
from slm_toolkit.predict.choices import completed
from slm_toolkit.run.checkpoint.start import check_before_launch
from slm_toolkit.strategy.checked_run import check_groups, check_passed_on, checked_run
from slm_toolkit.strategy.groups import fit_groups, group_sizes, with_group_options
from slm_toolkit.strategy.strategy import Strategy, find_strategy, read_strategy

_DEFAULT_PORT = 29500  # accelerate's
_LARGEST_PORT = 65535
_TELL_SECONDS = 30
"how long a machine that can't start waits for the others, to report its error there"
_DESCRIPTION = f"""\
Run `accelerate launch`, with the same options. A failed run ends with its own message and the exit code of
the rank that ended first (143: it was told to stop, and saved). The command is printed on stderr.

On several machines run the same command on each, with its own --machine_rank. The launchers meet at
--main_process_ip before they start ranks. After {PATIENCE_SECONDS:g} s (or {PATIENCE_VARIABLE}) each prints
which machines are missing, or which options, files and versions differ.
Missing settings for several machines are added: DeepSpeed's standard launcher, a copy of a shipped hybrid
shard on each machine, and the network interface for gloo."""
_EPILOG = """\
two machines with eight GPUs each; the first is 10.0.0.1:
  slm launch --config_file accel_configs/fsdp_hybrid_shard.yaml --num_machines 2 --num_processes 16 \\
      --main_process_ip 10.0.0.1 --machine_rank 0 -m slm_toolkit.train --model slm-1b
  slm launch --config_file accel_configs/fsdp_hybrid_shard.yaml --num_machines 2 --num_processes 16 \\
      --main_process_ip 10.0.0.1 --machine_rank 1 -m slm_toolkit.train --model slm-1b
"""


@dataclass(frozen=True)
class PlannedLaunch:
    """An `accelerate launch` on this machine."""

    words: tuple[str, ...]
    "the words after `accelerate launch`: the user's, and those that were added"
    shared: dict[str, Any]
    "what the other machines hear: `facts`, and the `problem` if this machine can't start; {} for one machine"


@dataclass(frozen=True)
class _Asked:
    """Settings from accelerate's options, else from the YAML; None if neither has them."""

    words: tuple[str, ...]
    strategy: Strategy | None
    num_machines: int | None
    num_processes: int | None
    machine_rank: int | None
    main_process_ip: str | None
    main_process_port: int | None
    deepspeed_launcher: str | None


def fill(parser: argparse.ArgumentParser) -> None:
    """Fill the parser of `slm launch`, whose flags are accelerate's."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.usage = "slm launch [accelerate launch's options] -m slm_toolkit.train [its flags]"
    parser.prefix_chars = ""  # all words belong to accelerate
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(verb=_launch)


def _launch(args: argparse.Namespace) -> int:
    if not args.words or args.words[0] in ("-h", "--help"):
        args.parser.print_help()
        return 0 if args.words else 2
    return start(args.words)


def start(words: list[str]) -> int:
    """Replace this process by `accelerate launch` with these words."""
    with user_errors():
        words = _with_flags_of_config_file(words)
        planned = plan_launch(words)
    command = [sys.executable, "-P", "-m", "slm_toolkit.launch.launcher", *planned.words]
    env = safe_environment()
    if arguments_of(words) is None:  # a user's script may import from its own folder
        env = {name: value for name, value in env.items() if name in os.environ or name != SAFE_PATH}
    if planned.shared:
        env[FACTS_VARIABLE] = json.dumps(planned.shared)
    problem = planned.shared.get("problem")
    line = f"error: {shown(problem)}" if problem else f"accelerate launch {shlex.join(planned.words)}"
    print(line, file=sys.stderr, flush=True)
    os.execve(command[0], command, env)
    return 1  # never


def plan_launch(words: list[str]) -> PlannedLaunch:
    """Read accelerate's options, the YAML and our script's flags.

    Raises ValueError for what can't be on several machines, and for what `check_training` finds: on all
    machines but the first that is the problem of which the others hear.
    """
    asked, problem = _asked(tuple(words)), None
    try:
        _check_script(words, asked)
    except ValueError as error:
        if not asked.machine_rank or asked.num_machines in (None, 1):
            raise
        problem = str(error)
    port = _DEFAULT_PORT if asked.main_process_port is None else asked.main_process_port
    if not 0 <= port <= _LARGEST_PORT:
        raise ValueError(f"--main_process_port is {port}\nhint: 0 to {_LARGEST_PORT}")
    if asked.num_machines in (None, 1):
        if port and (asked.num_processes or 1) > 1 and not _is_answered(port):
            listen("", port).close()
        return PlannedLaunch(asked.words, {})
    if problems := _problems(asked):
        raise ValueError("\n".join(problems) + "\nhint: `slm launch --help` has the commands of two machines")
    if asked.machine_rank == 0:
        listen(asked.main_process_ip, port).close()
    seconds = _TELL_SECONDS if problem else round(patience_seconds())
    command = (*_added(asked, seconds), *asked.words)
    facts = shared_launch_facts(command, asked.strategy)
    return PlannedLaunch(command, {"facts": facts, "problem": problem})


def _is_answered(port: int) -> bool:
    """Return True if a program of this machine listens on `port`; accelerate then takes another port.

    A program that holds the port without listening breaks torch's launcher.
    """
    with socket.socket() as attempt:
        return attempt.connect_ex(("localhost", port)) == 0


def _with_flags_of_config_file(words: list[str]) -> list[str]:
    """The words, with the flags of our script's `--config FILE` in its place, which machines compare."""
    arguments = arguments_of(words)
    if not any(word.partition("=")[0] == "--config" for word in arguments or ()):
        return words
    return [*words[: len(words) - len(arguments)], *flags_of(training_config(arguments))]


def _check_script(words: list[str], asked: _Asked) -> None:
    check_surroundings()
    if (arguments := arguments_of(words)) is not None:
        config = training_config(arguments)
        check_training([config], [] if asked.strategy is None else [asked.strategy])
        if asked.strategy is not None:
            strategy = with_group_options(asked.strategy, partial(option, asked.words))
            check_groups(strategy)
            _check_start(config, strategy, asked)


def _check_start(config: RunConfig, strategy: Strategy, asked: _Asked) -> None:
    """Raise ValueError, or exit, if the ranks of one machine would refuse to start, or have nothing to do."""
    if asked.num_machines not in (None, 1) or config.rehearse is not None:
        return
    check_hub_names(config)
    gpus = gpus_here()
    num_ranks = asked.num_processes or strategy.num_processes
    if strategy.is_single and num_ranks > 1:
        problem = f"--num_processes {num_ranks} with {strategy.name}, which has one process"
        raise ValueError(f"{problem}\nhint: leave it out, or take --strategy ddp")
    config, _ = completed(config, strategy, has_gpu=bool(gpus), num_ranks=num_ranks)
    spec, precision = find_model(config.model), option(asked.words, "mixed_precision")
    launch = {"num_ranks": num_ranks, "mixed_precision": precision, "has_gpu": bool(gpus)}
    strategy = checked_run(config, spec, strategy, **launch).strategy
    check_before_launch(config, spec, strategy, num_ranks, gpus[0] if gpus else None)


def _asked(words: tuple[str, ...]) -> _Asked:
    """Read the settings of a launch. Raises ValueError for a bad YAML, or a count that is not a number."""
    config_file, json_file = option(words, "config_file"), option(words, "deepspeed_config_file")
    strategy = read_strategy(Path(config_file).expanduser()) if config_file else None
    for each in (
        strategy,
        find_strategy(json_file) if json_file else None,
    ):  # the option wins over the YAML
        if each is not None:
            check_passed_on(each)
    config = {} if strategy is None else strategy.accelerate_config
    said = {**config, **(config.get("deepspeed_config") or {})}

    def value(name: str) -> Any:
        return option(words, name) or said.get(name)

    def count(name: str) -> int | None:
        try:
            return None if value(name) is None else int(str(value(name)))
        except ValueError:
            raise ValueError(f"{name} is {value(name)!r}\nhint: a whole number") from None

    return _Asked(
        words=words,
        strategy=strategy,
        num_machines=count("num_machines"),
        num_processes=count("num_processes"),
        machine_rank=count("machine_rank"),
        main_process_ip=option(words, "main_process_ip"),  # never from a file: it chooses the host to reach
        main_process_port=count("main_process_port"),
        deepspeed_launcher=value("deepspeed_multinode_launcher"),
    )


def _problems(asked: _Asked) -> list[str]:
    """Return the problems that would make several machines fail or hang."""
    found = []
    rank, num_machines, address = asked.machine_rank, asked.num_machines, asked.main_process_ip
    if num_machines < 1:
        return [f"--num_machines is {num_machines}: at least 1"]
    if rank is None or not 0 <= rank < num_machines:
        found.append(f"--machine_rank is {rank}: 0 to {num_machines - 1}, a different one on each machine")
    if address is None:
        found.append(
            "no --main_process_ip on the command line: the address of machine 0; this machine is "
            f"{own_addresses()}"
        )
    if asked.main_process_port == 0:
        found.append("--main_process_port 0: the other machines can't know that port")
    if not asked.num_processes or asked.num_processes % num_machines:
        found.append(
            f"--num_processes is {asked.num_processes}: ranks of all machines, equally many on each "
            f"of {num_machines}"
        )
    if asked.deepspeed_launcher not in (None, "standard"):
        found.append(
            f"deepspeed_multinode_launcher {asked.deepspeed_launcher} starts all machines from one: "
            "use standard"
        )
    return found


def _added(asked: _Asked, seconds: int) -> list[str]:
    """Return options that several machines need and that were not given; `seconds` to wait for each other."""
    words = []
    if option(asked.words, "rdzv_conf") is None:
        words += ["--rdzv_conf", f"timeout={seconds}"]
    if asked.strategy is None:
        return words
    if asked.strategy.is_deepspeed and asked.deepspeed_launcher is None:
        words += ["--deepspeed_multinode_launcher", "standard"]
    ranks_per_node = asked.num_processes // asked.num_machines
    fitted = fit_groups(asked.strategy, num_ranks=asked.num_processes, ranks_per_node=ranks_per_node)
    return words + [
        word
        for name, size in sorted(group_sizes(fitted).items() - group_sizes(asked.strategy).items())
        if option(asked.words, name) is None
        for word in (f"--{name}", str(size))
    ]
