"""--stage_ends: which dataset each sequence of the training is drawn from."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.model_spec import PRESETS
from slm_toolkit.run.data.data import MixedStream, Stage, StagedMixture, load_data

STAGES = [Stage(1000, (1.0, 0.0)), Stage(2000, (0.25, 0.75))]


def rows(number: int, count: int) -> list[dict[str, Any]]:
    return [{"input_ids": torch.tensor([number, row])} for row in range(count)]


def drawn(mixture: StagedMixture) -> list[tuple[int, int]]:
    return [tuple(mixture[index]["input_ids"].tolist()) for index in range(len(mixture))]


def test_each_stage_draws_by_its_own_shares() -> None:
    found = drawn(StagedMixture([rows(0, 700), rows(1, 400)], STAGES, seed=0))
    assert {number for number, _ in found[:1000]} == {0}
    share = sum(number for number, _ in found[1000:]) / 2000
    # the standard deviation of a share of 0.75 among 2,000 is 0.0097
    assert share == pytest.approx(0.75, abs=4 * 0.0097)


def test_a_dataset_is_read_to_its_end_in_a_random_order_before_it_is_read_again() -> None:
    found = drawn(StagedMixture([rows(0, 700), rows(1, 400)], STAGES, seed=0))
    for number, count in ((0, 700), (1, 400)):
        read = [row for other, row in found if other == number]
        assert sorted(read[:count]) == list(range(count))
        assert read[:count] != sorted(read[:count])
        assert read[count : 2 * count] != read[: len(read[count : 2 * count])]
        times = Counter(read).values()
        assert max(times) - min(times) <= 1


def test_a_longer_run_begins_alike_and_another_seed_does_not() -> None:
    parts = [rows(0, 700), rows(1, 400)]
    short = drawn(StagedMixture(parts, STAGES, seed=0))
    longer = [STAGES[0], Stage(9000, STAGES[1].shares)]
    assert drawn(StagedMixture(parts, longer, seed=0))[: len(short)] == short
    assert drawn(StagedMixture(parts, STAGES, seed=1)) != short


class Stream(IterableDataset):
    def __init__(self, number: int, count: int) -> None:
        self.rows = rows(number, count)

    def __iter__(self) -> Any:
        return iter(self.rows)


def test_streams_have_stages_too_and_restart_as_often_as_needed() -> None:
    stream = iter(
        MixedStream([Stream(0, 30), Stream(1, 20)], [Stage(100, (0.0, 1.0)), Stage(1, (1.0, 0.0))], 0)
    )
    found = [int(next(stream)["dataset"]) for _ in range(300)]
    assert found == [1] * 100 + [0] * 200


def test_stages_end_after_steps_not_sequences(tmp_path: Path) -> None:
    for name, text in (("a", "aa bb "), ("b", "yy zz ")):
        (tmp_path / f"{name}.txt").write_text(text * 500)
    data = f"{tmp_path}/a.txt=1:0,{tmp_path}/b.txt=0:1"
    config = RunConfig(dataset=data, stage_ends="3", max_steps=5, seq_len=16)
    loaded = load_data(config, PRESETS["slm-1m"], num_sequences=20, sequences_per_step=4)
    assert [int(loaded.train[index]["dataset"]) for index in range(20)] == [0] * 12 + [1] * 8
    assert [fact["weights"] for fact in loaded.facts] == [[1.0, 0.0], [0.0, 1.0]]


def test_stages_of_a_token_budget_are_checked_once_its_steps_are_known() -> None:
    config = RunConfig(dataset="a=1:0,b=0:1", stage_ends="2", max_tokens="2048", seq_len=16)
    assert config.problems() == []
    assert config.with_steps(4).max_steps == 32  # 2,048 tokens in steps of 4 x 16
    with pytest.raises(ValueError, match="--stage_ends 2: the last stage begins after step 2"):
        config.with_steps(64)


def test_the_default_length_counts_too() -> None:
    assert RunConfig(dataset="a=1:0,b=0:1", stage_ends="32").problems() == []  # 33 steps
    (problem,) = RunConfig(dataset="a=1:0,b=0:1", stage_ends="33").problems()
    assert "give more --max_steps or --max_tokens" in problem


@pytest.mark.parametrize(
    ("dataset", "ends", "problem"),
    [
        ("a=1:1,b=1", "6", "2 stages need 2 weights of every dataset"),
        ("a=1:2,b=1:0", None, "1 stages need 1 weights"),
        ("a,b", "6", "2 stages need 2 weights"),
        ("a=1:0,b=1:0", "6", "all weights of stage 2 are 0"),
        ("a=0:0,b=1:1", "6", "the weights '0:0' are not numbers from 0 on"),
        ("a=1:-1,b=1:1", "6", "the weights '1:-1' are not"),
        ("a=1:1,b=1:1", "x", "--stage_ends x: not ascending numbers of steps"),
        ("a=1:1:1,b=1:1:1", "6,6", "--stage_ends 6,6: not ascending"),
        ("a=1:1,b=1:1", "0", "--stage_ends 0: not ascending"),
        ("a=1:1,b=1:1", "9", "the last stage begins after step 9: give more --max_steps"),
    ],
)
def test_what_does_not_fit_together_is_refused(dataset: str, ends: str | None, problem: str) -> None:
    config = RunConfig(dataset=dataset, stage_ends=ends, max_steps=9)
    assert problem in "; ".join(config.problems())
