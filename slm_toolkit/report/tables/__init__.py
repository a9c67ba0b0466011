"""Show rows as rich tables, and export them to files and trackers."""
