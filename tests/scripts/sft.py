"""A TRL script for supervised fine-tuning that knows nothing of this project."""

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

set_seed(0)
words = [f"w{number}" for number in range(200)]
ids = {word: number for number, word in enumerate(["<unk>", "<eos>", "<pad>", *words])}
tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
)
generator = torch.Generator().manual_seed(1)
texts = [
    " ".join(words[number] for number in torch.randint(200, (40,), generator=generator).tolist())
    for _ in range(128)
]
config = LlamaConfig(
    vocab_size=len(ids),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
)
arguments = SFTConfig(
    output_dir="out",
    per_device_train_batch_size=4,
    max_steps=14,
    save_strategy="no",
    report_to="none",
    max_length=64,
    disable_tqdm=True,
    bf16=False,
)
trainer = SFTTrainer(
    model=LlamaForCausalLM(config),
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
)
trainer.train()
