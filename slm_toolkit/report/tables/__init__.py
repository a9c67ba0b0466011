"""Rows as rich tables and exported files."""
