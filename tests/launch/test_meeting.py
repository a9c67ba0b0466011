"""Machines meet before they start ranks: all are told who is missing and what differs."""

import re
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, free_port, own_strategy, slm

from slm_toolkit.cli.launch import plan_launch
from slm_toolkit.launch.command_line import option, shared_launch_facts
from slm_toolkit.launch.rendezvous import Entry, Wait, host, interfaces, join, listen, patience_seconds

HERE = "127.0.0.1"
PORT = str(free_port())


class Machines:
    """Machine 0 in a thread, on a port of this machine, and others that come."""

    def __init__(self, num_machines: int) -> None:
        self.num_machines, self.threads = num_machines, ThreadPoolExecutor()
        listener = listen(HERE, 0)
        self.port = listener.getsockname()[1]
        self.first = self.threads.submit(host, listener, HERE, {}, Wait(0, num_machines, hint="come"))

    def come(self, rank: int, facts: dict | None = None) -> Future:
        wait = Wait(rank, self.num_machines, hint="come")
        return self.threads.submit(join, Entry(rank, facts or {}), (HERE, self.port), wait)


@pytest.fixture(autouse=True)
def ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLM_PATIENCE_SECONDS", "10")


@pytest.mark.quick
def test_all_who_come_are_connected_with_the_first_whatever_strangers_do() -> None:
    machines = Machines(3)
    for sent in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x3c\x85\xf7\xce\n",
        b"3\n",
        b'{"rank": 9, "facts": {}}\n',
        b"",
    ):
        with socket.create_connection((HERE, machines.port)) as stranger:
            stranger.sendall(sent)
    with socket.create_connection((HERE, machines.port)):  # says nothing, and stays
        second, first = machines.come(2), machines.come(1)
        links = machines.first.result()
    assert sorted(links) == [1, 2]
    for rank, joined in {1: first, 2: second}.items():
        assert joined.result().getsockname()[1] == links[rank].getpeername()[1]
    assert interfaces()[HERE] == "lo"


