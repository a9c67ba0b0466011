"""Kernels that take the place of transformers' own."""
