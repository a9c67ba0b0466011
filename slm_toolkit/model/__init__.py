"""Model shapes and parameter counts, without torch."""
