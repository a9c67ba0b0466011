"""Checkpoints, the final model, and the folder of a run."""
