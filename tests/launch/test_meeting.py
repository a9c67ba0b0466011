"""Machines meet before they launch: all are told who is missing, who is too many and what differs."""

import os
import re
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import ENV, ROOT, own_strategy, slm

from slm_toolkit.cli.launch import plan_launch
from slm_toolkit.launch.command_line import option, shared_launch_facts
from slm_toolkit.launch.rendezvous import (
    Machine,
    Patience,
    attend,
    host,
    interface_of,
    listen,
    open_store,
    patience_seconds,
    wait_until_closed,
)

HERE = "127.0.0.1"
SOON = Patience(seconds=10.0, silent_seconds=0.0, hint="come")
LATER = Patience(seconds=60.0, silent_seconds=0.0, hint="come")
"where a process comes, which imports torch"


class Meeting:
    """Machine 0 in a thread, on a port of this machine."""

    def __init__(self, num_machines: int, patience: Patience = SOON) -> None:
        self.num_machines, self.threads = num_machines, ThreadPoolExecutor()
        self.patience = patience
        self.store = open_store(HERE, 0)
        self.port = self.store.underlying_store.port
        self.at = f"{HERE}:{self.port}"
        self.peers = self.threads.submit(host, self.machine(0), self.store, at=self.at, patience=patience)

    def machine(self, rank: int, problem: str | None = None, **said: object) -> Machine:
        return Machine(rank, self.num_machines, {"num_processes": 4, **said}, problem)

    def come(self, rank: int, problem: str | None = None, **said: object) -> "Future[socket.socket]":
        me = self.machine(rank, problem, **said)
        return self.threads.submit(attend, me, HERE, self.port, patience=self.patience)


def said_within(capsys: pytest.CaptureFixture[str], pattern: str) -> str:
    """All of stderr until it has a line that matches."""
    found, deadline = "", time.monotonic() + LATER.seconds
    while not re.search(pattern, found):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
        found += capsys.readouterr().err
    return found


@pytest.mark.quick
def test_all_who_come_are_known_in_order_of_their_rank() -> None:
    meeting = Meeting(3)
    second, first = meeting.come(2), meeting.come(1)
    peers = meeting.peers.result()
    assert [(peer.rank, peer.address, peer.reached_at) for peer in peers] == [
        (1, HERE, HERE),
        (2, HERE, HERE),
    ]
    assert interface_of(peers[0].reached_at) == "lo"
    for peer, connection in zip(peers, (first.result(), second.result()), strict=True):
        assert connection.getsockname() == (peer.address, peer.port)
        assert connection.getpeername() == (HERE, meeting.port)


@pytest.mark.quick
def test_nobody_goes_on_while_the_port_is_still_the_meetings() -> None:
    """Else a launcher that starts soon would take this store for its own of the same port."""
    meeting = Meeting(2)
    connection = meeting.come(1).result()
    assert len(meeting.peers.result()) == 1
    gone_on = meeting.threads.submit(wait_until_closed, connection)
    time.sleep(0.5)
    assert not gone_on.done()
    del meeting.store
    gone_on.result(timeout=5)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HERE, meeting.port)).close()


@pytest.mark.quick
def test_who_is_missing_is_told_to_all_who_came() -> None:
    meeting = Meeting(4, Patience(1.0, 0.0, "come"))
    here = meeting.come(2)
    said = f"2 of 4 machines came within 1 s: machines 1, 3 did not connect to {meeting.at}\nhint: come"
    for place in (meeting.peers, here):
        with pytest.raises(ValueError, match=re.escape(said)):
            place.result()


@pytest.mark.quick
def test_what_differs_is_told_to_all() -> None:
    meeting = Meeting(2)
    other = meeting.come(1, num_processes=8, script={"seed": "1"})
    for place in (meeting.peers, other):
        with pytest.raises(ValueError, match="hint: use the same files") as refused:
            place.result()
        assert str(refused.value).splitlines()[:2] == [
            f"num_processes: 4 on machine 0, 8 on machine 1 ({HERE})",
            f'script seed: not given on machine 0, "1" on machine 1 ({HERE})',
        ]


@pytest.mark.quick
def test_why_one_machine_can_not_start_is_told_to_all() -> None:
    meeting = Meeting(4)
    waiting, broken = meeting.come(1), meeting.come(2, "no such file: text.txt\nhint: is it there?")
    with pytest.raises(ValueError, match="^no such file: text.txt\n"):
        broken.result()
    late = meeting.come(3)
    for place in (meeting.peers, waiting, late):
        with pytest.raises(
            ValueError, match=re.escape(f"machine 2 ({HERE}): no such file: text.txt\nhint: ")
        ):
            place.result()


@pytest.mark.quick
@pytest.mark.parametrize("rank", [-1, 0, 3])
def test_a_rank_that_no_machine_can_have_is_refused_and_the_others_go_on(rank: int) -> None:
    meeting = Meeting(3)
    said = f"--machine_rank {rank} of {HERE}: ranks of 3 machines are 0 to 2\nhint: every machine"
    with pytest.raises(ValueError, match=re.escape(said)):
        meeting.come(rank).result()
    first, second = meeting.come(1), meeting.come(2)
    assert [peer.rank for peer in meeting.peers.result()] == [1, 2]
    assert first.result()
    assert second.result()


