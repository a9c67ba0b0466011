"""The shipped constants against published runs; bench/speed_accuracy.py leaves models out of the fit."""

import sys
from statistics import median, quantiles

from conftest import ROOT

from slm_toolkit.predict.speed.software import TODAY

sys.path.insert(0, str(ROOT / "bench"))
sys.path.insert(0, str(ROOT / "studies" / "ashkboos"))
from speed_rows import LLM_FOUNDRY, Row, predicted_tokens_per_second_per_gpu, published_rows


def errors(rows: tuple[Row, ...], software: object) -> list[float]:
    return [
        abs(predicted_tokens_per_second_per_gpu(row, software) / row.tokens_per_second_per_gpu - 1)
        for row in rows
    ]


def test_llm_foundrys_table_is_met_within_the_issue_of_the_fit() -> None:
    rows = tuple(row for row in published_rows() if row.source == "llm-foundry")
    assert len(rows) == 209  # its bf16 rows
    found = errors(rows, LLM_FOUNDRY)
    assert median(found) < 0.03
    assert quantiles(found, n=10)[8] < 0.10


def test_other_peoples_runs_are_met_without_a_fit() -> None:
    rows = published_rows("other_speed.csv")
    found = errors(rows, TODAY)
    assert median(found) < 0.08
    within = [error <= max(1 / TODAY.low - 1, 1 - 1 / TODAY.high) for error in found]
    assert sum(within) > 0.8 * len(rows)
