"""Dollars per token and tokens per dollar; every GPU is paid by the second."""


def usd_per_million_tokens(*, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> float:
    """Return dollars per million tokens: 1e6 / rate = seconds, times the dollars per second of all GPUs."""
    return 1e6 / tokens_per_second * _usd_per_second(usd_per_gpu_hour, num_gpus)


def tokens_per_usd(*, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> float:
    """Return Token/Second x inv(Dollar/Second), two of the three terms of the paper's equation 1."""
    return tokens_per_second / _usd_per_second(usd_per_gpu_hour, num_gpus)


def _usd_per_second(usd_per_gpu_hour: float, num_gpus: int) -> float:
    return usd_per_gpu_hour * num_gpus / 3600