@pytest.mark.quick
def test_of_two_machines_with_one_rank_the_earlier_ends_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    meeting = Meeting(3, LATER)
    earlier = meeting.come(1)
    said_within(capsys, "machine 1 is here")
    later = meeting.come(1)
    with pytest.raises(ValueError, match=f"--machine_rank 1 of {HERE} is taken by {HERE}\nhint: every"):
        earlier.result()
    meeting.come(2)
    assert [peer.rank for peer in meeting.peers.result()] == [1, 2]
    assert later.result()


@pytest.mark.quick
def test_strangers_do_not_disturb_the_machines() -> None:
    meeting = Meeting(2)
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x3c\x85\xf7\xce\n", b"3\n", b"\x00" * 5000, b""):
        with socket.create_connection((HERE, meeting.port)) as stranger:
            stranger.sendall(sent)
    with socket.create_connection((HERE, meeting.port)):  # who says nothing, and stays
        other = meeting.come(1)
        assert len(meeting.peers.result()) == 1
        assert other.result()


@pytest.mark.quick
@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_program_at_the_port_is_recognised(
    answer: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
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
        said = f"did not meet machine 0 at {HERE}:{port} within 3 s (no slm launch answers there: another"
        with pytest.raises(ValueError, match=re.escape(said)):
            attend(Machine(1, 2, {}), HERE, port, patience=Patience(3.0, 0.0, "come"))
        listener.shutdown(socket.SHUT_RDWR)


def test_a_machine_may_go_away_and_come_again(capsys: pytest.CaptureFixture[str]) -> None:
    meeting = Meeting(3, LATER)
    program = (
        "import sys; from slm_toolkit.launch.rendezvous import *\n"
        "me = Machine(1, 3, {'num_processes': 4})\n"
        f"attend(me, '{HERE}', {meeting.port}, patience=Patience(60, 0, ''))"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=ENV) as gone:
        said_within(capsys, f"machine 1 is here \\({HERE}\\)")
        gone.kill()
    said_within(capsys, f"machine 1 \\({HERE}\\) went away again")
    again, other = meeting.come(1), meeting.come(2)
    assert len(meeting.peers.result()) == 2
    assert again.result()
    assert other.result()


@pytest.mark.quick
def test_the_first_machine_may_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as port_of_nobody:
        port_of_nobody.bind((HERE, 0))
        port = port_of_nobody.getsockname()[1]
        me = Machine(1, 2, {})
        with ThreadPoolExecutor() as threads:
            early = threads.submit(attend, me, HERE, port, patience=SOON)
            said_within(
                capsys, rf"machine 1 of 2: looking for machine 0 at {HERE}:{port} \(Connection refused\)"
            )
            port_of_nobody.close()
            store = open_store(HERE, port)
            host(Machine(0, 2, {}), store, at="here", patience=SOON)
            assert early.result()


def test_the_first_machine_may_go_away_and_come_again(capsys: pytest.CaptureFixture[str]) -> None:
    with listen(HERE, 0) as listener:
        port = listener.getsockname()[1]
    program = (
        "from slm_toolkit.launch.rendezvous import *\n"
        f"store = open_store('{HERE}', {port})\n"
        "host(Machine(0, 3, {}), store, at='here', patience=Patience(60, 0, ''))"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=ENV) as first, ThreadPoolExecutor() as threads:
        other = threads.submit(attend, Machine(1, 3, {}), HERE, port, patience=LATER)
        said_within(capsys, "machine 1 of 3: machine 0 is there and waits for others")
        first.kill()
        said_within(capsys, f"looking for machine 0 at {HERE}:{port} \\(Connection refused\\)")
        third = threads.submit(attend, Machine(2, 3, {}), HERE, port, patience=LATER)
        host(Machine(0, 3, {}), open_store(HERE, port), at="here", patience=LATER)
        assert other.result()
        assert third.result()


@pytest.mark.quick
def test_the_port_of_the_meeting_is_free_after_it() -> None:
    meeting = Meeting(2)
    other = meeting.come(1)
    meeting.peers.result()
    del meeting.store, meeting.peers
    listen(HERE, meeting.port).close()
    other.result().close()


@pytest.mark.quick
def test_nothing_is_said_while_nobody_is_late(capsys: pytest.CaptureFixture[str]) -> None:
    meeting = Meeting(2, Patience(10.0, 5.0, "come"))
    attend(meeting.machine(1), HERE, meeting.port, patience=Patience(10.0, 5.0, "come"))
    meeting.peers.result()
    assert capsys.readouterr().err == ""


@pytest.mark.quick
def test_a_port_that_is_taken_is_said() -> None:
    with listen(HERE, 0) as taken, pytest.raises(ValueError, match="hint: another launch") as raised:
        listen(HERE, taken.getsockname()[1])
    assert f"Address already in use, by {psutil.Process().name()} (pid {os.getpid()})" in str(raised.value)


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
    return ["--config_file", str(config), *asked, *more, "-m", "slm_toolkit.train", "--seed", "1"]


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
    assert (planned.machine.rank, planned.machine.num_machines) == (1, 2)
    assert (planned.address, planned.port) == (HERE, 29500)


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
    assert plan_launch(words).machine.problem.startswith(says)
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
        return plan_launch(words).machine.facts

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
    assert shared_launch_facts((), None, num_machines=2, num_processes=4)["versions"]["torch"]


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
