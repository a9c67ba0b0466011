"""Convert accelerate YAMLs, DeepSpeed JSONs and TrainingArguments into each other, key by key."""
