"""Pure arithmetic on models, strategies and hardware; no torch, but for DeepSpeed's own estimator."""
