"""Faults of a launch on several machines: their numbers, the first one's address, DeepSpeed's launcher."""

from collections.abc import Iterator
from functools import partial

from slm_toolkit.checkup.case import Case, fault, is_count
from slm_toolkit.finding import Edit, Finding

_launch = partial(fault, topic="launch", file="yaml")


def machine_count_faults(case: Case) -> Iterator[Finding]:
    machines, rank = case.config.get("num_machines", 1), case.config.get("machine_rank", 0)
    if not is_count(machines):
        yield _launch(
            *(case, "wrong", "num-machines", f"num_machines is {machines!r}"),
            why="it is a whole number of at least 1",
            change="num_machines: 1",
            key="num_machines",
            edits=(Edit("yaml", ("num_machines",), 1),),
        )
        return
    if rank is not None and (not isinstance(rank, int) or not 0 <= rank < machines):
        yield _launch(
            *(case, "wrong", "machine-rank", f"machine_rank is {rank!r} of {machines} machines"),
            why=f"machines are numbered from 0 to {machines - 1}; the rendezvous waits for a number that "
            "never comes",
            change="machine_rank: 0 on the first, 1 on the next, or --machine_rank at each launch",
            key="machine_rank",
            edits=(Edit("yaml", ("machine_rank",), 0),),
        )
    if machines == 1:
        return
    processes = case.num_processes
    if processes is not None and processes % machines:
        started = max(1, processes // machines) * machines
        has_gpus = not case.gpus_given or started <= case.num_gpus
        yield _launch(
            *(case, "wrong", "processes-per-machine"),
            f"num_processes is {processes} on {machines} machines, which does not divide",
            why=f"accelerate starts {processes} // {machines} on each: {processes // machines * machines}",
            change=f"num_processes: {started}"
            if has_gpus
            else f"a GPU at least on each of {machines} machines",
            key="num_processes",
            edits=(Edit("yaml", ("num_processes",), started),) if has_gpus else (),
        )
    yield from _address(case, machines)
    launcher = case.section("deepspeed_config").get("deepspeed_multinode_launcher")
    if case.engine == "DEEPSPEED" and launcher is None:  # another is not passed on: see keys.py
        yield _launch(
            *(case, "wrong", "deepspeed-launcher"),
            f"deepspeed_multinode_launcher is absent with {machines} machines",
            why="accelerate then calls DeepSpeed's own launcher, which wants pdsh, password-free ssh and a "
            "hostfile; standard starts each machine by its own `accelerate launch`",
            change="deepspeed_multinode_launcher: standard",
            key="deepspeed_config.deepspeed_multinode_launcher",
            edits=(Edit("yaml", ("deepspeed_config", "deepspeed_multinode_launcher"), "standard"),),
        )


def _address(case: Case, machines: int) -> Iterator[Finding]:
    """Missing beside a machine_rank; without both, as `slm configs` writes them, the command says both."""
    address = case.config.get("main_process_ip")
    change = "main_process_ip: the first machine's address, or --main_process_ip at each launch"
    if address is None and "machine_rank" in case.config:
        yield _launch(
            *(
                case,
                "unwise",
                "main-process-ip-absent",
                f"num_machines is {machines}, without main_process_ip",
            ),
            why="unless the command gives --main_process_ip, every machine looks for rank 0 at None",
            change=change,
            key="main_process_ip",
        )
    elif str(address) in ("localhost", "::1", "0.0.0.0") or str(address).startswith("127."):
        yield _launch(
            *(
                case,
                "wrong",
                "main-process-ip-local",
                f"main_process_ip is {address} for {machines} machines",
            ),
            why="on every machine that address is the machine itself: each waits for the others at home",
            change=change,
            key="main_process_ip",
        )
