"""Check a model and its configuration for settings that are wrong, unwise or slow."""
