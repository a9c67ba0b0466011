"""Observe a run while it trains: time, memory, numerics, load, progress."""
