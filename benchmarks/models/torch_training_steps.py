"""Define training steps of torchvision's models as torch's users write them, in fp16 with fp32 master weights.

autocast: fp32 parameters under torch.autocast. half: fp16 parameters (batch norms in fp32), copied from fp32 masters in
few launches. Both use GradScaler, fused optimisers and channels last. compile-…: torch.compile compiles forward and
loss. No step waits for the GPU, so each can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torchvision
from torch import nn
from torch.nn import functional

from benchmarks.common.torch_timing import Autotune, autotuned


@dataclass(frozen=True)
class Workload:
    """A torchvision model with its first weights, and the images of a step."""

    model: str
    weights: Mapping[str, torch.Tensor]
    batch: int
    side: int
    loss_scale: float


def first_weights(name: str) -> dict[str, torch.Tensor]:
    """Draw torchvision's first weights from a fixed seed. Heads that it starts with zeros are drawn as well."""
    torch.manual_seed(0)
    model = getattr(torchvision.models, name)()
    for parameter in model.parameters():
        if parameter.ndim > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return {key: value.clone() for key, value in model.state_dict().items()}


class Step:
    """A model with its optimiser. `run` is one step on `images` and `labels`, whose memory stays the same.

    kind: autocast, half, compile-autocast or compile-half.
    """

    def __init__(self, kind: str, workload: Workload, autotune: Autotune):
        model = getattr(torchvision.models, workload.model)()
        model.load_state_dict(dict(workload.weights))
        self.model = model.cuda().train().to(memory_format=torch.channels_last)
        self.half = kind.endswith("half")
        if self.half:
            self.model.half()
            for module in self.model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.float()
        batch, side = workload.batch, workload.side
        images = torch.zeros(batch, 3, side, side, device="cuda", dtype=torch.float16)
        self.images = images.to(memory_format=torch.channels_last)
        self.labels = torch.zeros(batch, device="cuda", dtype=torch.int64)
        parameters = list(self.model.parameters())
        self.low = [p for p in parameters if p.dtype is torch.float16]
        self.masters = [p.detach().float().requires_grad_() for p in self.low]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.wide = [p for p in parameters if p.dtype is torch.float32]
        trained = [*self.masters, *self.wide]
        if workload.model.startswith("resnet"):
            self.optimiser: torch.optim.Optimizer = torch.optim.SGD(
                trained, 0.01, momentum=0.9, weight_decay=1e-4, fused=True
            )
        else:
            self.optimiser = torch.optim.AdamW(trained, 1e-4, weight_decay=0.01, fused=True, capturable=True)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=workload.loss_scale)
        self.forward: Callable[[], torch.Tensor] = self._forward
        if kind.startswith("compile"):
            self.forward = autotuned(self._forward, autotune)

    def _forward(self) -> torch.Tensor:
        if self.half:
            return functional.cross_entropy(self.model(self.images).float(), self.labels)
        with torch.autocast("cuda", torch.float16):
            return functional.cross_entropy(self.model(self.images), self.labels)

    def run(self) -> torch.Tensor:
        for parameter in (*self.low, *self.wide):
            parameter.grad = None
        loss = self.forward()
        self.scaler.scale(loss).backward()
        with torch.no_grad():
            if self.masters:
                torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.low])
            self.scaler.step(self.optimiser)
            self.scaler.update()
            if self.masters:
                torch._foreach_copy_(self.low, self.masters)
        return loss.detach()
