"""Machines meet before they start ranks: all are told who is missing and what differs."""

import re
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import ENV, ROOT, free_port, own_strategy, slm
from torch.distributed import TCPStore

from slm_toolkit.cli.launch import plan_launch
from slm_toolkit.launch.command_line import option, shared_launch_facts
from slm_toolkit.launch.rendezvous import Meeting, interfaces, listen, patience_seconds

HERE = "127.0.0.1"
PORT = str(free_port())
SOON, LATER = 10.0, 60.0
"seconds to wait; the second where a process comes, which imports torch"
ANOTHER = """
import sys
from torch.distributed import TCPStore
from slm_toolkit.launch.rendezvous import *
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if rank == 0 else None
Meeting(rank, 3, ("127.0.0.1", port), facts={}, store=store).wait(60, hint="come")
"""


def served(port: int = 0) -> TCPStore:
    """Machine 0's store, as its launcher makes it."""
    return TCPStore(HERE, port, is_master=True, wait_for_workers=False)


class Machines:
    """Machine 0 in a thread, on a port of this machine, and others that come."""

    def __init__(self, num_machines: int, seconds: float = SOON) -> None:
        self.num_machines, self.seconds, self.threads = num_machines, seconds, ThreadPoolExecutor()
        self.store = served()
        self.at = f"{HERE}:{self.store.port}"
        self.first = self.come(0, store=self.store)

    def come(self, rank: int, *, seconds: float | None = None, **options: Any) -> Future:
        place, options = (HERE, self.store.port), {"facts": {}, **options}
        meeting = Meeting(rank, self.num_machines, place, **options)
        return self.threads.submit(meeting.wait, seconds or self.seconds, hint="come")


def said_within(capsys: pytest.CaptureFixture[str], pattern: str) -> str:
    """All of stderr until it has a line that matches."""
    found, deadline = "", time.monotonic() + LATER
    while not re.search(pattern, found):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
        found += capsys.readouterr().err
    return found


@pytest.mark.quick
def test_all_who_come_know_each_other() -> None:
    machines = Machines(3)
    second, first = machines.come(2), machines.come(1)
    for met in (machines.first, first, second):
        _, entries = met.result()
        assert {rank: (each.address, each.reached_at) for rank, each in entries.items()} == dict.fromkeys(
            range(3), (HERE, HERE)
        )
    assert interfaces()[HERE] == "lo"


@pytest.mark.quick
def test_who_is_missing_is_told_to_all_who_came() -> None:
    machines = Machines(4, seconds=2.0)
    for rank, met in {0: machines.first, 2: machines.come(2)}.items():
        said = f"machine {rank} of 4 waited 2 s for machines 1, 3 at {machines.at}\nhint: come"
        with pytest.raises(ValueError, match=re.escape(said)):
            met.result()


@pytest.mark.quick
def test_what_differs_is_told_to_all() -> None:
    machines = Machines(2)
    other = machines.come(1, facts={"versions": {"torch": "2.13"}, "script": {"seed": "1", "json": None}})
    for met in (machines.first, other):
        with pytest.raises(ValueError, match="hint: use the same files") as refused:
            met.result()
        assert str(refused.value).splitlines()[:2] == [
            f'versions torch: not given on machine 0, "2.13" on machine 1 ({HERE})',
            f'script seed: not given on machine 0, "1" on machine 1 ({HERE})',
        ]


@pytest.mark.quick
def test_why_one_machine_can_not_start_is_told_to_all() -> None:
    machines = Machines(4)
    waiting = machines.come(1)
    broken = machines.come(2, problem="no such file: text.txt\nhint: is it there?")
    for met in (machines.first, waiting, broken):
        with pytest.raises(
            ValueError, match=re.escape(f"machine 2 ({HERE}): no such file: text.txt\nhint: ")
        ):
            met.result()


@pytest.mark.quick
def test_of_two_machines_with_one_rank_the_earlier_ends_and_the_others_go_on() -> None:
    machines = Machines(3)
    earlier = machines.come(1)
    time.sleep(1)
    later = machines.come(1)
    with pytest.raises(ValueError, match=f"--machine_rank 1 of {HERE} is taken by {HERE}\nhint: every"):
        earlier.result()
    third = machines.come(2)
    for met in (machines.first, later, third):
        assert met.result()
    with pytest.raises(ValueError, match="--machine_rank 1 of .* is taken by "):  # all have come
        machines.come(1).result()


@pytest.mark.quick
def test_strangers_do_not_disturb_the_machines() -> None:
    machines = Machines(2)
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x3c\x85\xf7\xce\n", b"3\n", b"\x00" * 5000, b""):
        with socket.create_connection((HERE, machines.store.port)) as stranger:
            stranger.sendall(sent)
    with socket.create_connection((HERE, machines.store.port)):  # who says nothing, and stays
        other = machines.come(1)
        assert machines.first.result()
        assert other.result()


