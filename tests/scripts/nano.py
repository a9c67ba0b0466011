"""A nanoGPT-like loop with an Accelerator: a module of its own that returns logits and loss."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attention = torch.nn.LayerNorm(width), torch.nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm(x)).chunk(3, dim=2)
        return x + functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class GPT(torch.nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, vocabulary: int = 256, width: int = 64) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.Sequential(Block(width), Block(width))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.norm(self.blocks(self.tokens(ids))))
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


set_seed(1337)
accelerator = Accelerator()
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
text = torch.randint(256, (14 * 2 * 8 * 33,), generator=torch.Generator().manual_seed(1))
loader = torch.utils.data.DataLoader(text.view(-1, 33), batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for windows in loader:
    _, loss = model(windows[:, :-1], windows[:, 1:])
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
