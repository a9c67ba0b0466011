"""Arithmetic on models, strategies and hardware, without torch (except for DeepSpeed's own estimator)."""
