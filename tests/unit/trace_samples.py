"""A small model, its step and their sizes by hand, for the tests of memory traces. Needs torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Step = Callable[..., object]

# 100 x 200 + 200 and 200 x 50 + 50 parameters, in fp32.
MLP_BYTES = 4 * (100 * 200 + 200 + 200 * 50 + 50)
# The same in blocks of 512 bytes: 157, 2, 79 and 1 of them.
MLP_BLOCKS = 512 * (157 + 2 + 79 + 1)


def mlp() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 50))
    return model, torch.optim.Adam(model.parameters())


def mlp_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.randn(10, 100)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def forward_only(*shape: int) -> Step:
    def step(model: nn.Module, *_: object) -> None:
        model(torch.randn(*shape))

    return step
