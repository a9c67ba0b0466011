"""Pure arithmetic on models, strategies and hardware; no torch."""
