"""Machines meet before they launch: all are told who is missing, who is too many and what differs."""

import os
import re
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
import yaml
from conftest import ROOT, own_strategy, slm

from slm_toolkit.cli.launch import plan_launch
from slm_toolkit.launch.command_line import option, said_alike
from slm_toolkit.launch.rendezvous import Link, Machine, Patience, attend, host, listen, patience_seconds
from slm_toolkit.strategy.groups import fit_groups
from slm_toolkit.strategy.strategy import find_strategy, on_nodes, shipped_strategies

HERE = "127.0.0.1"
SOON = Patience(seconds=10.0, silent_seconds=0.0, hint="come")


class Meeting:
    """Machine 0 in a thread, on a port of this machine."""

    def __init__(self, num_machines: int, patience: Patience = SOON) -> None:
        self.num_machines, self.threads = num_machines, ThreadPoolExecutor()
        listener = listen(HERE, 0)
        self.port = listener.getsockname()[1]
        self.at = f"{HERE}:{self.port}"
        me = self.machine(0)
        self.links = self.threads.submit(lambda: host(me, listener, at=self.at, patience=patience))

    def machine(self, rank: int, **said: object) -> Machine:
        return Machine(rank, self.num_machines, {"num_processes": 4, **said})

    def come(self, rank: int, **said: object) -> "Future[Link]":
        me = self.machine(rank, **said)
        return self.threads.submit(attend, me, HERE, self.port, patience=SOON)


def said_within(capsys: pytest.CaptureFixture[str], pattern: str) -> str:
    """All of stderr until it has a line that matches."""
    found, deadline = "", time.monotonic() + 10
    while not re.search(pattern, found):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
        found += capsys.readouterr().err
    return found


def test_all_who_come_are_linked_in_order_of_their_rank() -> None:
    meeting = Meeting(3)
    second, first = meeting.come(2), meeting.come(1)
    links = meeting.links.result()
    assert [(link.rank, link.address) for link in links] == [(1, HERE), (2, HERE)]
    assert links[0].interface == "lo"
    for link, other in zip(links, (first.result(), second.result()), strict=True):
        assert (other.rank, other.interface) == (0, "lo")
        other.socket.sendall(b"hello")
        assert link.socket.recv(5) == b"hello"


def test_who_is_missing_is_told_to_all_who_came() -> None:
    meeting = Meeting(4, Patience(1.0, 0.0, "come"))
    here = meeting.come(2)
    said = f"2 of 4 machines came within 1 s: nobody came to {meeting.at} as machines 1, 3\nhint: come"
    for place in (meeting.links, here):
        with pytest.raises(ValueError, match=re.escape(said)):
            place.result()


def test_what_differs_is_told_to_all() -> None:
    meeting = Meeting(2)
    other = meeting.come(1, num_processes=8, script={"seed": "1"})
    for place in (meeting.links, other):
        with pytest.raises(ValueError, match="hint: the same command") as refused:
            place.result()
        assert str(refused.value).splitlines()[:2] == [
            f"num_processes: 4 on machine 0, 8 on machine 1 ({HERE})",
            f'script seed: not said on machine 0, "1" on machine 1 ({HERE})',
        ]


@pytest.mark.parametrize(
    ("rank", "says"),
    [
        (1, f" is taken by {HERE}"),
        (0, " is taken by this machine"),
        (3, ": 3 machines have 0 to 2"),
        (-1, ": 3 machines have 0 to 2"),
    ],
)
def test_a_rank_that_is_taken_or_none_is_sent_away_and_the_others_go_on(rank: int, says: str) -> None:
    meeting = Meeting(3)
    first = meeting.come(1)
    wrong = meeting.threads.submit(
        lambda: (time.sleep(0.3), attend(meeting.machine(rank), HERE, meeting.port, patience=SOON))
    )
    said = f"--machine_rank {rank} of {HERE}{says}\nhint: every machine"
    with pytest.raises(ValueError, match=re.escape(said)):
        wrong.result()
    meeting.come(2)
    assert [link.rank for link in meeting.links.result()] == [1, 2]
    first.result()


def test_somebody_else_is_no_machine(capsys: pytest.CaptureFixture[str]) -> None:
    meeting = Meeting(2)
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\x3c\x85\xf7\xce\n", b'{"machine_rank": "one"}\n', b"3\n"):
        with socket.create_connection((HERE, meeting.port)) as stranger:
            stranger.sendall(sent)
    said_within(capsys, f"(?s)({HERE} connected who is no machine of an `slm launch`.*){{4}}")
    meeting.come(1)
    assert len(meeting.links.result()) == 1


def test_a_machine_may_go_away_and_come_again(capsys: pytest.CaptureFixture[str]) -> None:
    meeting = Meeting(3)
    with socket.create_connection((HERE, meeting.port)) as gone:
        gone.sendall(b'{"machine_rank": 1, "said": {"num_processes": 4}}\n')
        said_within(capsys, f"machine 1 is here \\({HERE}\\)")
    said_within(capsys, f"machine 1 \\({HERE}\\) went away again")
    again, other = meeting.come(1), meeting.come(2)
    assert len(meeting.links.result()) == 2
    assert {again.result().rank, other.result().rank} == {0}


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
            host(Machine(0, 2, {}), listen(HERE, port), at="here", patience=SOON)
            assert early.result().rank == 0


