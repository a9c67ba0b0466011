"""Which rank ended, is stopped or hangs, from what this machine and the ranks know."""

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slm_toolkit.run.faults import watchdog as lost_ranks
from slm_toolkit.run.faults.watchdog import Stall, explain


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


def test_a_rank_that_makes_no_step_prints_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lost_ranks, "_STANDSTILL_SECONDS", 0.05)
    standstill = lost_ranks.Standstill(str(Path(__file__).parent))
    with ThreadPoolExecutor() as pool:
        for seconds, num_steps in ((0, 0), (0.1, 1), (0, 1), (0.1, 1), (0, 1)):  # only the fourth is late
            time.sleep(seconds)
            pool.submit(standstill.look, num_steps).result()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        r"rank 0 is in .*, called from run/test_lost_ranks.py:\d+ in test_a_rank_that.*", line
    )
