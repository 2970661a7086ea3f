"""Define the models of the speed benchmarks as torch modules with random weights, statistics and inputs."""

from __future__ import annotations

import io
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.common.block_zoo import block
from benchmarks.common.library_models import library_model

BATCH_NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)
FACTORS = {"hrnet_w18": (0.1, 0.5)}  # of norms whose sums over many branches would exceed fp16
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


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
        skips: list[torch.Tensor] = []
        for level, pair in enumerate(self.down):
            x = pair(functional.max_pool2d(x, 2) if level else x)
            skips.append(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips[:-1]), strict=True):
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


class Attention(nn.Module):
    """Self-attention, or attention to a context, with one projection for each of query, key and value."""

    def __init__(self, width: int, heads: int, kv_heads: int = 0, context: int = 0, bias: bool = True):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads or heads, width // heads
        self.q = nn.Linear(width, width, bias)
        self.k = nn.Linear(context or width, self.kv_heads * self.size, bias)
        self.v = nn.Linear(context or width, self.kv_heads * self.size, bias)
        self.out = nn.Linear(width, width, bias)

    def forward(
        self,
        x: torch.Tensor,
        context: torch.Tensor | None = None,
        causal: bool = False,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        source = x if context is None else context
        (b, s, w), t = x.shape, source.shape[1]
        q = self.q(x).view(b, s, self.heads, self.size).transpose(1, 2)
        k = self.k(source).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        v = self.v(source).view(b, t, self.kv_heads, self.size).transpose(1, 2)
        if rotary is not None:
            q, k = rotated(q, *rotary), rotated(k, *rotary)
        if self.kv_heads != self.heads:
            k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        mask = None
        # because the exporter's own causal mask has another dtype than the scores
        if causal and torch.onnx.is_in_onnx_export():
            mask, causal = torch.full((s, t), -torch.inf, dtype=q.dtype, device=q.device).triu(1), False
        y = functional.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(b, s, w))


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Layer(nn.Module):
    """A transformer layer, with norms before attention and MLP, or after the residual sums."""

    def __init__(self, width: int, heads: int, causal: bool = False, norm_first: bool = True):
        super().__init__()
        self.causal, self.norm_first = causal, norm_first
        self.attention = Attention(width, heads)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        if self.norm_first:
            x = x + self.attention(first(x), causal=self.causal)
            return x + self.mlp(second(x))
        x = first(x + self.attention(x, causal=self.causal))
        return second(x + self.mlp(x))


class Text(nn.Module):
    """Embeddings and layers: BERT (J. Devlin et al., 2018) without its pooler, GPT-2 (A. Radford et al., 2019)."""

    def __init__(self, width: int, layers: int, heads: int, length: int, causal: bool):
        super().__init__()
        self.words, self.places = nn.Embedding(30522, width), nn.Parameter(torch.randn(length, width) / 50)
        self.layers = nn.ModuleList(Layer(width, heads, causal, norm_first=causal) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.words(x) + self.places[: x.shape[1]])
        for layer in self.layers:
            y = layer(y)
        return y


