"""Accelerate YAMLs, DeepSpeed JSONs and TrainingArguments, turned into one another key by key."""