@pytest.mark.quick
@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_program_at_the_port_is_recognised(answer: bytes | None) -> None:
    """One that says nothing, one that ends each connection, and one that says something else."""
    held = []

    def serve(listener: socket.socket) -> None:
        with suppress(OSError):  # the listener was closed
            while True:
                held.append(listener.accept()[0])
                if answer is not None:
                    held[-1].sendall(answer)
                    held.pop().close()

    with socket.create_server((HERE, 0)) as listener, ThreadPoolExecutor() as threads:
        threads.submit(serve, listener)
        port = listener.getsockname()[1]
        said = f"waited 3 s for machine 0 at {HERE}:{port} (no slm launch answers there: another"
        with pytest.raises(ValueError, match=re.escape(said)):
            Meeting(1, 2, (HERE, port), facts={}).wait(3, hint="come")
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.quick
def test_the_first_machine_may_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    with listen(HERE, 0) as port_of_nobody, ThreadPoolExecutor() as threads:
        port = port_of_nobody.getsockname()[1]
        port_of_nobody.close()
        early = threads.submit(Meeting(1, 2, (HERE, port), facts={}).wait, SOON, hint="come")
        line = rf"machine 1 of 2: waiting for machine 0 at {HERE}:{port} \(Connection refused\), 0 of 10 s"
        said_within(capsys, line)
        assert Meeting(0, 2, (HERE, port), facts={}, store=served(port)).wait(SOON, hint="come")
        assert early.result()


def test_the_first_machine_may_go_away_and_come_again() -> None:
    with listen(HERE, 0) as listener:
        port = listener.getsockname()[1]
    words = [sys.executable, "-c", ANOTHER, "0", str(port)]
    with subprocess.Popen(words, env=ENV) as first, ThreadPoolExecutor() as threads:
        others = [Meeting(rank, 3, (HERE, port), facts={}) for rank in (1, 2)]
        second = threads.submit(others[0].wait, LATER, hint="come")
        wait = timedelta(seconds=LATER)
        watch = TCPStore(HERE, port, is_master=False, wait_for_workers=False, timeout=wait)
        watch.wait(["slm_toolkit/machines/0", "slm_toolkit/machines/1"])
        first.kill()
        first.wait()
        third = threads.submit(others[1].wait, LATER, hint="come")
        Meeting(0, 3, (HERE, port), facts={}, store=served(port)).wait(LATER, hint="come")
        assert second.result()
        assert third.result()


@pytest.mark.quick
def test_nothing_is_said_while_nobody_is_late(capsys: pytest.CaptureFixture[str]) -> None:
    store = served()
    place, options = (HERE, store.port), {"hint": "come", "silent_seconds": 5.0}
    with ThreadPoolExecutor() as threads:
        first = threads.submit(Meeting(0, 2, place, facts={}, store=store).wait, SOON, **options)
        assert Meeting(1, 2, place, facts={}).wait(SOON, **options)
        assert first.result()
    assert capsys.readouterr().err == ""


@pytest.mark.quick
def test_a_port_that_is_taken_is_said() -> None:
    with listen(HERE, 0) as taken, pytest.raises(ValueError, match="hint: another launch") as raised:
        listen(HERE, taken.getsockname()[1])
    assert f"Address already in use, by {psutil.Process().name()} (pid {psutil.Process().pid})" in str(
        raised.value
    )


@pytest.mark.parametrize("said_in", ["options", "yaml"])
def test_slm_launch_names_a_port_that_is_taken_and_not_answered_on(said_in: str, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("", 0))  # and does not listen: accelerate finds it free, torch does not
        port = other.getsockname()[1]
        words = ["--main_process_port", str(port)] if said_in == "options" else []
        text = "distributed_type: MULTI_GPU\nnum_processes: 2\n"
        text += f"main_process_port: {port}\n" if said_in == "yaml" else ""
        done = slm("launch", *words, "--config_file", own_strategy(tmp_path, text), "-m", "slm_toolkit.train")
    assert done.code == 2
    # /proc/net/tcp has no line for such a socket: nobody can say whose it is
    assert f"error: can't listen on port {port} of this machine: Address already in use\nhint: " in done.err


@pytest.mark.quick
@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf", "nan"])
def test_a_patience_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLM_PATIENCE_SECONDS", text)
    with pytest.raises(ValueError, match=f"SLM_PATIENCE_SECONDS is '{text}'\nhint: seconds"):
        patience_seconds()


