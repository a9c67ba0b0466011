"""`slm launch`: `accelerate launch` on one of several machines, once all of them have met."""

import argparse
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.errors import user_errors
from slm_toolkit.groups import fit_groups, group_options
from slm_toolkit.launch_words import option, said_alike
from slm_toolkit.meeting import Link, Machine, attend, host, is_own_address, listen, own_addresses
from slm_toolkit.patience import PATIENCE_SECONDS, PATIENCE_VARIABLE, Patience, patience_seconds
from slm_toolkit.strategy import Strategy, read_strategy

_DEFAULT_PORT = 29500  # accelerate's
_CLOSE_SECONDS = 5.0
_DESCRIPTION = f"""\
What `accelerate launch` does, with its options, on one of several machines: type the same on each, with its
own --machine_rank. Before anything starts the machines meet at --main_process_ip. Each says who is missing
after {PATIENCE_SECONDS:g} s (or those of {PATIENCE_VARIABLE} in the environment), or in which options, files
and versions they differ.
`accelerate launch` alone waits 15 minutes without a word and then shows a traceback.

What several machines need is added where it is not said: DeepSpeed's standard launcher, a copy of a shipped
hybrid shard on each machine, the network interface for gloo. The command that is run stands on stderr."""
_EPILOG = """\
on the first machine, 10.0.0.1, and on the second, eight GPUs each:
  slm launch --config_file accel_configs/fsdp_hybrid_shard.yaml --num_machines 2 --num_processes 16 \\
      --main_process_ip 10.0.0.1 --machine_rank 0 -m slm_toolkit.train --model slm-1b
  slm launch --config_file accel_configs/fsdp_hybrid_shard.yaml --num_machines 2 --num_processes 16 \\
      --main_process_ip 10.0.0.1 --machine_rank 1 -m slm_toolkit.train --model slm-1b
"""


@dataclass(frozen=True)
class PlannedLaunch:
    """An `accelerate launch` on this machine, and how it finds the others."""

    words: tuple[str, ...]
    "after `accelerate launch`, with what was added to the user's"
    machine: Machine
    address: str
    "of machine 0; empty where there is one machine"
    port: int


def fill(parser: argparse.ArgumentParser) -> None:
    """The flags of `slm launch`, which are accelerate's, and what it does."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "slm launch [accelerate launch's options] -m slm_toolkit.train [its flags]"
    parser.prefix_chars = ""  # no word is an option of ours
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(verb=_launch)


def _launch(args: argparse.Namespace) -> int:
    if not args.words or args.words[0] in ("-h", "--help"):
        args.parser.print_help()
        return 0 if args.words else 2
    with user_errors():
        planned = plan_launch(args.words)
        links = meet(planned)
    if links:
        found = links[0].interface
        if found is not None:  # or gloo takes that of the host's name, often the loopback
            os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
        for link in links:
            link.socket.close()
    command = [sys.executable, "-m", "accelerate.commands.launch", *planned.words]
    print(f"accelerate launch {shlex.join(planned.words)}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.execv(command[0], command)
    return 0


def plan_launch(words: list[str]) -> PlannedLaunch:
    """Read accelerate's options and the YAML. Raises ValueError for what can't be on several machines."""
    command = tuple(words)
    config_file = option(command, "config_file")
    strategy = read_strategy(Path(config_file).expanduser()) if config_file else None
    said = {} if strategy is None else strategy.accelerate_config
    machines = _count(option(command, "num_machines"), said.get("num_machines"), "num_machines") or 1
    if machines == 1:
        return PlannedLaunch(command, Machine(0, 1, {}), "", 0)
    processes = _count(option(command, "num_processes"), said.get("num_processes"), "num_processes")
    rank = _count(option(command, "machine_rank"), said.get("machine_rank"), "machine_rank")
    address = option(command, "main_process_ip") or said.get("main_process_ip")
    port = _count(option(command, "main_process_port"), said.get("main_process_port"), "main_process_port")
    problems = []
    if rank is None or not 0 <= rank < machines:
        problems.append(f"--machine_rank is {rank}: 0 to {machines - 1}, another on each machine")
    if not address:
        problems.append(f"no --main_process_ip: where machine 0 is found; this one is {own_addresses()}")
    elif rank == 0 and not is_own_address(address):
        problems.append(
            f"--machine_rank 0 is the machine at {address} (--main_process_ip), this one is {own_addresses()}"
        )
    if port == 0:
        problems.append("--main_process_port 0: the others can't know which port that will be")
    if processes is None or processes % machines:
        problems.append(
            f"--num_processes is {processes}: ranks of all machines, equally many on each of {machines}"
        )
    launcher = option(command, "deepspeed_multinode_launcher") or (said.get("deepspeed_config") or {}).get(
        "deepspeed_multinode_launcher"
    )
    if launcher not in (None, "standard"):
        problems.append(f"deepspeed_multinode_launcher is {launcher}, which starts the other machines itself")
    if problems:
        raise ValueError("\n".join(problems) + "\nhint: `slm launch --help` shows two machines' commands")
    command = (*_added(command, strategy, machines, processes), *command)
    alike = said_alike(command, strategy, num_machines=machines, num_processes=processes)
    return PlannedLaunch(command, Machine(rank, machines, alike), str(address), port or _DEFAULT_PORT)


def meet(planned: PlannedLaunch) -> list[Link]:
    """Links to the other machines, on all but the first to that one; none where there is one machine."""
    me, address, port = planned.machine, planned.address, planned.port
    if me.num_machines == 1:
        return []
    seconds = patience_seconds()
    if me.rank > 0:
        hint = (
            f"is `slm launch` running there with --machine_rank 0, and may TCP reach port {port}? "
            f"{PATIENCE_VARIABLE} waits longer"
        )
        return [attend(me, address, port, patience=Patience(seconds, 0.0, hint))]
    hint = (
        "the same command there, with that --machine_rank; may TCP reach this port, and all above 1024? "
        f"{PATIENCE_VARIABLE} waits longer"
    )
    with listen(address, port) as listener:
        links = host(me, listener, at=f"{address}:{port}", patience=Patience(seconds, 0.0, hint))
        for link in links:  # theirs close first, so that the port is free for accelerate
            link.socket.settimeout(_CLOSE_SECONDS)
            with suppress(OSError):
                link.socket.recv(1)
    return links


def _added(command: tuple[str, ...], strategy: Strategy | None, machines: int, processes: int) -> list[str]:
    """Options that several machines need and nobody has said."""
    words = []
    if option(command, "rdzv_conf") is None:  # accelerate's own wait, of 900 s, when all have met already
        words += ["--rdzv_conf", f"timeout={round(patience_seconds())}"]
    if strategy is None:
        return words
    section = strategy.accelerate_config.get("deepspeed_config") or {}
    says = option(command, "deepspeed_multinode_launcher") or section.get("deepspeed_multinode_launcher")
    if strategy.engine == "deepspeed" and says is None:
        words += ["--deepspeed_multinode_launcher", "standard"]
    fitted = fit_groups(strategy, num_ranks=processes, ranks_per_node=processes // machines)
    return words + [
        word
        for name, size in zip(group_options(fitted)[::2], group_options(fitted)[1::2], strict=True)
        if option(command, name[2:]) is None
        for word in (name, size)
    ]


def _count(of_option: str | None, of_yaml: object, name: str) -> int | None:
    """The option's value, else the YAML's. Raises ValueError for what is no number."""
    said = of_yaml if of_option is None else of_option
    if said is None:
        return None
    try:
        return int(said)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {said!r}\nhint: a whole number") from None
