"""Faults of a running training: find the rank that caused one, report it, stop or restart the run."""
