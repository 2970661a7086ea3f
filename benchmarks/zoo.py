"""The models of the speed benchmarks as torch modules with random weights, statistics and inputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class UNet(nn.Module):
    """O. Ronneberger et al., U-Net (2015), with batch norms, padding and half the channels."""

    def __init__(self, width: int = 32, depth: int = 4):
        super().__init__()
        widths = [width << i for i in range(depth + 1)]
        self.down = nn.ModuleList(self._pair(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in reversed(widths[:-1]))
        self.join = nn.ModuleList(self._pair(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, 8, 1)

    @staticmethod
    def _pair(a: int, b: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for c in (a, b):
            layers += [nn.Conv2d(c, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for level, pair in enumerate(self.down):
            x = pair(functional.max_pool2d(x, 2) if level else x)
            kept.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(kept[:-1]), strict=True):
            x = join(torch.cat([skip, up(x)], 1))
        return self.head(x)


class Hourglass(nn.Module):
    """A network from image to image: 7x7 stem, instance norms, pooling, residual blocks, upsampling."""

    def __init__(self, width: int = 32, blocks: int = 4):
        super().__init__()
        w = width
        self.stem = self._norm(nn.Conv2d(3, w, 7, padding=3), w)
        self.down = nn.ModuleList(self._norm(nn.Conv2d(w << i, w << i + 1, 3, padding=1), w << i + 1) for i in (0, 1))
        self.first = nn.ModuleList(self._norm(nn.Conv2d(4 * w, 4 * w, 3, padding=1), 4 * w) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Conv2d(4 * w, 4 * w, 3, padding=1) for _ in range(blocks))
        self.up = nn.ModuleList(self._norm(nn.Conv2d(w << i + 1, w << i, 3, padding=1), w << i) for i in (1, 0))
        self.head = nn.Conv2d(w, 3, 7, padding=3)

    @staticmethod
    def _norm(conv: nn.Module, width: int) -> nn.Sequential:
        return nn.Sequential(conv, nn.InstanceNorm2d(width, affine=True), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.down:
            x = layer(functional.max_pool2d(x, 2))
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(first(x))
        for layer in self.up:
            x = layer(functional.interpolate(x, scale_factor=2.0, mode="nearest"))
        return torch.tanh(self.head(x))


def make(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """A model in fp32 and the shape of one input."""
    torch.manual_seed(0)
    if name == "unet":
        model, shape = UNet(), (3, 256, 256)
    elif name == "hourglass":
        model, shape = Hourglass(), (3, 256, 256)
    else:
        import torchvision

        model, shape = getattr(torchvision.models, name)(weights=None), (3, 224, 224)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.InstanceNorm2d)):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval(), shape
