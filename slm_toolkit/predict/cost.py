"""Dollars per token from a rate and a price."""


def usd_per_million_tokens(*, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> float:
    """Dollars for a million tokens, all ranks paid for: 1e6 / rate = seconds, times dollars per second."""
    usd_per_second = usd_per_gpu_hour * num_gpus / 3600
    return 1e6 / tokens_per_second * usd_per_second
