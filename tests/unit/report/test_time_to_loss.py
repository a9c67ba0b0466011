"""Steps, seconds and dollars until a loss: worked by hand, in rows, verdict and table."""

import json
from pathlib import Path

import pytest
from conftest import made_record, slm_here

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.record.files import write_record
from slm_toolkit.record.run_record import RunRecord
from slm_toolkit.record.time_to_loss import TimeToLoss, is_reached, time_to_loss
from slm_toolkit.report.rows import Row, ranked, row_of
from slm_toolkit.report.stats import chance_of_lead
from slm_toolkit.report.verdict import verdict

# 9 - step / 10 after each of 40 steps: the mean of steps n - 9 to n is 9 - (n - 4.5) / 10, so 6 after step 35
LOSSES = [9 - step / 10 for step in range(1, 41)]


def trained(
    strategy: str, seconds: float, *, number: int = 1, losses: list = LOSSES, **asked: object
) -> RunRecord:
    """Two ranks; the second takes a tenth longer in each step."""
    record = made_record()
    flags = {**record.asked["config"], **asked}
    return made_record(
        strategy=strategy,
        identity=strategy,
        run_name=f"{strategy}-r{number}",
        losses=losses,
        step_seconds=[[seconds] * len(losses), [1.1 * seconds] * len(losses)],
        asked={**record.asked, "config": flags},
    )


def rows(*launches: list[RunRecord], **options: object) -> list[Row]:
    return ranked(
        [row_of([(Path("r"), each) for each in of_row], **options) for of_row in launches], strict=False
    )


def test_the_first_ten_steps_whose_mean_is_low_enough_count() -> None:
    record = trained("ddp", 2.0)
    tokens = 35 * record.tokens_per_step
    assert time_to_loss(record, 6.0) == TimeToLoss(35, pytest.approx(35 * 2.2), tokens)
    assert time_to_loss(record, 9 - 35.6 / 10) is None  # 40 steps reach 9 - 35.5 / 10
    assert not is_reached(LOSSES[:9], 9.0)  # nine losses have no mean of ten
    assert is_reached(LOSSES[:10], 8.45)
    assert not is_reached([None, *LOSSES[:9]], 9.0)
    assert not is_reached(LOSSES, None)
    resumed = made_record(first_step=5)
    assert time_to_loss(resumed, 100.0) is None


def test_a_row_has_the_mean_of_its_launches_and_their_dollars() -> None:
    (row,) = rows([trained("ddp", 2.0), trained("ddp", 4.0, number=2)], usd_per_gpu_hour=3.6, until_loss=6.0)
    assert (row.steps_to_loss, row.until_loss) == (35, 6.0)
    assert row.seconds_to_loss == pytest.approx(35 * 3.3)
    assert row.usd_to_loss == pytest.approx(35 * 3.3 * 2 * 0.001)  # two GPUs at $0.001 a second
    assert row.seconds_to_loss_by_round == {1: pytest.approx(77.0), 2: pytest.approx(154.0)}
    (never,) = rows([trained("ddp", 2.0), trained("ddp", 2.0, losses=LOSSES[:20], number=2)], until_loss=6.0)
    assert (never.steps_to_loss, never.seconds_to_loss, never.usd_to_loss) == (None, None, None)
    (unasked,) = rows([trained("ddp", 2.0)])
    assert (unasked.until_loss, unasked.steps_to_loss) == (None, None)
    (asked,) = rows([trained("ddp", 2.0, until_loss=6.0)])
    assert asked.steps_to_loss == 35


def test_the_chance_of_a_lead_is_the_share_of_swaps_that_lead_as_far() -> None:
    # five rounds, always 10 % ahead: only none and all of 2^5 swaps lead as far
    ahead = dict.fromkeys(range(5), 1.1)
    level = dict.fromkeys(range(5), 1.0)
    assert chance_of_lead(ahead, level) == chance_of_lead(level, ahead) == 2 / 32
    # three rounds of ln 2, ln 2, -ln 2: sums of +-1 +-1 +-1 are at least 1 away from 0 in all eight cases
    assert chance_of_lead({1: 2.0, 2: 2.0, 3: 0.5}, dict.fromkeys((1, 2, 3), 1.0)) == 1.0
    assert chance_of_lead({1: 2.0, 2: 2.0}, {1: 1.0, 2: 1.0}) is None


def test_the_verdict_names_who_is_there_first() -> None:
    fast = [trained("ddp", 2.0, number=number) for number in range(1, 7)]
    slow = [trained("ds_zero2", 3.0, number=number) for number in range(1, 7)]
    never = [trained("ds_zero3", 1.0, losses=LOSSES[:20])]
    found = verdict(rows(fast, slow, never, usd_per_gpu_hour=3.6, until_loss=6.0))
    assert (
        "ddp reaches a loss of 6 first: in 77.0 s of 35 steps, $0.15; ds_zero2 takes 1.50 times as long "
        "(p = 0.031 over the rounds); 1 row does not." in found  # 2 of 2^6 swaps
    )
    (once,) = [line for line in verdict(rows(fast[:1], slow[:1], until_loss=6.0)) if "first" in line]
    assert once.endswith("1.50 times as long (--repeats 6 tells it from chance).")
    assert "No row reaches a loss of 1." in verdict(rows(fast[:1], slow[:1], until_loss=1.0))


def test_a_report_shows_the_time_to_a_loss_of_older_records(tmp_path: Path) -> None:
    for name, seconds in (("ddp", 2.0), ("ds_zero2", 3.0)):
        write_record(trained(name, seconds), tmp_path / name)
    shown = slm_here("report", str(tmp_path), "--until_loss", "6").out
    assert "seconds" in shown
    assert "to loss" in shown
    rows_shown = json.loads(slm_here("report", str(tmp_path), "--until_loss", "6", "--json").out)
    assert sorted(row["seconds_to_loss"] for row in rows_shown) == pytest.approx([77.0, 115.5])
    assert "to loss" not in slm_here("report", str(tmp_path)).out


def test_a_loss_is_a_number_above_0() -> None:
    assert RunConfig(until_loss=0.0).problems() == ["--until_loss is 0: above 0"]
