"""Models as shapes and counts, without torch."""
