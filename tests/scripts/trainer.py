"""A Hugging Face Trainer script that knows nothing of this project."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

set_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=256,
)
tokens = torch.randint(256, (400, 32), generator=torch.Generator().manual_seed(1))
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=14,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    data_collator=default_data_collator,
)
trainer.train()
