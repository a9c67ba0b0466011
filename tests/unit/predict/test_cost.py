"""Tokens, hours and dollars, by hand."""

import pytest

from slm_toolkit.predict.cost import (
    Offer,
    budget,
    price_sensitivity,
    tokens_per_usd,
    usd_per_million_tokens,
)

# 8 GPUs at $4.50: $36 an hour, one cent a second, which buys 100,000 tokens
EIGHT_GPUS = {"tokens_per_second": 100_000.0, "usd_per_gpu_hour": 4.5, "num_gpus": 8}


def test_a_dollar_buys_the_tokens_of_a_hundred_seconds() -> None:
    assert tokens_per_usd(**EIGHT_GPUS) == pytest.approx(1e7)


def test_a_million_tokens_cost_ten_cents() -> None:
    assert usd_per_million_tokens(**EIGHT_GPUS) == pytest.approx(0.10)


def test_a_budget_of_tokens_takes_hours_and_dollars() -> None:
    # 3.6e9 tokens / 1e5 per second = 36,000 s = 10 h, x $36
    taken = budget(num_tokens=3.6e9, **EIGHT_GPUS)
    assert (taken.num_tokens, taken.hours, taken.usd) == pytest.approx((3.6e9, 10, 360))


def test_the_price_at_which_a_runner_up_ties() -> None:
    # per GPU 10,000 tokens/s at $2 (18e6 per dollar) against 25,000 at $6.25 (14.4e6): 25/10 x $2 = $5 ties,
    # a factor of 5 / 6.25 = 0.8
    winner = Offer(tokens_per_second=80_000, usd_per_gpu_hour=2.0, num_gpus=8)
    runner_up = Offer(tokens_per_second=100_000, usd_per_gpu_hour=6.25, num_gpus=4)
    tie = price_sensitivity(winner=winner, runner_up=runner_up)
    assert (tie.usd_per_gpu_hour, tie.factor) == pytest.approx((5.0, 0.8))


def test_at_the_price_of_a_tie_a_dollar_buys_as_many_tokens() -> None:
    winner = Offer(tokens_per_second=81_000, usd_per_gpu_hour=2.1, num_gpus=8)
    runner_up = Offer(tokens_per_second=99_000, usd_per_gpu_hour=6.3, num_gpus=4)
    tie = price_sensitivity(winner=winner, runner_up=runner_up)
    at_tie = tokens_per_usd(tokens_per_second=99_000, usd_per_gpu_hour=tie.usd_per_gpu_hour, num_gpus=4)
    now = tokens_per_usd(tokens_per_second=81_000, usd_per_gpu_hour=2.1, num_gpus=8)
    assert at_tie == pytest.approx(now)
