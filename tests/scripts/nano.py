"""A nanoGPT-like loop with an Accelerator: a module of its own that returns logits and loss."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.attention, self.projection = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, 2, width // 2).transpose(1, 2)
            for part in self.attention(self.ln_1(x)).split(width, dim=2)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(torch.nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self, vocabulary: int = 256, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(64, width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
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
