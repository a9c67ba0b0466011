"""`slm launch`: `accelerate launch` with clear errors and exit codes; several machines meet first."""

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slm_toolkit.base.errors import user_errors
from slm_toolkit.config.flags import training_config
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
    PATIENCE_SECONDS,
    PATIENCE_VARIABLE,
    Entry,
    Wait,
    host,
    interfaces,
    join,
    listen,
    own_addresses,
    wait_for_port,
)
from slm_toolkit.model.names import check_hub_names, find_model
from slm_toolkit.predict.choices import completed
from slm_toolkit.run.checkpoint.start import check_before_launch
from slm_toolkit.strategy.checked_run import check_groups, check_passed_on, checked_run
from slm_toolkit.strategy.groups import fit_groups, group_sizes, with_group_options
from slm_toolkit.strategy.strategy import Strategy, find_strategy, read_strategy

_DEFAULT_PORT = 29500  # accelerate's
_DESCRIPTION = f"""\
Run `accelerate launch`, with the same options. A failed run ends with its own message and exit code.

On several machines run the same command on each, with its own --machine_rank. The launchers meet at
--main_process_ip. After {PATIENCE_SECONDS:g} s (or {PATIENCE_VARIABLE}) each prints which machines are
missing, or which options, files and versions differ."""
_EPILOG = """\
the first of two machines with eight GPUs each:
  slm launch --config_file accel_configs/ds_zero3.yaml --num_machines 2 --num_processes 16 \\
      --main_process_ip 10.0.0.1 --machine_rank 0 -m slm_toolkit.train --model slm-1b
"""


@dataclass(frozen=True)
class PlannedLaunch:
    """An `accelerate launch` on this machine."""

    words: tuple[str, ...]
    "the words after `accelerate launch`: the user's, and those that were added"
    num_machines: int = 1
    entry: Entry | None = None
    "what machine 0 hears of this one; None for one machine"
    place: tuple[str, int] = ("", 0)
    "machine 0's address and port"


class _Asked:
    """Settings from accelerate's options, else from the YAML."""

    def __init__(self, words: tuple[str, ...]) -> None:
        """Raise ValueError for a bad YAML or JSON."""
        self.words = words
        config_file, json_file = option(words, "config_file"), option(words, "deepspeed_config_file")
        self.strategy = read_strategy(Path(config_file).expanduser()) if config_file else None
        for strategy in (self.strategy, find_strategy(json_file) if json_file else None):
            if strategy is not None:  # the option wins over the YAML
                check_passed_on(strategy)
        config = {} if self.strategy is None else self.strategy.accelerate_config
        self._said = {**config, **(config.get("deepspeed_config") or {})}

    def value(self, name: str) -> Any:
        """Return a setting; None if neither has it."""
        return option(self.words, name) or self._said.get(name)

    def count(self, name: str, default: int | None = None) -> int | None:
        """Return a setting that is a number. Raises ValueError for another value."""
        try:
            return default if self.value(name) is None else int(str(self.value(name)))
        except ValueError:
            raise ValueError(f"{name} is {self.value(name)!r}\nhint: a whole number") from None


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
        planned = plan_launch(words)
        env = safe_environment()
        if arguments_of(words) is None:  # a user's script may import from its own folder
            env = {name: value for name, value in env.items() if name in os.environ or name != SAFE_PATH}
        print(f"accelerate launch {shlex.join(planned.words)}", file=sys.stderr, flush=True)
        if planned.entry is not None and (interface := interfaces().get(_meet(planned))):
            env.setdefault("GLOO_SOCKET_IFNAME", interface)  # gloo would take the loopback of the host's name
    command = [sys.executable, "-P", "-m", "slm_toolkit.launch.launcher", *planned.words]
    os.execve(command[0], command, env)
    return 1  # never


