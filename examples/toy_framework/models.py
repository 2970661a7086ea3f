"""Define two models for handwritten digits: a convolutional network and a small vision transformer."""

from __future__ import annotations

import numpy as np

from examples.toy_framework import nn
from examples.toy_framework.tape import Tensor


def cnn(width: int = 24) -> nn.Module:
    """Make three convolutions with batch norm, and a linear layer."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, width),
        *block(width, width),
        nn.MaxPool2d(2),
        *block(width, 2 * width),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.25),
        nn.Linear(2 * width * 4, 10),
    )


class ViT(nn.Module):
    """A vision transformer: overlapping 4 by 4 patches as 16 tokens, blocks of attention and MLP, the tokens' mean."""

    def __init__(self, size: int = 48, depth: int = 3, heads: int = 4):
        self.patches = nn.Conv2d(1, size, 4, stride=2, padding=1)
        self.positions = nn.Parameter(np.random.default_rng(1).standard_normal((16, size)) * 0.02)
        self.blocks = nn.Sequential(*(self._block(size, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(size), nn.Linear(size, 10)

    def _block(self, size: int, heads: int) -> nn.Module:
        return nn.Sequential(
            nn.Residual(nn.LayerNorm(size), nn.MultiHeadAttention(size, heads)),
            nn.Residual(nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).reshape(x.shape[0], -1, 16).swapaxes(1, 2)
        tokens = self.blocks(tokens + self.positions.on(nn.tape_of(x)))
        return self.head(self.norm(tokens).mean(1))
