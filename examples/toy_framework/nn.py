"""Define modules: named parameters, and a `forward` that computes with tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from examples.toy_framework.tape import Array, Tape, Tensor

_rng = np.random.default_rng(0)


def seed(number: int) -> None:
    """Seed the initial values of parameters."""
    global _rng
    _rng = np.random.default_rng(number)


class Parameter:
    """An array that the optimiser changes, or, if not `trained`, a buffer that only its module changes."""

    def __init__(self, array: Array, trained: bool = True):
        self.array = array.astype(np.float32)
        self.trained = trained
        self.name = ""

    def on(self, tape: Tape) -> Tensor:
        """Return its tensor on a tape: state of the program, or a constant on a frozen tape."""
        if id(self) not in tape.tensors:
            frozen = tape.frozen
            tape.tensors[id(self)] = tape.constant(self.array) if frozen else tape.parameter(self.name, self.array)
        return tape.tensors[id(self)]


class Module:
    """A part of a model. It finds attributes that are parameters, modules, or lists of these."""

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield all parameters and buffers with their dotted names, and set their names."""
        for name, value in vars(self).items():
            items: Sequence[tuple[str, Any]] = [(name, value)]
            if isinstance(value, list):
                items = [(f"{name}.{i}", v) for i, v in enumerate(value)]
            for full, item in items:
                if isinstance(item, Parameter):
                    item.name = prefix + full
                    yield item.name, item
                elif isinstance(item, Module):
                    yield from item.named_parameters(f"{prefix}{full}.")


def tape_of(x: Tensor) -> Tape:
    assert isinstance(x.builder, Tape)
    return x.builder


def _uniform(shape: tuple[int, ...], fan_in: int) -> Parameter:
    bound = 1.0 / math.sqrt(fan_in)
    return Parameter(_rng.uniform(-bound, bound, shape))


class Linear(Module):
    def __init__(self, inputs: int, outputs: int):
        self.weight = _uniform((inputs, outputs), inputs)
        self.bias = _uniform((outputs,), inputs)

    def forward(self, x: Tensor) -> Tensor:
        tape = tape_of(x)
        return x @ self.weight.on(tape) + self.bias.on(tape)


class Conv2d(Module):
    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, padding: int = 0, bias: bool = True):
        fan_in = inputs * size * size
        self.weight = Parameter(_rng.standard_normal((outputs, inputs, size, size)) * math.sqrt(2.0 / fan_in))
        self.bias = _uniform((outputs, 1, 1), fan_in) if bias else None
        self.stride, self.padding = stride, padding

    def forward(self, x: Tensor) -> Tensor:
        tape = tape_of(x)
        y = tape.conv(x, self.weight.on(tape), self.stride, self.padding)
        return y if self.bias is None else y + self.bias.on(tape)


class BatchNorm2d(Module):
    """Batch norm. In training it uses the batch's statistics and updates the running ones, which inference uses."""

    def __init__(self, channels: int, momentum: float = 0.1):
        self.scale, self.bias = Parameter(np.ones(channels)), Parameter(np.zeros(channels))
        self.mean, self.variance = Parameter(np.zeros(channels), False), Parameter(np.ones(channels), False)
        self.momentum = momentum

    def forward(self, x: Tensor) -> Tensor:
        tape = tape_of(x)
        scale, bias, mean, variance = (p.on(tape) for p in (self.scale, self.bias, self.mean, self.variance))
        if not tape.training:
            return tape.batch_norm(x, scale, bias, mean, variance)
        y, now, spread = tape.batch_norm_train(x, scale, bias)
        tape.update(mean, mean * (1.0 - self.momentum) + now * self.momentum)
        tape.update(variance, variance * (1.0 - self.momentum) + spread * self.momentum)
        return y


class LayerNorm(Module):
    def __init__(self, size: int):
        self.scale, self.bias = Parameter(np.ones(size)), Parameter(np.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        tape = tape_of(x)
        return tape.layer_norm(x, self.scale.on(tape), self.bias.on(tape))


class MultiHeadAttention(Module):
    """Self-attention of x[batch, tokens, size]."""

    def __init__(self, size: int, heads: int):
        self.heads = heads
        self.project, self.out = Linear(size, 3 * size), Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, size = x.shape
        each = size // self.heads
        packed = self.project(x).reshape(batch, tokens, 3, self.heads, each).transpose(2, 0, 3, 1, 4)
        q, k, v = packed[0], packed[1], packed[2]
        weights = (q @ k.swapaxes(-1, -2) * (1.0 / math.sqrt(each))).softmax()
        return self.out((weights @ v).transpose(0, 2, 1, 3).reshape(batch, tokens, size))


class Dropout(Module):
    def __init__(self, rate: float):
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        tape = tape_of(x)
        return tape.dropout(x, self.rate, tape.random) if tape.training and self.rate else x


class MaxPool2d(Module):
    def __init__(self, size: int):
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return tape_of(x).max_pool(x, self.size)


class ReLU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


class GELU(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.gelu()


class Flatten(Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1)


class Sequential(Module):
    def __init__(self, *modules: Module):
        self.modules = list(modules)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules:
            x = module(x)
        return x


class Residual(Module):
    """A residual connection: x plus the inner modules' result for x."""

    def __init__(self, *modules: Module):
        self.inner = Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)
