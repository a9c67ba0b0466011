"""Which GPUs, how many, which strategy and batch for a job."""