@pytest.mark.quick
def test_who_is_missing_is_told_to_all_who_came(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("slm_toolkit.launch.rendezvous._SILENT_SECONDS", 1.0)
    monkeypatch.setenv("SLM_PATIENCE_SECONDS", "3")
    machines = Machines(4)
    said = re.escape(f"machine 0 of 4 waited 3 s for machines 1, 3 at {HERE}:{machines.port}\nhint: come")
    for met in (machines.first, machines.come(2)):
        with pytest.raises(ValueError, match=said):
            met.result()
    line = f"machine 0 of 4: waiting for machines 1, 3 at {HERE}:{machines.port}, 1 of 3 s"
    assert capsys.readouterr().err.count(line) == 1


@pytest.mark.quick
def test_what_differs_is_told_to_all() -> None:
    machines = Machines(2)
    other = machines.come(1, {"versions": {"torch": "2.13"}, "script": {"seed": 1, "json": None}})
    for met in (machines.first, other):
        with pytest.raises(ValueError, match="hint: use the same files") as refused:
            met.result()
        assert str(refused.value).splitlines()[:2] == [
            f'versions torch: not given on machine 0, "2.13" on machine 1 ({HERE})',
            f"script seed: not given on machine 0, 1 on machine 1 ({HERE})",
        ]


@pytest.mark.quick
def test_of_two_machines_with_one_rank_the_earlier_ends_and_the_others_go_on() -> None:
    machines = Machines(3)
    earlier = machines.come(1)
    time.sleep(1)
    later = machines.come(1)
    with pytest.raises(ValueError, match=f"--machine_rank 1 of {HERE} is taken by {HERE}\nhint: every"):
        earlier.result()
    third = machines.come(2)
    assert all(met.result() for met in (machines.first, later, third))


@pytest.mark.quick
def test_a_machine_that_ends_while_others_are_missing_is_waited_for_again() -> None:
    machines = Machines(3)
    with socket.create_connection((HERE, machines.port)) as gone:
        gone.sendall(b'{"rank": 1, "facts": {}}\n')
        assert gone.recv(100) == b"slm launch\n"
    second = machines.come(2)
    time.sleep(1)
    assert not machines.first.done()
    first = machines.come(1)
    assert all(met.result() for met in (machines.first, first, second))


@pytest.mark.quick
@pytest.mark.parametrize("answer", [None, b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_another_program_at_the_port_is_recognised(
    answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that says nothing, one that ends each connection, and one that says something else."""
    monkeypatch.setenv("SLM_PATIENCE_SECONDS", "3")
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
            join(Entry(1, {}), (HERE, port), Wait(1, 2, hint="come"))
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.quick
def test_the_first_machine_may_come_last_or_go_away_and_come_again() -> None:
    with listen(HERE, 0) as first, ThreadPoolExecutor() as threads:
        port = first.getsockname()[1]
        early = threads.submit(join, Entry(1, {}), (HERE, port), Wait(1, 2, hint="come"))
        gone = first.accept()[0]
        gone.sendall(b"slm launch\n")
        first.close()
        gone.close()
        time.sleep(1)
        assert host(listen(HERE, port), HERE, {}, Wait(0, 2, hint="come"))
        assert early.result()


@pytest.mark.quick
@pytest.mark.parametrize("text", ["0", "soon", "inf", "nan"])
def test_a_patience_that_is_no_time_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLM_PATIENCE_SECONDS", text)
    with pytest.raises(ValueError, match=f"SLM_PATIENCE_SECONDS is '{text}'\nhint: seconds"):
        patience_seconds()


def words_of(config: str | Path, *more: str) -> list[str]:
    config = ROOT / "accel_configs" / f"{config}.yaml" if isinstance(config, str) else config
    asked = ("--num_machines", "2", "--num_processes", "8", "--machine_rank", "1", "--main_process_ip", HERE)
    port = ("--main_process_port", PORT)
    return ["--config_file", str(config), *asked, *port, *more, "-m", "slm_toolkit.train", "--seed", "1"]


@pytest.mark.quick
def test_what_several_machines_need_is_added_where_it_is_not_said() -> None:
    for strategy, more, added in (
        ("ddp", (), []),
        ("ds_zero2", (), ["--deepspeed_multinode_launcher", "standard"]),
        ("ds_zero2", ("--deepspeed_multinode_launcher=standard",), []),
        ("fsdp_hybrid_shard", (), ["--parallelism_config_dp_shard_size", "4"]),  # the file has two copies
        ("fsdp_hybrid_shard", ("--parallelism_config_dp_shard_size", "4"), []),
    ):
        words = words_of(strategy, *more)
        assert list(plan_launch(words).words) == [*added, *words]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--machine_rank", "2"), "--machine_rank is 2: 0 to 1, a different one on each machine"),
        (("--machine_rank=one",), "machine_rank is 'one'"),
        (("--main_process_ip", "10.255.255.1", "--machine_rank", "0"), "machine 0 can't listen at 10.255"),
        (("--main_process_port", "0"), "--main_process_port 0: the other machines can't know"),
        (("--num_processes", "3"), "--num_processes is 3: ranks of all 2 machines"),
        (("--num_machines", "0"), "--num_machines is 0: at least 1"),
        (("--deepspeed_multinode_launcher", "pdsh"), "deepspeed_multinode_launcher pdsh starts all machines"),
    ],
)
def test_what_would_wait_in_vain_is_refused(words: tuple[str, ...], says: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){re.escape(says)}.*hint: "):
        plan_launch([*words, *words_of("ds_zero2")])


@pytest.mark.quick
def test_a_port_that_is_taken_is_named() -> None:
    with (
        listen(HERE, int(PORT)),
        pytest.raises(ValueError, match=f"at {HERE}:{PORT}: Address already in use;"),
    ):
        plan_launch(["--machine_rank", "0", *words_of("ddp")])


@pytest.mark.quick
def test_machines_may_differ_in_their_rank_and_paths_alone(tmp_path: Path) -> None:
    shipped = ROOT / "accel_configs" / "ds_zero2.yaml"
    own = own_strategy(tmp_path, shipped.read_text().replace("ds_configs", str(ROOT / "ds_configs")))
    flags = tmp_path / "flags.yaml"
    flags.write_text("seed: 1\n")
    words = words_of("ds_zero2")

    def said(words: list[str]) -> dict:
        return plan_launch(words).entry.facts

    alike = words_of(Path(own))
    alike[alike.index("--machine_rank") + 1] = "0"
    for same in (alike, [*words[:-2], "--seed=1"], [*words[:-2], "--config", str(flags)]):
        assert said(words) == said(same)
    for changed in ([*words[:-1], "2"], ["--mixed_precision", "bf16", *words], words_of("ds_zero3")):
        assert said(words) != said(changed)
    assert shared_launch_facts((), None)["versions"]["torch"]
    command = ("accelerate", "launch", "--num-machines", "2", "-m", "x", "--num_processes", "3")
    assert (option(command, "num_machines"), option(command, "num_processes")) == ("2", None)


def test_on_one_machine_it_is_accelerate_launch() -> None:
    done = slm("launch", "--config_file", "accel_configs/single.yaml", "-m", "this")
    assert done.code == 0, done.err
    assert "accelerate launch --config_file accel_configs/single.yaml -m this\n" in done.err
    assert "The Zen of Python" in done.out
    assert "--machine_rank 0 -m slm_toolkit.train" in slm("launch", "--help").out
    assert slm("launch").code == 2