def words_of(config: str | Path, *more: str) -> list[str]:
    asked = ("--num_machines", "2", "--num_processes", "8", "--machine_rank", "1", "--main_process_ip", HERE)
    port = ("--main_process_port", PORT)
    return ["--config_file", str(config), *asked, *port, *more, "-m", "slm_toolkit.train", "--seed", "1"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("strategy", "more", "added"),
    [
        ("ddp", (), []),
        ("ds_zero2", (), ["--deepspeed_multinode_launcher", "standard"]),
        ("ds_zero2", ("--deepspeed_multinode_launcher=standard",), []),
        (
            "fsdp_hybrid_shard",
            (),
            ["--parallelism_config_dp_shard_size", "4"],
        ),  # two copies stand in the file
        ("fsdp_hybrid_shard", ("--parallelism_config_dp_shard_size", "4"), []),
    ],
)
def test_what_several_machines_need_is_added_where_it_is_not_said(
    strategy: str, more: tuple[str, ...], added: list[str]
) -> None:
    words = words_of(ROOT / "accel_configs" / f"{strategy}.yaml", *more)
    planned = plan_launch(words)
    assert list(planned.words) == ["--rdzv_conf", "timeout=300", *added, *words]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--machine_rank", "2"), "--machine_rank is 2: 0 to 1, a different one on each machine"),
        (("--machine_rank=one",), "machine_rank is 'one'"),
        (
            ("--main_process_ip", "10.255.255.1", "--machine_rank", "0"),
            "--machine_rank 0 must be the machine at 10.255",
        ),
        (("--main_process_port", "0"), "--main_process_port 0: the other machines can't know"),
        (("--num_processes", "3"), "--num_processes is 3: ranks of all machines, equally many on each of 2"),
        (("--num_machines", "0"), "--num_machines is 0: at least 1"),
        (("--deepspeed_multinode_launcher", "pdsh"), "deepspeed_multinode_launcher pdsh starts all machines"),
    ],
)
def test_what_would_wait_in_vain_is_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){re.escape(says)}.*hint: "):
        plan_launch([*words, *words_of(ROOT / "accel_configs" / "ds_zero2.yaml")])


@pytest.mark.quick
def test_a_machine_that_can_not_start_tells_the_first_which_ends_at_once() -> None:
    words = [*words_of(ROOT / "accel_configs" / "ddp.yaml"), "--dataset", "no/such.txt"]
    says = "no such file: no/such.txt\nhint: "
    assert plan_launch(words).shared["problem"].startswith(says)
    with pytest.raises(ValueError, match=says):
        plan_launch(["--machine_rank", "0", *words])


def test_all_that_is_wrong_is_said_at_once() -> None:
    done = slm(
        "launch", "--config_file", "accel_configs/ddp.yaml", "--num_machines", "2", "--num_processes", "3"
    )
    assert done.code == 2
    assert (
        "error: no --main_process_ip on the command line: the address of machine 0; this machine is "
        in done.err
    )
    assert "--num_processes is 3" in done.err


@pytest.mark.quick
def test_machines_may_differ_in_their_rank_and_paths_alone(tmp_path: Path) -> None:
    shipped = ROOT / "accel_configs" / "ds_zero2.yaml"
    own = own_strategy(tmp_path, shipped.read_text().replace("ds_configs", str(ROOT / "ds_configs")))

    def said(words: list[str]) -> dict:
        return plan_launch(words).shared["facts"]

    alike = words_of(own)
    alike[alike.index("--machine_rank") + 1] = "0"
    assert said(words_of(shipped)) == said(alike)
    assert said(words_of(shipped)) == said([*words_of(shipped)[:-2], "--seed=1"])
    for changed in (
        [*words_of(shipped)[:-1], "2"],
        ["--mixed_precision", "bf16", *words_of(shipped)],
        words_of(ROOT / "accel_configs" / "ds_zero3.yaml"),
    ):
        assert said(words_of(shipped)) != said(changed)
    assert shared_launch_facts((), None)["versions"]["torch"]


@pytest.mark.quick
def test_an_option_of_the_script_is_not_the_launchers() -> None:
    command = ("accelerate", "launch", "--num-machines", "2", "-m", "x", "--num_processes", "3")
    assert option(command, "num_machines") == "2"
    assert option(command, "num_processes") is None


def test_on_one_machine_it_is_accelerate_launch() -> None:
    done = slm("launch", "--config_file", "accel_configs/single.yaml", "-m", "this")
    assert done.code == 0, done.err
    assert "accelerate launch --config_file accel_configs/single.yaml -m this\n" in done.err
    assert "The Zen of Python" in done.out


def test_its_help_has_the_two_commands() -> None:
    done = slm("launch", "--help")
    assert done.code == 0
    assert "--machine_rank 0 -m slm_toolkit.train" in done.out
    assert slm("launch").code == 2
