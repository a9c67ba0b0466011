"""GPUs, prices and networks as tables with sources, and the hardware of this machine."""
