"""How the training state is sharded: accelerate YAMLs and DeepSpeed JSONs, read and checked."""
