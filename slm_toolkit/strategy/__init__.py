"""Read and check accelerate YAMLs and DeepSpeed JSONs, which define how the training state is sharded."""
