"""Convert accelerate YAMLs and DeepSpeed JSONs into each other, key by key."""
