"""An Accelerate loop of our trainer's own work: the weights, batches and learning rates of a work.json."""

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--work", type=Path)
work = json.loads(parser.parse_args().work.read_text())

accelerator = Accelerator()
model = LlamaForCausalLM.from_pretrained(work["model"], dtype=torch.float32)
decayed = [param for param in model.parameters() if param.dim() > 1]
others = [param for param in model.parameters() if param.dim() <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": work["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
    lr=work["learning_rates"][0],
    betas=tuple(work["betas"]),
    eps=work["eps"],
    fused=True,
)
model, optimizer = accelerator.prepare(model, optimizer)
batches = load_file(work["tokens"])["tokens"].split(work["batch_size"])
for tokens, rate in zip(batches[accelerator.process_index :: 2], work["learning_rates"], strict=True):
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), work["max_grad_norm"])
    optimizer.step()
    optimizer.zero_grad()
