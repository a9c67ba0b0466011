"""Rewrite checkpoints for other programs: as a Hugging Face model, or for FSDP or DeepSpeed to load."""
