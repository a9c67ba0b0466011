"""Tokens, hours and dollars from the rate of all ranks together; every GPU is paid for by the second."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """What a training run takes."""

    num_tokens: float
    hours: float
    usd: float


@dataclass(frozen=True)
class Offer:
    """What one configuration does, and what its GPUs cost."""

    tokens_per_second: float
    usd_per_gpu_hour: float
    num_gpus: int


@dataclass(frozen=True)
class Tie:
    """The price at which a runner-up gives as many tokens per dollar as the winner."""

    usd_per_gpu_hour: float
    "the runner-up's, with the winner's price as it is"
    factor: float
    "that price over the runner-up's of today: 0.8 means that a fall by a fifth ties"


def usd_per_million_tokens(*, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> float:
    """Dollars for a million tokens, all ranks paid for: 1e6 / rate = seconds, times dollars per second."""
    return 1e6 / tokens_per_second * _usd_per_second(usd_per_gpu_hour, num_gpus)


def tokens_per_usd(*, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> float:
    """Token/Second x inv(Dollar/Second), two of the three terms of the paper's equation 1."""
    return tokens_per_second / _usd_per_second(usd_per_gpu_hour, num_gpus)


def budget(*, num_tokens: float, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> Budget:
    """Hours and dollars for so many tokens; nothing is added for starting, saving or failing."""
    seconds = num_tokens / tokens_per_second
    return Budget(num_tokens, seconds / 3600, seconds * _usd_per_second(usd_per_gpu_hour, num_gpus))


def price_sensitivity(*, winner: Offer, runner_up: Offer) -> Tie:
    """How far prices may move before the runner-up gives as many tokens per dollar as the winner.

    tie = (runner-up's tokens/s per GPU) / (winner's tokens/s per GPU) x winner's price. On the same GPU type
    both pay the same price: then no price makes a tie, and the factor only says how much slower one is.
    """
    winner_rate = winner.tokens_per_second / winner.num_gpus
    runner_up_rate = runner_up.tokens_per_second / runner_up.num_gpus
    tie = runner_up_rate / winner_rate * winner.usd_per_gpu_hour
    factor = tie / runner_up.usd_per_gpu_hour
    return Tie(tie, factor)


PAPER_PRICES = {"a100-40gb": 1.0, "a100-80gb": 1.46, "h100-80gb": 2.53}  # paper, appendix A, table 1, "Avg"
"prices of a GPU-second in those of an A100-40GB, means of Lambda Labs and GCP; the paper gives no dollars"


def paper_token_per_dollar(tokens_per_second_per_gpu: float, gpu_name: str) -> float:
    """Token/Dollar as in the paper's figures, where one GPU-second of an A100-40GB costs 1.

    Raises ValueError for a GPU that the paper has no price of.
    """
    if gpu_name not in PAPER_PRICES:
        raise ValueError(
            f"the paper has no price of {gpu_name!r}\nhint: its GPUs are {', '.join(PAPER_PRICES)}"
        )
    return tokens_per_second_per_gpu / PAPER_PRICES[gpu_name]


def _usd_per_second(usd_per_gpu_hour: float, num_gpus: int) -> float:
    return usd_per_gpu_hour * num_gpus / 3600
