"""Dollars per token; every GPU is paid by the second."""


def usd_per_million_tokens(
    tokens_per_second: float | None, usd_per_gpu_hour: float | None, num_gpus: int
) -> float | None:
    """Return 1e6 / rate = seconds, times the dollars per second of all GPUs; None if one is unknown.

    Its inverse is Token/Second x inv(Dollar/Second), two of the three terms of the paper's equation 1.
    """
    if tokens_per_second is None or usd_per_gpu_hour is None:
        return None
    return 1e6 / tokens_per_second * usd_per_gpu_hour * num_gpus / 3600
