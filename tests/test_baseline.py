"""Against earlier records: the same build on a noisy machine is a tie, what got worse is found."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
from conftest import Comparison, made_record, slm

from slm_toolkit.record import RunRecord, read_record, write_record
from slm_toolkit.report.baseline import Change, changes
from slm_toolkit.report.rows import row_of


def change(now: RunRecord, then: RunRecord) -> Change:
    (found,), missing = changes([row_of([(Path("now"), now)])], [row_of([(Path("then"), then)])])
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
    return made_record(step_seconds=[steps, steps], timing_warmup_steps=None)


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
        ({"losses": [10.0] * 32 + [10.02]}, "losses", "differ", True),  # aligned: 0.01
        ({"losses": [10.0] * 32 + [10.005]}, "losses", "same", False),
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


def test_another_run_is_no_baseline_and_other_versions_are() -> None:
    row = row_of([(Path("now"), made_record())])
    other = {**made_record().asked, "config": {**made_record().asked["config"], "seq_len": 2048}}
    found, missing = changes([row], [row_of([(Path("then"), made_record(asked=other))])])
    assert (found, missing) == ([], [row])
    newer = made_record(versions={"torch": "9.9"}, identity="other")
    assert change(newer, made_record()).speed == "tie"


def test_compare_with_a_baseline_is_a_table_a_verdict_and_an_exit_code(
    aligned: Comparison, tmp_path: Path
) -> None:
    same = slm("report", str(aligned.folder), "--baseline", str(aligned.folder))
    assert same.code == 0, same.err
    assert "nothing is slower, bigger or less accurate" in same.out
    for row in aligned.rows.values():
        record = read_record(Path(row["record"]))
        factor = 1.25 if record.strategy == "ds_zero3" else 1.0
        slowed = [[factor * seconds for seconds in rank] for rank in record.step_seconds]
        write_record(dataclasses.replace(record, step_seconds=slowed), tmp_path / record.strategy)
    words = ("report", str(tmp_path), "--baseline", str(aligned.folder))
    table = slm(*words)
    assert table.code == 1
    assert "slower (-20.0%)" in table.out
    assert f"worse than {aligned.folder}: ds_zero3" in table.out.replace("\n", "")
    rows = json.loads(slm(*words, "--json").out)
    verdicts = {row["strategy"]: row["baseline"]["speed"] for row in rows}
    assert verdicts == {name: "slower" if name == "ds_zero3" else "tie" for name in aligned.rows}


def test_a_baseline_that_is_not_there_is_bad_input() -> None:
    done = slm("compare", "--baseline", "nowhere")
    assert done.code == 2
    assert "no such folder: nowhere" in done.err
