"""Compare gradients of whole models with torch's autograd, in fp32 on the CPU.

Usage, with torch installed: python -m benchmarks.checks.gradients_torch
Each model is a function of an object that has the operations. One such object builds a graph for fusec, the other runs
torch. Writes benchmarks/results/gradients_torch.json.
"""

from __future__ import annotations

import json
import math
import platform
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import fusec
from benchmarks.common.result_files import RESULTS, date_and_commit, write

RESULT = RESULTS / "gradients_torch.json"
BOUND = 1e-3  # relative L2 of each parameter's gradient


class InFusec:
    """The operations as nodes of a graph, whose inputs are the parameters."""

    def __init__(self) -> None:
        self.b = fusec.Builder()
        self.parameters: dict[str, np.ndarray[Any, Any]] = {}
        self.tensors: dict[str, fusec.Tensor] = {}

    def parameter(self, name: str, array: np.ndarray[Any, Any]) -> fusec.Tensor:
        if name not in self.tensors:
            self.parameters[name] = array.astype(np.float32)
            self.tensors[name] = self.b.input(name, array.shape)
        return self.tensors[name]

    def conv(self, x: Any, w: Any, stride: int = 1, padding: int = 0) -> Any:
        return self.b.conv(x, w, stride, padding)

    def conv_transpose(self, x: Any, w: Any, stride: int) -> Any:
        return self.b.conv_transpose(x, w, stride)

    def batch_norm(self, x: Any, scale: Any, bias: Any) -> Any:
        return self.b.batch_norm_train(x, scale, bias)[0]

    def group_norm(self, x: Any, scale: Any, bias: Any, groups: int) -> Any:
        return self.b.group_norm(x, scale, bias, groups)

    def layer_norm(self, x: Any, scale: Any, bias: Any) -> Any:
        return self.b.layer_norm(x, scale, bias)

    def max_pool(self, x: Any, size: int, stride: int, padding: int) -> Any:
        return self.b.max_pool(x, size, stride, padding)

    def relu(self, x: Any) -> Any:
        return x.relu()

    def silu(self, x: Any) -> Any:
        return x.silu()

    def gelu(self, x: Any) -> Any:
        return x.gelu()

    def softmax(self, x: Any) -> Any:
        return x.softmax()

    def concat(self, parts: list[Any]) -> Any:
        return self.b.concat(parts, 1)

    def permute(self, x: Any, *order: int) -> Any:
        return x.transpose(*order)

    def mean(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.mean(axes)

    def cross_entropy(self, x: Any, labels: np.ndarray[Any, Any]) -> Any:
        return self.b.cross_entropy(x, self.b.constant(labels))

    def input(self, array: np.ndarray[Any, Any]) -> Any:
        return self.b.constant(array)


class InTorch:
    """The same operations, run by torch on the same parameters."""

    def __init__(self, parameters: dict[str, np.ndarray[Any, Any]]) -> None:
        self.tensors = {n: torch.tensor(a, requires_grad=True) for n, a in parameters.items()}

    def parameter(self, name: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
        return self.tensors[name]

    def conv(self, x: Any, w: Any, stride: int = 1, padding: int = 0) -> Any:
        return functional.conv2d(x, w, stride=stride, padding=padding)

    def conv_transpose(self, x: Any, w: Any, stride: int) -> Any:
        return functional.conv_transpose2d(x, w, stride=stride)

    def batch_norm(self, x: Any, scale: Any, bias: Any) -> Any:
        return functional.batch_norm(x, None, None, scale, bias, training=True)

    def group_norm(self, x: Any, scale: Any, bias: Any, groups: int) -> Any:
        return functional.group_norm(x, groups, scale, bias)

    def layer_norm(self, x: Any, scale: Any, bias: Any) -> Any:
        return functional.layer_norm(x, (x.shape[-1],), scale, bias)

    def max_pool(self, x: Any, size: int, stride: int, padding: int) -> Any:
        return functional.max_pool2d(x, size, stride, padding)

    def relu(self, x: Any) -> Any:
        return functional.relu(x)

    def silu(self, x: Any) -> Any:
        return functional.silu(x)

    def gelu(self, x: Any) -> Any:
        return functional.gelu(x)

    def softmax(self, x: Any) -> Any:
        return x.softmax(-1)

    def concat(self, parts: list[Any]) -> Any:
        return torch.cat(parts, 1)

    def permute(self, x: Any, *order: int) -> Any:
        return x.permute(*order)

    def mean(self, x: Any, axes: tuple[int, ...]) -> Any:
        return x.mean(axes)

    def cross_entropy(self, x: Any, labels: np.ndarray[Any, Any]) -> Any:
        return functional.cross_entropy(x, torch.tensor(labels))

    def input(self, array: np.ndarray[Any, Any]) -> Any:
        return torch.tensor(array)


class Layers:
    """Layers whose parameters are drawn at their first use, by name."""

    def __init__(self, f: Any, seed: int):
        self.f = f
        self.rng = np.random.default_rng(seed)

    def weight(self, name: str, *shape: int) -> Any:
        fan_in = math.prod(shape[1:]) if len(shape) == 4 else shape[0]
        return self.f.parameter(name, self.rng.standard_normal(shape) * math.sqrt(2.0 / fan_in))

    def pair(self, name: str, size: int) -> tuple[Any, Any]:
        """A scale near 1 and a bias near 0."""
        scale = self.f.parameter(f"{name}.scale", 1.0 + 0.1 * self.rng.standard_normal(size))
        return scale, self.f.parameter(f"{name}.bias", 0.1 * self.rng.standard_normal(size))

    def linear(self, name: str, x: Any, outputs: int) -> Any:
        w = self.weight(f"{name}.weight", x.shape[-1], outputs)
        return x @ w + self.f.parameter(f"{name}.bias", 0.1 * self.rng.standard_normal(outputs))

    def norm_conv(self, name: str, x: Any, outputs: int, size: int, stride: int = 1) -> Any:
        y = self.f.conv(x, self.weight(name, outputs, x.shape[1], size, size), stride, size // 2)
        return self.f.batch_norm(y, *self.pair(f"{name}.norm", outputs))


def resnet18(f: Any, images: Any) -> Any:
    """Build ResNet-18 (He et al., 2015), with batch norm by the batch's statistics."""
    layers = Layers(f, 1)
    x = f.max_pool(f.relu(layers.norm_conv("stem", images, 64, 7, 2)), 3, 2, 1)
    for stage, width in enumerate((64, 128, 256, 512)):
        for block in range(2):
            name, stride = f"stage{stage}.{block}", 2 if stage and not block else 1
            y = f.relu(layers.norm_conv(f"{name}.first", x, width, 3, stride))
            y = layers.norm_conv(f"{name}.second", y, width, 3)
            x = layers.norm_conv(f"{name}.down", x, width, 1, stride) if stride > 1 else x
            x = f.relu(y + x)
    return layers.linear("head", f.mean(x, (2, 3)), 10)


def vit(f: Any, images: Any, size: int = 96, depth: int = 4, heads: int = 4) -> Any:
    """Build a vision transformer with pre-norm blocks."""
    layers = Layers(f, 2)
    x = f.conv(images, layers.weight("patches", size, 3, 8, 8), 8)
    batch, tokens, each = x.shape[0], x.shape[2] * x.shape[3], size // heads
    x = f.permute(x.reshape(batch, size, tokens), 0, 2, 1)
    x = x + f.parameter("positions", layers.rng.standard_normal((tokens, size)) * 0.1)
    for i in range(depth):
        y = layers.linear(f"{i}.qkv", f.layer_norm(x, *layers.pair(f"{i}.norm1", size)), 3 * size)
        packed = f.permute(y.reshape(batch, tokens, 3, heads, each), 2, 0, 3, 1, 4)
        weights = f.softmax(packed[0] @ f.permute(packed[1], 0, 1, 3, 2) * each**-0.5)
        y = f.permute(weights @ packed[2], 0, 2, 1, 3).reshape(batch, tokens, size)
        x = x + layers.linear(f"{i}.out", y, size)
        y = layers.linear(f"{i}.up", f.layer_norm(x, *layers.pair(f"{i}.norm2", size)), 4 * size)
        x = x + layers.linear(f"{i}.down", f.gelu(y), size)
    return layers.linear("head", f.mean(f.layer_norm(x, *layers.pair("norm", size)), (1,)), 10)


def unet(f: Any, images: Any) -> Any:
    """Classify each pixel: three levels with group norm, strided and transposed convolutions, and skips."""
    layers = Layers(f, 3)

    def block(name: str, x: Any, width: int) -> Any:
        for i in range(2):
            x = f.conv(x, layers.weight(f"{name}.{i}", width, x.shape[1], 3, 3), 1, 1)
            x = f.silu(f.group_norm(x, *layers.pair(f"{name}.{i}.norm", width), 8))
        return x

    skips: list[Any] = []
    x = images
    for level, width in enumerate((32, 64)):
        x = block(f"down{level}", x, width)
        skips.append(x)
        x = f.conv(x, layers.weight(f"stride{level}", width, width, 3, 3), 2, 1)
    x = block("middle", x, 128)
    for level, width in reversed(list(enumerate((32, 64)))):
        x = f.conv_transpose(x, layers.weight(f"up{level}", x.shape[1], width, 2, 2), 2)
        x = block(f"back{level}", f.concat([x, skips[level]]), width)
    pixels = f.conv(x, layers.weight("head", 4, 32, 1, 1))
    return f.permute(pixels, 0, 2, 3, 1)


MODELS: dict[str, tuple[Callable[..., Any], tuple[int, ...], int]] = {
    "resnet18": (resnet18, (4, 3, 64, 64), 10),
    "vit": (vit, (4, 3, 64, 64), 10),
    "unet": (unet, (2, 3, 32, 32), 4),
}


def compare(name: str) -> dict[str, Any]:
    """Return the losses, and the relative L2 errors of the parameters' gradients."""
    model, shape, classes = MODELS[name]
    rng = np.random.default_rng(7)
    images = rng.standard_normal(shape).astype(np.float32)
    labels = rng.integers(0, classes, shape[:1] if name != "unet" else (shape[0], *shape[2:]))
    f = InFusec()
    loss = f.cross_entropy(model(f, f.input(images)), labels)
    wrt = list(f.tensors)
    f.b.output(loss=loss)
    f.b.output({f"{n}.grad": g for n, g in zip(wrt, fusec.backward(loss, [f.tensors[n] for n in wrt]), strict=True)})
    start = time.perf_counter()
    exe = fusec.compile(f.b.graph(), target="cpu")
    got = dict(zip([s.name for s in exe.outputs], exe.run(None, f.parameters), strict=True))
    seconds = time.perf_counter() - start
    t = InTorch(f.parameters)
    flat = model(t, t.input(images))
    right = t.cross_entropy(flat.reshape(-1, flat.shape[-1]), labels.reshape(-1))
    right.backward()
    errors: dict[str, float] = {}
    for n in wrt:
        gradient = t.tensors[n].grad
        assert gradient is not None
        want = gradient.numpy().astype(np.float64)
        errors[n] = float(np.linalg.norm(got[f"{n}.grad"] - want) / np.linalg.norm(want))
    worst = max(errors, key=lambda n: errors[n])
    return {
        "parameters": sum(a.size for a in f.parameters.values()),
        "tensors": len(errors),
        "loss": float(got["loss"]),
        "loss_torch": float(right.detach()),
        "worst": worst,
        "worst_relative_l2": errors[worst],
        "median_relative_l2": float(np.median(list(errors.values()))),
        "seconds": round(seconds, 2),
    }


def main() -> None:
    """Compare all models; exit with 1 if an error is above BOUND."""
    found = {name: compare(name) for name in MODELS}
    result = {
        "date": date_and_commit()["date"],
        "torch": torch.__version__,
        "machine": platform.machine(),
        "bound": BOUND,
        "models": found,
    }
    write(RESULT, result)
    print(json.dumps(found, indent=2))
    if not all(m["worst_relative_l2"] < BOUND for m in found.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
