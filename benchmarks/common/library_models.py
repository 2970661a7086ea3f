"""Make models of torchvision, timm and transformers with random weights, which no other file here defines.

They are of kinds that the other models lack: dilated and 3-D convolutions, many branches, segmentation,
super-resolution, speech.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Made = tuple[nn.Module, tuple[torch.Tensor, ...]]


class Field(nn.Module):
    """Returns one field of a module's results, because exporters and peers take a tensor."""

    def __init__(self, model: nn.Module, field: str):
        super().__init__()
        self.model, self.field = model, field

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)[self.field]


class SuperResolution(nn.Module):
    """B. Lim et al., EDSR (2017): residual blocks without norms, then pixels from channels, twice the size."""

    def __init__(self, width: int = 64, blocks: int = 16):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.first = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.second = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(blocks))
        self.joined = nn.Conv2d(width, width, 3, padding=1)
        self.more = nn.Conv2d(width, 4 * width, 3, padding=1)
        self.tail = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = start = self.head(x)
        for first, second in zip(self.first, self.second, strict=True):
            x = x + second(functional.relu(first(x)))
        return self.tail(functional.pixel_shuffle(self.more(self.joined(x) + start), 2))


def library_model(name: str, batch: int) -> Made | None:
    """Make a model in fp32 and its inputs; None for other names."""
    return MODELS[name](batch) if name in MODELS else None


def _super_resolution(batch: int) -> Made:
    return SuperResolution(), (torch.randn(batch, 3, 128, 128),)


def _inception(batch: int) -> Made:
    from torchvision.models import inception_v3

    return inception_v3(weights=None, aux_logits=False, init_weights=False), (torch.randn(batch, 3, 299, 299),)


def _video(batch: int) -> Made:
    from torchvision.models.video import r3d_18

    return r3d_18(weights=None), (torch.randn(batch, 3, 16, 112, 112),)


def _segmentation(batch: int) -> Made:
    from torchvision.models.segmentation import deeplabv3_resnet50

    model = deeplabv3_resnet50(weights=None, weights_backbone=None)
    return Field(model, "out"), (torch.randn(batch, 3, 512, 512),)


def _many_branches(batch: int) -> Made:
    import timm

    return timm.create_model("hrnet_w18"), (torch.randn(batch, 3, 224, 224),)


def _segmentation_by_attention(batch: int) -> Made:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return Field(SegformerForSemanticSegmentation(SegformerConfig()), "logits"), (torch.randn(batch, 3, 512, 512),)


def _speech(batch: int) -> Made:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    return Field(Wav2Vec2Model(Wav2Vec2Config()), "last_hidden_state"), (torch.randn(batch, 80000),)


MODELS: dict[str, Callable[[int], Made]] = {
    "edsr": _super_resolution,
    "inception_v3": _inception,
    "r3d_18": _video,
    "deeplabv3_resnet50": _segmentation,
    "hrnet_w18": _many_branches,
    "segformer_b0": _segmentation_by_attention,
    "wav2vec2_base": _speech,
}
