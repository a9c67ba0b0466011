"""Against earlier records: the same build on a noisy machine is a tie, what got worse is found."""

import random
from pathlib import Path

import pytest
from conftest import made_record

from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.baseline import Change, changes


def row(name: str, **changes: object) -> Row:
    return Row([(Path(name), made_record(**changes))])


def change(now: dict, then: dict) -> Change:
    (found,), missing = changes([row("now", **now)], [row("then", **then)])
    assert missing == []
    return found


def steps(seconds: float) -> dict:
    return {"step_seconds": [[seconds] * 33] * 2}


def noisy(seed: int) -> dict:
    """33 steps of about 0.5 s: the launch as a whole up to 4 % off, each step up to 10 %, one in twenty twice
    as long."""
    draw = random.Random(seed)
    launch = draw.uniform(0.96, 1.04)
    times = [0.5 * launch * draw.uniform(0.95, 1.1) * (2 if draw.random() < 0.05 else 1) for _ in range(33)]
    return {"step_seconds": [times, times]}


@pytest.mark.parametrize("seed", range(20))
def test_launches_of_one_build_on_a_noisy_machine_are_a_tie(seed: int) -> None:
    found = change(noisy(seed), noisy(1000 + seed))
    assert (found.speed, found.is_regression) == ("tie", False)


CPU = {"gpu": None, "cpu": "this one", "num_cores": 2, "peak_allocated_bytes": None}
STATE = {"parameters": 2, "gradients": 2, "master_weights": 4}
ASKED = made_record().asked


def asked(**flags: object) -> dict:
    return {"asked": {**ASKED, "config": {**ASKED["config"], **flags}}}


# a run now and before, what the comparison finds, and whether it is a regression
FOUND = [
    # 1 / 1.25 = 0.8; both intervals are +-5 %: 0.84 is below 0.95
    (steps(0.5 * 1.25), {}, {"speed": "slower", "speed_ratio": pytest.approx(0.8)}, True),
    ({}, steps(0.5 * 1.5), {"speed": "faster"}, False),
    # two cores of which others kept one busy: anything up to (2 / (2 - 1)) squared = 4 times as slow
    ({**CPU, **steps(1.0), "other_busy_cores": 1.0}, CPU, {"speed": "tie"}, False),
    ({**CPU, **steps(1.0), "other_busy_cores": 0.1}, CPU, {"speed": "slower"}, True),
    # 64 MiB of 3 GiB: 2 %, 8 MiB: 0.3 %
    ({"peak_allocated_bytes": [3 * 2**30 + 2**26]}, {}, {"memory": "bigger"}, True),
    ({"peak_allocated_bytes": [3 * 2**30 + 2**23]}, {}, {"memory": "same"}, False),
    # a state of 20 bytes for 16; the rest of a process's memory is vague
    ({**CPU, "state_bytes": [{**STATE, "optimizer": 12}]}, CPU, {"memory": "bigger"}, True),
    ({**CPU, "peak_rss_bytes": [2**32]}, CPU, {"memory": "same", "memory_ratio": 1}, False),
    ({"losses": [10.0] * 19 + [10.02] * 14}, {}, {"losses": "differ"}, True),  # aligned: 0.001 x 2
    ({"losses": [10.0] * 19 + [10.0015] * 14}, {}, {"losses": "same"}, False),
    ({"losses": [10.0] * 20 + [10.02] * 13}, {}, {"losses": "same"}, False),  # beyond the 20 that count
    ({"losses": [10.0] * 32 + [None]}, {}, {"losses": "differ"}, True),
    # with another number of steps the learning rate fell otherwise
    ({}, asked(max_steps=20), {"speed": "tie", "losses": "unknown"}, False),
    ({"status": "oom", "step_seconds": [], "losses": []}, {}, {"status": "ok -> oom"}, True),
]


@pytest.mark.parametrize(("now", "then", "found", "worse"), FOUND)
def test_what_got_slower_bigger_less_accurate_or_broken_is_found(
    now: dict, then: dict, found: dict, worse: bool
) -> None:
    compared = change(now, then)
    assert {name: getattr(compared, name) for name in found} == found
    assert compared.is_regression is worse


def test_the_newest_of_several_records_with_the_same_flags_is_the_baseline() -> None:
    old = row("old", started_at="2025-01-01T00:00:00+00:00")
    short = row("short", **asked(max_steps=3), losses=[10.0] * 3, started_at="2027-01-01T00:00:00+00:00")
    then = [old, row("new"), short]
    for order in (then, then[::-1]):
        (found,), _ = changes([row("now", losses=[10.5] * 33)], order)
        assert (found.record_then, found.losses) == ("new", "differ")


def test_another_run_or_cpu_is_no_baseline() -> None:
    for now, then in (({}, asked(seq_len=2048)), (CPU, {**CPU, "cpu": "that one"})):
        here = row("now", **now)
        assert changes([here], [row("then", **then)]) == ([], [here])
