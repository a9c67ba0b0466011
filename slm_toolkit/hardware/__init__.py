"""GPUs, prices and networks as tables with sources, and what is in this machine."""
