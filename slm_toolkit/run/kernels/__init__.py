"""Kernels that replace those of transformers."""
