"""Seconds of a step, by closed forms."""
