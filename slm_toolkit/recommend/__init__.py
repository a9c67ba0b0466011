"""Recommend GPUs, their number, a strategy and a batch for a training job."""
