"""Runs that are killed at random moments lose nothing: a sample of bench/kill_test.py."""

import json
import sys

from conftest import run


def test_a_kill_under_each_engine_loses_nothing() -> None:
    words = ("bench/kill_test.py", "--kills", "3", "--seed", "7", "--json")
    done = run(sys.executable, *words, timeout=1200, warm=True)
    counts = json.loads(done.out)
    assert done.code == 0, [count["problems"] for count in counts.values()]
    assert list(counts) == ["ddp", "fsdp_full_shard", "ds_zero3"]
    assert [count["kills"] for count in counts.values()] == [1, 1, 1]
    for count in counts.values():
        assert count["runs_to_the_end"] >= 1
        assert (count["orphans"], count["half_checkpoints"], count["other_losses"]) == (0, 0, 0)
