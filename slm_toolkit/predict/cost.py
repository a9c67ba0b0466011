"""Dollars per token; every GPU is paid by the second."""


def usd_per_million_tokens(*, tokens_per_second: float, usd_per_gpu_hour: float, num_gpus: int) -> float:
    """Return dollars per million tokens: 1e6 / rate = seconds, times the dollars per second of all GPUs.

    Its inverse is Token/Second x inv(Dollar/Second), two of the three terms of the paper's equation 1.
    """
    return 1e6 / tokens_per_second * usd_per_gpu_hour * num_gpus / 3600
