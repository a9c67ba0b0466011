"""The raw facts of a run as JSON, and what follows from two of them."""