def plan_launch(words: list[str]) -> PlannedLaunch:
    """Read accelerate's options, the YAML and our script's flags.

    Raises ValueError for what can't be on several machines, and for what `check_training` finds.
    """
    asked = _Asked(tuple(words))
    num_machines = asked.count("num_machines", 1)
    check_surroundings()
    if (arguments := arguments_of(words)) is not None:
        config = training_config(arguments)
        check_training([config], [] if asked.strategy is None else [asked.strategy])
        if asked.strategy is not None:
            strategy = with_group_options(asked.strategy, partial(option, asked.words))
            check_groups(strategy)
            if num_machines == 1 and config.rehearse is None:
                _check_start(config, strategy, asked)
    if num_machines == 1:
        return PlannedLaunch(asked.words)
    if problems := _problems(asked, num_machines):
        raise ValueError("\n".join(problems) + "\nhint: `slm launch --help` has the commands of two machines")
    rank = asked.count("machine_rank")
    # never from a file: the address chooses the host to reach
    place = option(asked.words, "main_process_ip"), asked.count("main_process_port", _DEFAULT_PORT)
    if rank == 0:
        listen(*place).close()
    command = (*_added(asked, num_machines), *asked.words)
    return PlannedLaunch(
        command, num_machines, Entry(rank, shared_launch_facts(command, asked.strategy)), place
    )


def _meet(planned: PlannedLaunch) -> str:
    """Wait for the other machines' launchers. Return this machine's address in their network.

    Raises ValueError for a machine that does not come or was launched differently.
    """
    entry, place = planned.entry, planned.place
    hint = (
        f"run the same command there with its own --machine_rank; open TCP port {place[1]} and all above "
        f"1024; {PATIENCE_VARIABLE} sets a longer wait"
    )
    wait = Wait(entry.rank, planned.num_machines, hint=hint)
    if entry.rank == 0:
        connection = host(listen(*place), place[0], entry.facts, wait)[1]
    else:
        connection = join(entry, place, wait)
        wait_for_port(place)
    return connection.getsockname()[0].removeprefix("::ffff:")


def _check_start(config: RunConfig, strategy: Strategy, asked: _Asked) -> None:
    """Raise ValueError, or exit, if the ranks of one machine would refuse to start, or have nothing to do."""
    check_hub_names(config)
    gpus = gpus_here()
    num_ranks = asked.count("num_processes") or strategy.num_processes
    if strategy.is_single and num_ranks > 1:
        problem = f"--num_processes {num_ranks} with {strategy.name}, which has one process"
        raise ValueError(f"{problem}\nhint: leave it out, or take --strategy ddp")
    config, _ = completed(config, strategy, has_gpu=bool(gpus), num_ranks=num_ranks)
    spec, precision = find_model(config.model), option(asked.words, "mixed_precision")
    launch = {"num_ranks": num_ranks, "mixed_precision": precision, "has_gpu": bool(gpus)}
    strategy = checked_run(config, spec, strategy, **launch).strategy
    check_before_launch(config, spec, strategy, num_ranks, gpus[0] if gpus else None)


def _problems(asked: _Asked, num_machines: int) -> list[str]:
    """Return the problems that would make several machines fail or hang."""
    if num_machines < 1:
        return [f"--num_machines is {num_machines}: at least 1"]
    found = []
    rank, num_ranks = asked.count("machine_rank"), asked.count("num_processes")
    if rank is None or not 0 <= rank < num_machines:
        found.append(f"--machine_rank is {rank}: 0 to {num_machines - 1}, a different one on each machine")
    if option(asked.words, "main_process_ip") is None:
        here = own_addresses()
        found.append(f"no --main_process_ip on the command line: machine 0's address; this machine is {here}")
    if asked.count("main_process_port") == 0:
        found.append("--main_process_port 0: the other machines can't know that port")
    if not num_ranks or num_ranks % num_machines:
        found.append(
            f"--num_processes is {num_ranks}: ranks of all {num_machines} machines, equally many each"
        )
    if (launcher := asked.value("deepspeed_multinode_launcher")) not in (None, "standard"):
        found.append(f"deepspeed_multinode_launcher {launcher} starts all machines from one: use standard")
    return found


def _added(asked: _Asked, num_machines: int) -> list[str]:
    """Return options that several machines need and that were not given."""
    if (strategy := asked.strategy) is None:
        return []
    words = []
    if strategy.is_deepspeed and asked.value("deepspeed_multinode_launcher") is None:
        words += ["--deepspeed_multinode_launcher", "standard"]
    num_ranks = asked.count("num_processes")
    fitted = fit_groups(strategy, num_ranks=num_ranks, ranks_per_node=num_ranks // num_machines)
    for name, size in sorted(group_sizes(fitted).items() - group_sizes(strategy).items()):
        if option(asked.words, name) is None:
            words += [f"--{name}", str(size)]
    return words
