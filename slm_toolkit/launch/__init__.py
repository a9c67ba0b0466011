"""Starts `accelerate launch` on one machine or several, and reports how launches end."""
