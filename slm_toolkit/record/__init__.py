"""The raw facts of a run as JSON, and the comparison of two runs."""