class Speech(nn.Module):
    """The encoder of Whisper (A. Radford et al., 2022), base."""

    def __init__(self, width: int = 512, layers: int = 6, heads: int = 8):
        super().__init__()
        self.first, self.second = nn.Conv1d(80, width, 3, 1, 1), nn.Conv1d(width, width, 3, 2, 1)
        self.places = nn.Parameter(torch.randn(1500, width) / 50)
        self.layers, self.norm = nn.ModuleList(Layer(width, heads) for _ in range(layers)), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.gelu(self.second(functional.gelu(self.first(x))))
        x = x.transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class RmsNorm(nn.Module):
    """RMS norm as models write it: computed in fp32."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Llama(nn.Module):
    """One block of Llama (H. Touvron et al., 2023): 4096 wide, 32 heads, 8 of keys and values, SwiGLU."""

    def __init__(self, width: int = 4096, heads: int = 32, kv_heads: int = 8, hidden: int = 14336, length: int = 2048):
        super().__init__()
        self.attention, self.norms = Attention(width, heads, kv_heads, bias=False), nn.ModuleList()
        self.norms.extend(RmsNorm(width) for _ in range(2))
        self.gate, self.up = nn.Linear(width, hidden, False), nn.Linear(width, hidden, False)
        self.down = nn.Linear(hidden, width, False)
        size = width // heads
        angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.cos, self.sin = (nn.Parameter(f(angles), requires_grad=False) for f in (torch.cos, torch.sin))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        x = x + self.attention(first(x), causal=True, rotary=(self.cos, self.sin))
        y = second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Diffusion(nn.Module):
    """A level of Stable Diffusion's UNet (R. Rombach et al., 2022).

    A residual block, and a transformer block with cross-attention to text.
    """

    def __init__(self, width: int = 320, heads: int = 8, context: int = 768):
        super().__init__()
        self.residual = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)) for _ in range(2)
        )
        self.norm, self.enter, self.leave = nn.GroupNorm(32, width), nn.Linear(width, width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, heads, bias=False), Attention(width, heads, context=context, bias=False)
        self.gated, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        first, second = self.residual
        x = x + second(first(x))
        b, c, h, w = x.shape
        y = self.enter(self.norm(x).flatten(2).transpose(1, 2))
        y = y + self.own(self.norms[0](y))
        y = y + self.cross(self.norms[1](y), context)
        a, gate = self.gated(self.norms[2](y)).chunk(2, -1)
        y = self.leave(y + self.down(a * functional.gelu(gate)))
        return x + y.transpose(1, 2).reshape(b, c, h, w)


def make(name: str, batch: int) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Make a model in fp32 and its inputs. A name that is defined in no zoo is one of torchvision's."""
    torch.manual_seed(0)
    if (found := block(name, batch)) is not None:
        return found[0].eval(), found[1]
    if (found := library_model(name, batch)) is not None:
        model, inputs = found
    elif name == "unet":
        model, inputs = UNet(), (torch.randn(batch, 3, 256, 256),)
    elif name == "hourglass":
        model, inputs = Hourglass(), (torch.randn(batch, 3, 256, 256),)
    elif name == "bert_base":
        model, inputs = Text(768, 12, 12, 128, causal=False), (torch.randint(0, 30522, (batch, 128)),)
    elif name == "gpt2":
        model, inputs = Text(768, 12, 12, 512, causal=True), (torch.randint(0, 30522, (batch, 512)),)
    elif name == "whisper_base":
        model, inputs = Speech(), (torch.randn(batch, 80, 3000),)
    elif name == "llama_block":
        model, inputs = Llama(), (torch.randn(batch, 2048, 4096),)
    elif name == "diffusion_block":
        model, inputs = Diffusion(), (torch.randn(batch, 320, 64, 64), torch.randn(batch, 77, 768))
    else:
        import torchvision

        model, inputs = getattr(torchvision.models, name)(weights=None), (torch.randn(batch, 3, 224, 224),)
    if name == "vit_b_16":
        nn.init.normal_(model.heads.head.weight, std=0.02)  # because torchvision starts it with zeros
    for module in model.modules():
        if isinstance(module, (*BATCH_NORMS, nn.InstanceNorm2d)):
            nn.init.uniform_(module.weight, *FACTORS.get(name, (0.5, 1.5)))
            nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, BATCH_NORMS):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return model.eval(), inputs


def exported(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> bytes:
    """Export a model to ONNX, with inputs x0, x1, ... and the output y."""
    file = io.BytesIO()
    names = [f"x{i}" for i in range(len(inputs))]
    torch.backends.mha.set_fastpath_enabled(False)  # because the exporter does not support it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, inputs, file, input_names=names, output_names=["y"], dynamo=False, opset_version=17)
    torch.backends.mha.set_fastpath_enabled(True)
    return file.getvalue()


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.half() if tensor.is_floating_point() else tensor


def channels_last(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Store images in NHWC memory, and volumes in NDHWC."""
    return tuple(x.to(memory_format=FORMATS[x.ndim]) if x.ndim in FORMATS else x for x in inputs)


def with_channels_last(model: nn.Module) -> nn.Module:
    """Store a model's filters as `channels_last` stores its images."""
    rank = max((weight.ndim for weight in model.parameters()), default=0)
    return model.to(memory_format=FORMATS[rank]) if rank in FORMATS else model


def feeds_of(inputs: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """Return the inputs of an exported model by name, as CuPy arrays in the same memory."""
    import cupy

    return {f"x{i}": cupy.from_dlpack(x) for i, x in enumerate(inputs)}


def on_gpu(
    model: nn.Module, inputs: tuple[torch.Tensor, ...], precision: str = "fp16"
) -> tuple[nn.Module, tuple[torch.Tensor, ...], bytes, torch.Tensor]:
    """Move a model to the GPU. Return it and its inputs in the precision, its ONNX export, and its output in fp32."""
    model, inputs = model.cuda(), tuple(x.cuda() for x in inputs)
    with torch.inference_mode():
        want = model(*inputs).clone()
    if precision == "fp16":
        model, inputs = model.half(), tuple(map(halved, inputs))
    return model, inputs, exported(model, inputs), want
