"""Against earlier records: the same build on a noisy machine is a tie, what got worse is found."""

import random
from pathlib import Path

import pytest
from conftest import made_record, slm_here

from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.report.rows import Row
from slm_toolkit.report.tables.baseline import Change, changes


def change(now: RunRecord, then: RunRecord) -> Change:
    (found,), missing = changes([Row([(Path("now"), now)])], [Row([(Path("then"), then)])])
    assert missing == []
    return found


def noisy(seed: int, *, slower: float = 1.0) -> RunRecord:
    """33 steps of about 0.5 s: the launch as a whole up to 4 % off, each step up to 10 %, one in twenty twice
    as long."""
    draw = random.Random(seed)
    launch = draw.uniform(0.96, 1.04)
    steps = [
        0.5 * slower * launch * draw.uniform(0.95, 1.1) * (2 if draw.random() < 0.05 else 1)
        for _ in range(33)
    ]
    return made_record(step_seconds=[steps, steps])


@pytest.mark.parametrize("seed", range(20))
def test_launches_of_one_build_on_a_noisy_machine_are_a_tie(seed: int) -> None:
    found = change(noisy(seed), noisy(1000 + seed))
    assert found.speed == "tie"
    assert not found.is_regression


@pytest.mark.parametrize("factor", [1.25, 1.5])
def test_a_fifth_fewer_tokens_per_second_are_found(factor: float) -> None:
    # 1 / 1.25 = 0.8; both intervals are +-5 %: 0.84 is below 0.95
    steps = [0.5 * factor] * 33
    found = change(made_record(step_seconds=[steps, steps]), made_record())
    assert (found.speed, found.is_regression) == ("slower", True)
    assert found.speed_ratio == pytest.approx(1 / factor)
    faster = change(made_record(), made_record(step_seconds=[steps, steps]))
    assert (faster.speed, faster.is_regression) == ("faster", False)


@pytest.mark.parametrize(
    ("now", "field", "verdict", "worse"),
    [
        (
            {"peak_allocated_bytes": [2**30, 3 * 2**30 + 2**26]},
            "memory",
            "bigger",
            True,
        ),  # 64 MiB of 3 GiB: 2 %
        ({"peak_allocated_bytes": [2**30, 3 * 2**30 + 2**23]}, "memory", "same", False),  # 0.3 %
        ({"peak_allocated_bytes": [2**30, 2 * 2**30]}, "memory", "smaller", False),
        ({"losses": [10.0] * 19 + [10.02] * 14}, "losses", "differ", True),  # aligned: 0.001 x 2
        ({"losses": [10.0] * 19 + [10.0015] * 14}, "losses", "same", False),
        ({"losses": [10.0] * 20 + [10.02] * 13}, "losses", "same", False),  # beyond the 20 that are compared
        ({"losses": [10.0] * 32 + [None]}, "losses", "differ", True),
        ({"status": "oom", "step_seconds": [], "losses": []}, "status", "ok -> oom", True),
    ],
)
def test_what_got_bigger_less_accurate_or_broken_is_found(
    now: dict, field: str, verdict: str, worse: bool
) -> None:
    found = change(made_record(**now), made_record())
    assert (getattr(found, field), found.is_regression) == (verdict, worse)


def test_a_training_state_that_grew_is_found_on_a_cpu_where_process_memory_is_vague() -> None:
    cpu = {"gpu": None, "peak_allocated_bytes": None, "peak_reserved_bytes": None}
    state = [{"parameters": 2, "gradients": 2, "master_weights": 4, "optimizer": 12}] * 2  # Adam 12 for 8
    found = change(made_record(**cpu, state_bytes=state), made_record(**cpu))
    assert (found.memory, found.memory_ratio) == ("bigger", 20 / 16)
    vague = change(made_record(**cpu, peak_rss_bytes=[int(2**31 * 1.04)] * 2), made_record(**cpu))
    assert vague.memory == "same"


def test_a_peak_that_grew_is_found_beside_a_state_that_shrank() -> None:
    state = [{"parameters": 2, "gradients": 2, "master_weights": 4, "optimizer": 7}] * 2  # 15 for 16
    found = change(made_record(state_bytes=state, peak_allocated_bytes=[6 * 2**30] * 2), made_record())
    assert (found.memory, found.memory_ratio, found.is_regression) == ("bigger", 2.0, True)


def test_the_newest_of_several_records_is_the_baseline() -> None:
    steps = [0.5 * 1.5] * 33
    old = made_record(step_seconds=[steps, steps], started_at="2025-01-01T00:00:00+00:00")
    now = Row([(Path("now"), made_record())])
    then = [Row([(Path("a"), old)]), Row([(Path("b"), made_record())])]
    for order in (then, then[::-1]):
        (found,), _ = changes([now], order)
        assert (found.speed, found.record_then) == ("tie", "b")


def test_the_record_asked_most_alike_is_the_baseline_before_the_newest() -> None:
    short = {**made_record().asked, "config": {**made_record().asked["config"], "max_steps": 3}}
    newer = made_record(asked=short, losses=[10.0] * 3, started_at="2027-01-01T00:00:00+00:00")
    now = Row([(Path("now"), made_record(losses=[10.5] * 33))])
    (found,), _ = changes([now], [Row([(Path("a"), newer)]), Row([(Path("b"), made_record())])])
    assert (found.record_then, found.losses) == ("b", "differ")


def test_another_cpu_is_another_run_and_so_is_no_other_length() -> None:
    cpu = {"gpu": None, "cpu": "this one"}
    row = Row([(Path("now"), made_record(**cpu))])
    assert changes([row], [Row([(Path("then"), made_record(**{**cpu, "cpu": "that one"}))])])[0] == []
    asked = {**made_record().asked, "config": {**made_record().asked["config"], "max_steps": 20}}
    (found,), _ = changes([row], [Row([(Path("then"), made_record(**cpu, asked=asked))])])
    assert (found.speed, found.losses) == ("tie", "unknown")  # the learning rate fell otherwise


@pytest.mark.parametrize(("busy", "speed"), [(0.1, "slower"), (1.0, "tie")])
def test_a_disturbed_measurement_is_no_regression(busy: float, speed: str) -> None:
    # two cores of which others kept one busy: anything up to (2 / (2 - 1)) squared = 4 times as slow
    cpu = {"gpu": None, "cpu": "this one", "num_cores": 2}
    steps = [0.5 * 2] * 33
    now = made_record(**cpu, step_seconds=[steps, steps], other_busy_cores=busy)
    assert change(now, made_record(**cpu)).speed == speed


def test_another_run_is_no_baseline_and_other_versions_are() -> None:
    row = Row([(Path("now"), made_record())])
    other = {**made_record().asked, "config": {**made_record().asked["config"], "seq_len": 2048}}
    found, missing = changes([row], [Row([(Path("then"), made_record(asked=other))])])
    assert (found, missing) == ([], [row])
    newer = made_record(versions={"torch": "9.9"}, identity="other")
    assert change(newer, made_record()).speed == "tie"


def test_a_baseline_that_is_not_there_or_empty_is_bad_input(tmp_path: Path) -> None:
    for folder, message in (("nowhere", "no such folder: nowhere"), (str(tmp_path), "no record.json under")):
        done = slm_here("compare", "--baseline", folder)
        assert done.code == 2
        assert message in done.err
