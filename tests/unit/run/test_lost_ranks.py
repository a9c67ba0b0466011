"""Which rank ended, is stopped or hangs, from what this machine and the ranks know."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from slm_toolkit.run.faults import watchdog as lost_ranks
from slm_toolkit.run.faults.watchdog import LocalRanks, Stall, explain
from slm_toolkit.run.peers.peer_store import PeerStore


def test_the_rank_that_holds_the_others_up_is_told_from_them() -> None:
    waits = Stall(0, 10, is_waiting=True, has_moved=False, place="torch/x.py:1 in wait")
    hangs = Stall(1, 11, is_waiting=False, has_moved=False, place="a/b.py:2 in read")
    works = Stall(2, 12, is_waiting=False, has_moved=True, place="a/b.py:3 in pack")
    assert explain([waits, hangs], []) == "rank 1 (pid 11) hung in a/b.py:2 in read, while rank 0 waited"
    assert explain([waits, works], []) == (
        "rank 2 (pid 12) is still at work in a/b.py:3 in pack, while rank 0 waited"
    )
    assert explain([waits], ["rank 1 (pid 11) is stopped"]) == (
        "rank 1 (pid 11) is stopped, while rank 0 waited"
    )
    stopped = "rank 1 (pid 11) is stopped"  # rank 2 may wait for it
    slow = Stall(2, 12, is_waiting=False, has_moved=False, place="a/b.py:3 in pack")
    assert explain([waits, slow], [stopped]) == (
        "rank 1 (pid 11) is stopped; rank 2 (pid 12) waits in a/b.py:3 in pack, while rank 0 waited"
    )
    assert explain([waits], []) == "rank 0 (pid 10) waits in torch/x.py:1 in wait"


def test_a_rank_in_a_collective_or_in_the_exchange_after_a_step_waits_for_others() -> None:
    ours = Path(lost_ranks.__file__).parents[1]
    assert (ours / "peers" / "step_exchange.py").is_file()
    for path in ("/x/torch/distributed/c10d.py", ours / "peers" / "step_exchange.py"):
        assert lost_ranks.waits_for_others([f"{path}:12 in wait", "/x/train.py:9 in train_step"])
    assert not lost_ranks.waits_for_others(["/home/me/loss.py:7 in forward", "/x/train.py:9 in train_step"])


def test_an_ended_a_stopped_and_a_running_process_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "4"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    peer_store = PeerStore(dist.HashStore())
    sleepers = {rank: subprocess.Popen([sys.executable, "-c", _SLEEP]) for rank in (5, 6, 7)}
    try:
        ranks = LocalRanks(peer_store)
        assert peer_store.read("pid 4") == os.getpid()
        for rank, process in sleepers.items():
            peer_store.write(f"pid {rank}", process.pid)
        assert ranks.ended() == {}
        sleepers[5].kill()
        sleepers[6].send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while "stopped" not in ranks.state_of(6) or not ranks.ended():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert ranks.ended() == {5: sleepers[5].pid}
        assert ranks.living() == [6, 7]
        assert ranks.state_of(5) == f"rank 5 (pid {sleepers[5].pid}) has ended"
        assert ranks.state_of(6) == f"rank 6 (pid {sleepers[6].pid}) is stopped (SIGSTOP, a debugger?)"
        assert ranks.state_of(9) == "rank 9 does not answer"  # of another machine
        ranks.kill([6, 9])
        assert sleepers[6].wait(10) == -signal.SIGKILL
    finally:
        for process in sleepers.values():
            process.kill()
            process.wait()


_SLEEP = "import time; time.sleep(60)"
