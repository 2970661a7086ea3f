"""Define blocks of models whose ops few whole models have.

They sample at learned places or regions, scan with learned decay, add messages of a graph's edges, or choose tokens.
"""

from __future__ import annotations

import torch
import torchvision
from torch import nn
from torch.nn import functional

LEVELS = ((64, 64), (32, 32), (16, 16), (8, 8))  # of a pyramid of features
MAMBA_STEPS = 64  # the exporter writes out each step
NODES, EDGES = 4096, 32768  # of a graph


class DeformableAttention(nn.Module):
    """The encoder's attention of Deformable DETR (X. Zhu et al., 2020): 4 levels, 8 heads, 4 places each."""

    def __init__(self, width: int = 256, heads: int = 8, points: int = 4):
        super().__init__()
        self.heads, self.points = heads, points
        count = heads * len(LEVELS) * points
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.places, self.weights = nn.Linear(width, 2 * count), nn.Linear(width, count)
        grids = [torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij") for h, w in LEVELS]
        self.own = nn.Parameter(torch.cat([torch.stack([x, y], -1).flatten(0, 1) for y, x in grids]), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        shape = (batch, tokens, self.heads, len(LEVELS), self.points)
        weights = self.weights(x).view(batch, tokens, self.heads, -1).softmax(-1).view(shape)
        places = self.own[:, None, None, None] + self.places(x).view(*shape, 2) / 16
        values = self.value(x).split([h * w for h, w in LEVELS], 1)
        total = torch.zeros((), device=x.device, dtype=x.dtype)
        for level, (value, size) in enumerate(zip(values, LEVELS, strict=True)):
            image = value.transpose(1, 2).reshape(batch * self.heads, width // self.heads, *size)
            grid = places[:, :, :, level].transpose(1, 2).flatten(0, 1)
            found = functional.grid_sample(image, grid, align_corners=False)
            weight = weights[:, :, :, level].transpose(1, 2).flatten(0, 1)[:, None]
            total = total + (found * weight).sum(-1)
        return self.out(total.reshape(batch, width, tokens).transpose(1, 2))


class RegionHead(nn.Module):
    """The box head of Faster R-CNN (S. Ren et al., 2015) with RoIAlign, over one level of features."""

    def __init__(self, channels: int = 256, classes: int = 91, scale: float = 1 / 16):
        super().__init__()
        self.scale, self.first, self.second = scale, nn.Linear(channels * 49, 1024), nn.Linear(1024, 1024)
        self.scores, self.boxes = nn.Linear(1024, classes), nn.Linear(1024, 4 * classes)

    def forward(self, features: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
        x = torchvision.ops.roi_align(features, regions, 7, self.scale, 2, aligned=True).flatten(1)
        x = functional.relu(self.second(functional.relu(self.first(x))))
        return torch.cat([self.scores(x), self.boxes(x)], 1)


class Mamba(nn.Module):
    """A block of Mamba (A. Gu and T. Dao, 2023) with the sizes of its 130M model, its scan written step by step."""

    def __init__(self, width: int = 768, inner: int = 1536, states: int = 16, rank: int = 48):
        super().__init__()
        self.rank, self.states = rank, states
        self.enter, self.leave = nn.Linear(width, 2 * inner, False), nn.Linear(inner, width, False)
        self.conv = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.select, self.step = nn.Linear(inner, rank + 2 * states, False), nn.Linear(rank, inner)
        self.decay = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        y, gate = self.enter(x).chunk(2, -1)
        y = functional.silu(self.conv(y.transpose(1, 2))[:, :, :length].transpose(1, 2))
        step, write, read = self.select(y).split([self.rank, self.states, self.states], -1)
        step = functional.softplus(self.step(step))
        factors = torch.exp(step[..., None] * -torch.exp(self.decay))  # [B, L, inner, states]
        terms = (step * y)[..., None] * write[:, :, None]
        state, outputs = torch.zeros_like(terms[:, 0]), []
        for i in range(length):
            state = factors[:, i] * state + terms[:, i]
            outputs.append((state @ read[:, i, :, None])[..., 0])
        y = torch.stack(outputs, 1) + y * self.skip
        return self.leave(y * functional.silu(gate))


class GraphLayers(nn.Module):
    """Two layers of GraphSAGE (W. Hamilton et al., 2017): each node takes the mean of its neighbours' features."""

    def __init__(self, width: int = 128):
        super().__init__()
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.others = nn.ModuleList(nn.Linear(width, width, False) for _ in range(2))

    def forward(self, x: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        places, one = targets[:, None], torch.ones_like(targets[:, None], dtype=x.dtype)
        count = torch.zeros_like(x[:, :1]).scatter_add(0, places, one)
        for own, others in zip(self.own, self.others, strict=True):
            messages = x[sources]
            total = torch.zeros_like(x).scatter_add(0, places.expand_as(messages), messages)
            x = functional.relu(own(x) + others(total / count.clamp(1)))
        return x


class NucleusHead(nn.Module):
    """The head of a language model with nucleus sampling (A. Holtzman et al., 2020) among its best tokens."""

    def __init__(self, width: int = 768, tokens: int = 32000, best: int = 1024, mass: float = 0.9):
        super().__init__()
        self.head, self.best, self.mass = nn.Linear(width, tokens, False), best, mass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chances = self.head(x).float().softmax(-1).topk(self.best).values
        before = chances.cumsum(-1) - chances
        chosen = torch.where(before < self.mass, chances, 0.0)
        return chosen / chosen.sum(-1, keepdim=True)


def block(name: str, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]] | None:
    """Make a block in fp32 and its inputs; None for other names."""
    if name == "deformable_attention":
        return DeformableAttention(), (torch.randn(batch, sum(h * w for h, w in LEVELS), 256),)
    if name == "region_head":
        corners = torch.rand(1000 * batch, 2) * 600
        images = torch.arange(batch).repeat_interleave(1000)[:, None].float()
        regions = torch.cat([images, corners, corners + 32 + torch.rand(1000 * batch, 2) * 300], 1)
        return RegionHead(), (torch.randn(batch, 256, 50, 68), regions)
    if name == "mamba_block":
        return Mamba(), (torch.randn(batch, MAMBA_STEPS, 768),)
    if name == "graph_layers":
        ends = torch.randint(batch * NODES, (2, batch * EDGES))
        return GraphLayers(), (torch.randn(batch * NODES, 128), ends[0], ends[1])
    if name == "nucleus_head":
        return NucleusHead(), (torch.randn(batch, 768),)
    return None
