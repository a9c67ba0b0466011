"""Bytes that Inductor's element-wise kernels move in a decoder layer, counted by its own scheduler.

    python bench/compiled_traffic.py      # two minutes on a core

Compiles networks of one and of two layers on this CPU, and takes the difference of the bytes that all fused
kernels read and write; matrix products and attention are extern kernels and don't count. What Inductor fuses
is the same on a GPU. `predict/speed/step.py: _COMPILED_LLAMA` and `_COMPILED_GPT`
have the counts per token, as multiples of the hidden size h and the FFN width f.
"""

from collections.abc import Callable

import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch import nn
from torch._inductor.scheduler import Scheduler
from transformers import LlamaConfig, LlamaModel

BATCH, SEQ_LEN, HIDDEN, HEADS = 2, 256, 256, 4
TOKENS = BATCH * SEQ_LEN
WIDTHS = (512, 1024)
"FFN widths: their difference separates f from h"

_moved: list[int] = []
_codegen = Scheduler.codegen


def _counting_codegen(scheduler: Scheduler) -> object:
    _moved.extend(node.get_read_write_buffers_sizes() for node in scheduler.nodes if not node.is_extern())
    return _codegen(scheduler)


class GptLayer(nn.Module):
    """GPT-2's layer as nanoGPT writes it."""

    def __init__(self, ffn: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, ffn), nn.Linear(ffn, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            part.view(BATCH, SEQ_LEN, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(HIDDEN, dim=2)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
        x = x + self.out(mixed.reshape(BATCH, SEQ_LEN, HIDDEN))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def gpt(num_layers: int, ffn: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return nn.Sequential(*(GptLayer(ffn) for _ in range(num_layers))).to(torch.bfloat16)


def llama(num_layers: int, ffn: int) -> Callable[[torch.Tensor], torch.Tensor]:
    shape = {"hidden_size": HIDDEN, "intermediate_size": ffn, "num_hidden_layers": num_layers}
    config = LlamaConfig(**shape, num_attention_heads=HEADS, vocab_size=64, attn_implementation="sdpa")
    model = LlamaModel(config).to(torch.bfloat16)
    return lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state


def moved_bytes(network: Callable[[torch.Tensor], torch.Tensor]) -> int:
    torch._dynamo.reset()
    _moved.clear()
    x = torch.randn(BATCH, SEQ_LEN, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    torch.compile(lambda x: network(x).float().sum())(x).backward()
    return sum(_moved)


def main() -> None:
    inductor.force_disable_caches = True  # a cached graph is not scheduled again
    Scheduler.codegen = _counting_codegen
    for name, build in (("Llama", llama), ("GPT-2", gpt)):
        narrow, wide = (
            (moved_bytes(build(2, ffn)) - moved_bytes(build(1, ffn))) / TOKENS / HIDDEN for ffn in WIDTHS
        )
        of_f = (wide - narrow) / ((WIDTHS[1] - WIDTHS[0]) / HIDDEN)
        print(f"{name}: {wide - of_f * WIDTHS[1] / HIDDEN:.0f} h + {of_f:.0f} f bytes per token and layer")


if __name__ == "__main__":
    main()
