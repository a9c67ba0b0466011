"""Comparison of our predictions with the figures of the paper that this project started from."""
