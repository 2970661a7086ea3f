"""Build training steps of ResNet-50 and ViT-B/16 with `fusec.Builder`: 16-bit activations, fp32 master weights.

These are plain functions to read and copy. Parameters have torchvision's names and shapes, so torchvision's weights can
be bound unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

import fusec
from fusec import Builder, Tensor, training

Array = np.ndarray[Any, Any]
CLASSES = 1000
LOSS_SCALE = 2.0**13


class Layers:
    """Layers in 16 bits whose parameters are fp32 state; `trained` collects the parameters that need gradients."""

    def __init__(self, b: Builder, first: Mapping[str, Array] | None = None):
        self.b = b
        self.first = first  # initial values; without them, the caller binds values later
        self.trained: list[Tensor] = []

    def parameter(self, name: str, *shape: int, trained: bool = True) -> Tensor:
        held = None if self.first is None else np.asarray(self.first[name], np.float32).reshape(shape)
        tensor = self.b.parameter(name, held, shape, "f32")
        if trained:
            self.trained.append(tensor)
        return tensor

    def half(self, name: str, *shape: int) -> Tensor:
        """Return the 16-bit copy of a master weight. The optimiser writes both."""
        return self.b.copy(self.parameter(name, *shape), self.b.dtype)

    def linear(self, name: str, x: Tensor, outputs: int) -> Tensor:
        return self.product(x, self.half(f"{name}.weight", outputs, x.shape[-1]), self.half(f"{name}.bias", outputs))

    def product(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x @ weight.T + bias

    def conv(self, name: str, x: Tensor, outputs: int, size: int, stride: int = 1) -> Tensor:
        return self.b.conv(x, self.half(f"{name}.weight", outputs, x.shape[1], size, size), stride, size // 2)

    def batch_norm(self, name: str, x: Tensor, momentum: float = 0.1) -> Tensor:
        """Normalise by the batch's statistics and update the running ones (with torch's unbiased variance)."""
        channels, count = x.shape[1], x.size // x.shape[1]
        y, mean, variance = self.b.batch_norm_train(
            x, self.parameter(f"{name}.weight", channels), self.parameter(f"{name}.bias", channels)
        )
        for kind, now in (("mean", mean), ("var", variance * (count / max(1, count - 1)))):
            running = self.parameter(f"{name}.running_{kind}", channels, trained=False)
            self.b.update(running, running * (1.0 - momentum) + now * momentum)
        return y

    def layer_norm(self, name: str, x: Tensor, epsilon: float = 1e-6) -> Tensor:
        size = x.shape[-1]
        return self.b.layer_norm(x, self.half(f"{name}.weight", size), self.half(f"{name}.bias", size), epsilon=epsilon)

    def attention(self, name: str, x: Tensor, heads: int) -> Tensor:
        """Add self-attention with one projection for query, key and value."""
        batch, tokens, size = x.shape
        each = size // heads
        weight = self.half(f"{name}.in_proj_weight", 3 * size, size)
        y = self.product(x, weight, self.half(f"{name}.in_proj_bias", 3 * size))
        q, k, v = (t.reshape(batch, tokens, heads, each).transpose(0, 2, 1, 3) for t in self.b.split(y, 3, -1))
        mixed = self.b.attention(q, k, v).transpose(0, 2, 1, 3).reshape(batch, tokens, size)
        return self.linear(f"{name}.out_proj", mixed, size)


def resnet50(layers: Layers, images: Tensor, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> Tensor:
    """Return the logits of images[N, 3, H, W].

    K. He et al., Deep Residual Learning (2015), with the strides in the 3x3 convolutions.
    """
    norm_conv = _norm_conv
    x = norm_conv(layers, "conv1", "bn1", images, width, 7, 2).relu()
    x = layers.b.max_pool(x, 3, 2, 1)
    for stage, count in enumerate(blocks):
        for block in range(count):
            name, planes = f"layer{stage + 1}.{block}", width << stage
            stride = 2 if stage and not block else 1
            y = norm_conv(layers, f"{name}.conv1", f"{name}.bn1", x, planes, 1).relu()
            y = norm_conv(layers, f"{name}.conv2", f"{name}.bn2", y, planes, 3, stride).relu()
            y = norm_conv(layers, f"{name}.conv3", f"{name}.bn3", y, 4 * planes, 1)
            if not block:
                x = norm_conv(layers, f"{name}.downsample.0", f"{name}.downsample.1", x, 4 * planes, 1, stride)
            x = (y + x).relu()
    return layers.linear("fc", x.mean((2, 3)), CLASSES)


def _norm_conv(layers: Layers, conv: str, norm: str, x: Tensor, outputs: int, size: int, stride: int = 1) -> Tensor:
    return layers.batch_norm(norm, layers.conv(conv, x, outputs, size, stride))


def vit_b_16(layers: Layers, images: Tensor, size: int = 768, depth: int = 12, heads: int = 12) -> Tensor:
    """Return the logits of images[N, 3, H, W].

    A. Dosovitskiy et al., An Image is Worth 16x16 Words (2020), with pre-norm blocks.
    """
    b, batch, patch = layers.b, images.shape[0], 16
    rows, columns = (side // patch for side in images.shape[2:])
    # a matmul of the patches replaces the convolution, because its windows do not overlap
    patches = images.reshape(batch, 3, rows, patch, columns, patch).transpose(0, 2, 4, 1, 3, 5)
    weight = layers.half("conv_proj.weight", size, 3, patch, patch).reshape(size, -1)
    x = layers.product(patches.reshape(batch, rows * columns, -1), weight, layers.half("conv_proj.bias", size))
    first = layers.half("class_token", 1, 1, size).expand(batch, 1, size)
    x = b.concat([first, x], 1)
    x = x + layers.half("encoder.pos_embedding", 1, x.shape[1], size)
    for i in range(depth):
        name = f"encoder.layers.encoder_layer_{i}"
        x = x + layers.attention(f"{name}.self_attention", layers.layer_norm(f"{name}.ln_1", x), heads)
        y = layers.linear(f"{name}.mlp.0", layers.layer_norm(f"{name}.ln_2", x), 4 * size).gelu()
        x = x + layers.linear(f"{name}.mlp.3", y, size)
    return layers.linear("heads.head", layers.layer_norm("encoder.ln", x)[:, 0], CLASSES)


def with_sgd(b: Builder, loss: Tensor, trained: Sequence[Tensor]) -> None:
    gradients, finite = training.scaled_backward(loss, trained, start=LOSS_SCALE)
    training.sgd(b, trained, gradients, 0.01, momentum=0.9, weight_decay=1e-4, keep=finite)


def with_adamw(b: Builder, loss: Tensor, trained: Sequence[Tensor]) -> None:
    gradients, finite = training.scaled_backward(loss, trained, start=LOSS_SCALE)
    training.adamw(b, trained, gradients, 1e-4, weight_decay=0.01, keep=finite)


Network = Callable[..., Tensor]
Optimiser = Callable[[Builder, Tensor, Sequence[Tensor]], None]
MODELS: Mapping[str, tuple[Network, Optimiser]] = {
    "resnet50": (resnet50, with_sgd),
    "vit_b_16": (vit_b_16, with_adamw),
}


def training_step(
    name: str,
    batch: int,
    side: int = 224,
    first: Mapping[str, Array] | None = None,
    dtype: str = "f16",
    **sizes: Any,
) -> Builder:
    """Build one step on `images` (16 bits, NCHW) and `labels`: forward, loss, backward, update. Its output is the loss.

    first: the parameters' initial values by name; without them, the caller binds values before the first step.
    sizes: arguments of the network.
    """
    network, optimise = MODELS[name]
    b = fusec.Builder(dtype)
    layers = Layers(b, first)
    images, labels = b.input("images", (batch, 3, side, side)), b.input("labels", (batch,), "i64")
    logits = network(layers, images, **sizes).astype("f32")
    loss = b.cross_entropy(logits, labels)
    optimise(b, loss, layers.trained)
    b.output(loss=loss)
    return b
