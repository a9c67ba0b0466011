"""Rows as pictures and pages."""
