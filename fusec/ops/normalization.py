"""Define normalisations: batch (inference), instance, layer, group, RMS, and local response."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from fusec.ir import Array, Op, TensorType
from fusec.ops.spec import broadcasts_to, normalize_axis, per_channel, require, require_arity, require_float, widened
from fusec.system.dataclass import dataclass


def _check_channels(op: str, operands: Sequence[TensorType]) -> None:
    require_float(op, *operands)
    x = operands[0]
    require(x.rank >= 2, f"{op} needs a channel dim, x has shape {list(x.shape)}")
    for t in operands[1:]:
        require(t.shape == (x.shape[1],), f"{op}: parameter of shape {list(t.shape)} for {x.shape[1]} channels")


def _standardize(xp: Any, x: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    if x.size == 0:  # because NumPy warns about the mean of no elements
        return x
    centred = x - x.mean(axis=axes, keepdims=True)
    return centred / xp.sqrt((centred * centred).mean(axis=axes, keepdims=True) + epsilon)


@dataclass(frozen=True)
class BatchNorm(Op):
    """Inference: (x - mean) / sqrt(var + epsilon) * scale + bias, each parameter of shape [C]."""

    epsilon: float = 1e-5
    name: ClassVar[str] = "batch_norm"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 5)
        _check_channels(self.name, operands)
        return (operands[0],)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array, scale: Array, bias: Array, mean: Array, var: Array) -> Array:
            factor = scale / xp.sqrt(var + self.epsilon)
            return (x - per_channel(x, mean)) * per_channel(x, factor) + per_channel(x, bias)

        return (widened(compute, *operands),)


@dataclass(frozen=True)
class InstanceNorm(Op):
    """Normalise each channel of each image by its own mean and variance, then scale and add bias, both of shape [C]."""

    epsilon: float = 1e-5
    name: ClassVar[str] = "instance_norm"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3)
        _check_channels(self.name, operands)
        require(operands[0].rank >= 3, f"instance_norm needs spatial dims, x has shape {list(operands[0].shape)}")
        return (operands[0],)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array, scale: Array, bias: Array) -> Array:
            normal = _standardize(xp, x, tuple(range(2, x.ndim)), self.epsilon)
            return normal * per_channel(x, scale) + per_channel(x, bias)

        return (widened(compute, *operands),)


@dataclass(frozen=True)
class GroupNorm(Op):
    """Normalise each of `groups` groups of channels together, then scale and add bias, both of shape [C]."""

    groups: int
    epsilon: float = 1e-5
    name: ClassVar[str] = "group_norm"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 3)
        _check_channels(self.name, operands)
        channels = operands[0].shape[1]
        require(
            self.groups >= 1 and channels % self.groups == 0,
            f"{channels} channels do not divide into {self.groups} groups",
        )
        return (operands[0],)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array, scale: Array, bias: Array) -> Array:
            grouped = x.reshape(x.shape[0], self.groups, math.prod(x.shape[1:]) // self.groups)
            normal = _standardize(xp, grouped, (2,), self.epsilon).reshape(x.shape)
            return normal * per_channel(x, scale) + per_channel(x, bias)

        return (widened(compute, *operands),)


def _check_trailing(op: str, axis: int, operands: Sequence[TensorType]) -> int:
    require_float(op, *operands)
    x = operands[0]
    axis = normalize_axis(axis, x.rank)
    for t in operands[1:]:
        require(
            broadcasts_to(t.shape, x.shape[axis:]),
            f"{op}: parameter of shape {list(t.shape)} for normalised dims {list(x.shape[axis:])}",
        )
    return axis


@dataclass(frozen=True)
class LayerNorm(Op):
    """Normalise the dims from `axis` on together, then scale and add bias, if given, that broadcast to those dims."""

    axis: int = -1
    epsilon: float = 1e-5
    name: ClassVar[str] = "layer_norm"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2, 3)
        _check_trailing(self.name, self.axis, operands)
        return (operands[0],)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array, scale: Array, *bias: Array) -> Array:
            axes = tuple(range(self.axis % x.ndim, x.ndim))
            result = _standardize(xp, x, axes, self.epsilon) * scale
            return result + bias[0] if bias else result

        return (widened(compute, *operands),)


@dataclass(frozen=True)
class RmsNorm(Op):
    """x / sqrt(mean(x*x over dims axis…) + epsilon) * scale."""

    axis: int = -1
    epsilon: float = 1e-5
    name: ClassVar[str] = "rms_norm"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        _check_trailing(self.name, self.axis, operands)
        return (operands[0],)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array, scale: Array) -> Array:
            if x.size == 0:
                return x
            axes = tuple(range(self.axis % x.ndim, x.ndim))
            return x / xp.sqrt((x * x).mean(axis=axes, keepdims=True) + self.epsilon) * scale

        return (widened(compute, *operands),)


@dataclass(frozen=True)
class LocalResponseNorm(Op):
    """x / (bias + alpha/size * sum of x*x over `size` neighbouring channels) ** beta."""

    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0
    name: ClassVar[str] = "lrn"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        require_float(self.name, *operands)
        require(operands[0].rank >= 2, f"lrn needs a channel dim, x has shape {list(operands[0].shape)}")
        require(self.size >= 1, f"lrn: size is {self.size}")
        return (operands[0],)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        def compute(x: Array) -> Array:
            before = (self.size - 1) // 2
            squares = xp.pad(x * x, [(0, 0), (before, self.size - 1 - before), *([(0, 0)] * (x.ndim - 2))])
            channels = x.shape[1]
            total = squares[:, :channels]
            for shift in range(1, self.size):
                total = total + squares[:, shift : shift + channels]
            return x / (self.bias + self.alpha / self.size * total) ** self.beta

        return (widened(compute, *operands),)
