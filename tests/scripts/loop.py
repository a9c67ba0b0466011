"""An Accelerate loop as its users write it."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--unseeded", action="store_true", help="other initial weights in each run")
parser.add_argument("--huge", action="store_true", help="asks for more memory than there is")
parser.add_argument("--does", help="of nasty.py")
arguments = parser.parse_args()

if not arguments.unseeded:
    set_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=arguments.accumulate)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=256,
)
model = LlamaForCausalLM(config)
if arguments.huge:
    torch.zeros(2**60)
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
tokens = torch.randint(256, (16 * 2 * arguments.batch, 32), generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(tokens, batch_size=arguments.batch)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
