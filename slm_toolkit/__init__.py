"""slm_toolkit: train a small language model under every sharding strategy and compare what it costs."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read when torch loads: else its profiler writes to stderr

__version__ = "0.2.0"
