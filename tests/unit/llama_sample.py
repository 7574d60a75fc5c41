"""A Llama-like decoder in plain torch: the sizes are Llama 2 7B's unless a test wants less."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k = nn.Linear(hidden, hidden, bias=False)
        self.v = nn.Linear(hidden, hidden, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)
        self.before_attention = nn.RMSNorm(hidden)
        self.before_mlp = nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, hidden = x.shape
        normed = self.before_attention(x)
        q, k, v = (
            project(normed).view(samples, length, self.heads, -1).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(samples, length, hidden))
        normed = self.before_mlp(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(
        self,
        layers: int = 32,
        hidden: int = 4096,
        heads: int = 32,
        inner: int = 11008,
        vocabulary: int = 32000,
        checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return self.head(self.norm(x))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Llama().to("cuda", torch.bfloat16)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(0, 32000, (1, 2048), device="cuda")
    logits = model(tokens).flatten(0, 1).float()
    loss = functional.cross_entropy(logits, tokens.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def build_and_step() -> tuple[object, object]:
    return build, step
