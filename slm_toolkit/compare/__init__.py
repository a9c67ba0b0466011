"""Runs a grid of `accelerate launch` commands, locally or as Slurm jobs; every run ends as a record."""
