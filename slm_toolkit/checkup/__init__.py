"""Faults of a configuration that need no closed form: keys, versions, machine, environment."""
