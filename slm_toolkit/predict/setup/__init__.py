"""Bytes on a rank, by closed forms."""
