"""Hours and dollars of a run, from its tokens per second on all ranks; every GPU is paid by the second."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """The tokens, hours and dollars of a training run."""

    num_tokens: float
    hours: float
    usd: float


@dataclass(frozen=True)
class Offer:
    """The speed of one configuration, and the price of its GPUs."""

    tokens_per_second: float
    usd_per_gpu_hour: float
    num_gpus: int


@dataclass(frozen=True)
class Tie:
    """The price at which the runner-up gives as many tokens per dollar as the winner."""

    usd_per_gpu_hour: float
    "the runner-up's price in a tie; the winner's price does not change"
    factor: float
    "that price over the runner-up's price of today: 0.8 means that a price cut by a fifth makes a tie"


def usd_per_million_tokens(*, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> float:
    """Return dollars per million tokens: 1e6 / rate = seconds, times the dollars per second of all GPUs."""
    return 1e6 / tokens_per_second * _usd_per_second(usd_per_gpu_hour, num_gpus)


def tokens_per_usd(*, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> float:
    """Return Token/Second x inv(Dollar/Second), two of the three terms of the paper's equation 1."""
    return tokens_per_second / _usd_per_second(usd_per_gpu_hour, num_gpus)


def budget(*, num_tokens: float, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> Budget:
    """Return hours and dollars for `num_tokens`, without the time to start, save or recover from failures."""
    seconds = num_tokens / tokens_per_second
    return Budget(num_tokens, seconds / 3600, seconds * _usd_per_second(usd_per_gpu_hour, num_gpus))


def price_sensitivity(*, winner: Offer, runner_up: Offer) -> Tie:
    """Return the price at which the runner-up would tie with the winner in tokens per dollar.

    tie = (runner-up's tokens/s per GPU) / (winner's tokens/s per GPU) x winner's price. If both use the same
    GPU type they pay the same price, so no price makes a tie: the factor is only the ratio of their speeds.
    """
    winner_rate = winner.tokens_per_second / winner.num_gpus
    runner_up_rate = runner_up.tokens_per_second / runner_up.num_gpus
    tie = runner_up_rate / winner_rate * winner.usd_per_gpu_hour
    factor = tie / runner_up.usd_per_gpu_hour
    return Tie(tie, factor)


def _usd_per_second(usd_per_gpu_hour: float, num_gpus: int) -> float:
    return usd_per_gpu_hour * num_gpus / 3600
