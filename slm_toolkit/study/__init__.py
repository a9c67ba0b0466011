"""The study that this project grew out of, rebuilt beside its figures."""
