"""Which rank ended, is stopped or hangs, from what this machine and the ranks know."""

from pathlib import Path
from typing import Any

from slm_toolkit.run.faults import watchdog
from slm_toolkit.run.faults.watchdog import explain


def place_of(pid: int, place: str, *, is_waiting: bool = False, has_moved: bool = False) -> dict[str, Any]:
    return {"pid": pid, "place": place, "is_waiting": is_waiting, "has_moved": has_moved}


def test_the_rank_that_holds_the_others_up_is_told_from_them() -> None:
    waits = place_of(10, "torch/x.py:1 in wait", is_waiting=True)
    hangs = place_of(11, "a/b.py:2 in read")
    works = place_of(11, "a/b.py:3 in pack", has_moved=True)
    for stalls, silent, says in (
        ({0: waits, 1: hangs}, {}, "rank 1 (pid 11) hung in a/b.py:2 in read, while rank 0 waited"),
        (
            {0: waits, 1: works},
            {},
            "rank 1 (pid 11) is still at work in a/b.py:3 in pack, while rank 0 waited",
        ),
        ({0: waits}, {}, "rank 0 (pid 10) hung in torch/x.py:1 in wait"),
        ({0: waits, 2: waits}, {1: None}, "rank 1 does not answer, while ranks 0, 2 waited"),
        # rank 1 may wait for rank 2
        ({1: hangs}, {2: None}, "rank 2 does not answer; rank 1 (pid 11) is in a/b.py:2 in read"),
    ):
        assert explain(stalls, silent) == says


def test_a_rank_in_a_collective_or_in_the_exchange_after_a_step_waits_for_others() -> None:
    exchange = Path(watchdog.__file__).parents[1] / "peers" / "step_exchange.py"
    assert exchange.is_file()
    for path in ("/x/torch/distributed/c10d.py", exchange):
        assert watchdog.waits_for_others([f"{path}:12 in wait", "/x/train.py:9 in train_step"])
    assert not watchdog.waits_for_others(["/home/me/loss.py:7 in forward", "/x/train.py:9 in train_step"])
