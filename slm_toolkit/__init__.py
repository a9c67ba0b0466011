"""slm_toolkit: train a small language model under every sharding strategy and compare what it costs."""

__version__ = "0.1.0"
