"""Dollars per million tokens, by hand."""

import pytest

from slm_toolkit.predict.cost import usd_per_million_tokens

# 8 GPUs at $4.50: $36 an hour, one cent a second, which buys 100,000 tokens
EIGHT_GPUS = {"tokens_per_second": 100_000.0, "usd_per_gpu_hour": 4.5, "num_gpus": 8}


def test_a_million_tokens_cost_ten_cents() -> None:
    assert usd_per_million_tokens(**EIGHT_GPUS) == pytest.approx(0.10)