def test_nothing_is_said_while_nobody_is_late(capsys: pytest.CaptureFixture[str]) -> None:
    meeting = Meeting(2, Patience(10.0, 5.0, "come"))
    attend(meeting.machine(1), HERE, meeting.port, patience=Patience(10.0, 5.0, "come"))
    meeting.links.result()
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize("text", ["0", "-3", "soon", "inf", "nan"])
def test_a_patience_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLM_PATIENCE_SECONDS", text)
    with pytest.raises(ValueError, match=f"SLM_PATIENCE_SECONDS is '{text}'\nhint: seconds"):
        patience_seconds()


def words_of(config: str | Path, *more: str) -> list[str]:
    asked = ("--num_machines", "2", "--num_processes", "8", "--machine_rank", "1", "--main_process_ip", HERE)
    return ["--config_file", str(config), *asked, *more, "-m", "slm_toolkit.train", "--seed", "1"]


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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--machine_rank", "2"), "--machine_rank is 2: 0 to 1, another on each machine"),
        (("--machine_rank=one",), "machine_rank is 'one'"),
        (
            ("--main_process_ip", "10.255.255.1", "--machine_rank", "0"),
            "--machine_rank 0 is the machine at 10.255",
        ),
        (("--main_process_port", "0"), "--main_process_port 0: the others can't know"),
        (("--num_processes", "3"), "--num_processes is 3: ranks of all machines, equally many on each of 2"),
        (("--num_machines", "0"), "--num_machines is 0: at least 1"),
        (("--deepspeed_multinode_launcher", "pdsh"), "deepspeed_multinode_launcher pdsh starts all machines"),
    ],
)
def test_what_would_wait_in_vain_is_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){re.escape(says)}.*hint: "):
        plan_launch([*words, *words_of(ROOT / "accel_configs" / "ds_zero2.yaml")])


def test_all_that_is_wrong_is_said_at_once() -> None:
    done = slm(
        "launch", "--config_file", "accel_configs/ddp.yaml", "--num_machines", "2", "--num_processes", "3"
    )
    assert done.code == 2
    assert (
        "error: no --main_process_ip on the command line: where machine 0 is found; this one is " in done.err
    )
    assert "--num_processes is 3" in done.err


def test_machines_may_differ_in_their_rank_and_paths_alone(tmp_path: Path) -> None:
    shipped = ROOT / "accel_configs" / "ds_zero2.yaml"
    own = own_strategy(tmp_path, shipped.read_text().replace("ds_configs", str(ROOT / "ds_configs")))

    def said(words: list[str]) -> dict:
        return plan_launch(words).machine.said

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
    assert said_alike((), None, num_machines=2, num_processes=4)["versions"]["torch"]


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


@pytest.mark.parametrize("name", shipped_strategies())
def test_the_yamls_for_several_machines_say_what_their_strategy_needs(name: str, copied: Path) -> None:
    text = (copied / "accel_configs" / f"{name}.yaml").read_text()
    written, shipped = yaml.safe_load(text), find_strategy(name)
    if name == "single":
        assert written == shipped.accelerate_config
        return
    fitted = fit_groups(on_nodes(shipped, 3), num_ranks=12, ranks_per_node=4)
    assert written == {**fitted.accelerate_config, "num_processes": 12}
    assert f"slm launch --config_file accel_configs/{name}.yaml --machine_rank 0 --main_process_ip" in text
    assert "num_machines: 3 # nodes; " in text  # what is explained stays so


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copied")
    done = slm("configs", "--copy", str(folder), "--num_machines", "3", "--gpus_per_node", "4")
    assert done.code == 0, done.err
    return folder


def test_a_hybrid_shard_for_machines_of_one_gpu_is_left_out_and_named(tmp_path: Path) -> None:
    done = slm("configs", "--copy", str(tmp_path), "--num_machines", "3", "--gpus_per_node", "1")
    assert done.code == 0
    assert "left out: fsdp_hybrid_shard on 3 ranks" in done.err
    written = {path.stem for path in (tmp_path / "accel_configs").iterdir()}
    assert {*written, "fsdp_hybrid_shard"} == set(shipped_strategies())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--num_machines", "2"), "--num_machines without --copy"),
        (("--copy", "x", "--gpus_per_node", "2"), "--gpus_per_node without --num_machines"),
        (("--copy", "x", "--num_machines", "1"), "--num_machines is 1: at least 2"),
        (("--copy", "x", "--num_machines", "2", "--gpus_per_node", "0"), "--gpus_per_node is 0: at least 1"),
    ],
)
def test_counts_that_can_not_be_are_refused(words: tuple[str, ...], says: str, tmp_path: Path) -> None:
    done = slm("configs", *words, cwd=tmp_path)
    assert done.code == 2
    assert f"error: {says}\nhint: --copy DIR --num_machines 2" in done.err
    assert not (tmp_path / "x").exists()
