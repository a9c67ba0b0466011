"""Rehearsals: one process plays rank 0 of many."""
