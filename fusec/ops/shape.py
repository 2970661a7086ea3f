"""Define ops that move elements without arithmetic: reshape, transpose, concat, split, slice, pad, dilate, gather.

Shapes are concrete everywhere. Ops that compute only a shape at run time are folded on import.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Array, DType, Op, TensorType
from fusec.ops.spec import broadcasts_to, normalize_axis, require, require_arity, widened
from fusec.system.dataclass import dataclass

MAX_RANK = 64  # NumPy's


@dataclass(frozen=True)
class Reshape(Op):
    """The same elements, in row-major order of the dims, under another shape."""

    shape: tuple[int, ...]
    name: ClassVar[str] = "reshape"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        require(len(self.shape) <= MAX_RANK, f"a shape of {len(self.shape)} dims; {MAX_RANK} is the most")
        size = math.prod(self.shape)
        require(size == x.size, f"{list(x.shape)} has {x.size} elements, {list(self.shape)} {size}")
        return (TensorType(self.shape, x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (operands[0].reshape(self.shape),)


@dataclass(frozen=True)
class Transpose(Op):
    """Result dim i is operand dim perm[i]."""

    perm: tuple[int, ...]
    name: ClassVar[str] = "transpose"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        require(sorted(self.perm) == list(range(x.rank)), f"perm {list(self.perm)} does not permute {x.rank} dims")
        return (TensorType(tuple(x.shape[p] for p in self.perm), x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (operands[0].transpose(self.perm),)


@dataclass(frozen=True)
class Relayout(Op):
    """The same tensor stored in another memory order; its reference is the identity."""

    order: tuple[int, ...]
    name: ClassVar[str] = "relayout"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        return (operands[0].with_order(self.order),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (operands[0],)


@dataclass(frozen=True)
class Expand(Op):
    """Broadcast to `shape` (which the operand must broadcast to exactly)."""

    shape: tuple[int, ...]
    name: ClassVar[str] = "expand"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        require(broadcasts_to(x.shape, self.shape), f"{list(x.shape)} does not expand to {list(self.shape)}")
        return (TensorType(self.shape, x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (xp.broadcast_to(operands[0], self.shape),)


@dataclass(frozen=True)
class Concat(Op):
    """Join tensors that differ only along `axis`."""

    axis: int
    name: ClassVar[str] = "concat"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require(len(operands) >= 1, "concat needs an operand")
        first = operands[0]
        axis = normalize_axis(self.axis, first.rank)
        for t in operands[1:]:
            require(t.dtype == first.dtype, f"operands differ in dtype: {first.dtype.value} and {t.dtype.value}")
            same = t.rank == first.rank and all(
                a == b for i, (a, b) in enumerate(zip(t.shape, first.shape, strict=False)) if i != axis
            )
            require(same, f"{list(first.shape)} and {list(t.shape)} do not join along axis {axis}")
        shape = list(first.shape)
        shape[axis] = sum(t.shape[axis] for t in operands)
        return (TensorType(tuple(shape), first.dtype, first.order),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (xp.concatenate(operands, axis=self.axis),)


@dataclass(frozen=True)
class Split(Op):
    """Split along `axis` into pieces of the given sizes, one result each."""

    axis: int
    sizes: tuple[int, ...]
    name: ClassVar[str] = "split"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        axis = normalize_axis(self.axis, x.rank)
        require(len(self.sizes) >= 1 and all(s >= 0 for s in self.sizes), f"sizes {list(self.sizes)}")
        require(
            sum(self.sizes) == x.shape[axis],
            f"sizes {list(self.sizes)} do not add up to {x.shape[axis]} of axis {axis}",
        )
        return tuple(TensorType((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype, x.order) for size in self.sizes)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        starts = [sum(self.sizes[:i]) for i in range(1, len(self.sizes))]
        return tuple(xp.split(operands[0], starts, axis=self.axis))


@dataclass(frozen=True)
class Slice(Op):
    """Element i of dim d is the operand's element starts[d] + i*steps[d]; one entry per dim."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[int, ...]
    name: ClassVar[str] = "slice"

    @classmethod
    def of_rows_backward(cls, shape: Sequence[int]) -> Slice:
        """Return the slice that has all rows of a shape, from the last to the first."""
        inner = [0] * (len(shape) - 1)
        return cls((shape[0] - 1, *inner), tuple(shape), (-1, *(1 for _ in inner)))

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        require(
            len(self.starts) == len(self.sizes) == len(self.steps) == x.rank,
            f"starts, sizes and steps need {x.rank} entries each",
        )
        for start, size, step, dim in zip(self.starts, self.sizes, self.steps, x.shape, strict=True):
            require(step != 0 and size >= 0, f"size {size}, step {step}")
            last = start + (size - 1) * step
            require(size == 0 or (0 <= start < dim and 0 <= last < dim), f"elements {start}..{last} of a dim of {dim}")
        return (TensorType(self.sizes, x.dtype, x.order),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        return (operands[0][tuple(map(_range, self.starts, self.sizes, self.steps))],)


def _range(start: int, size: int, step: int) -> slice[int, int | None, int]:
    stop = start + size * step
    return slice(start, stop if stop >= 0 else None, step) if size else slice(0, 0, 1)


@dataclass(frozen=True)
class Pad(Op):
    """Add `pads` (all the starts, then all the ends) elements: constant `value`, reflect, edge or wrap."""

    pads: tuple[int, ...]
    mode: str = "constant"
    value: float = 0.0
    name: ClassVar[str] = "pad"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        n = x.rank
        require(self.mode in ("constant", "reflect", "edge", "wrap"), f"pad knows no mode {self.mode!r}")
        require(len(self.pads) == 2 * n, f"pads needs {2 * n} entries, not {len(self.pads)}")
        require(all(p >= 0 for p in self.pads), f"negative pads {list(self.pads)}: slice instead")
        require(fills(x.dtype, self.value), f"{x.dtype.value} does not hold the value {self.value}")
        for p0, p1, dim in zip(self.pads[:n], self.pads[n:], x.shape, strict=True):
            padded = self.mode != "constant" and (p0 or p1)
            require(not (padded and dim == 0), f"{self.mode} padding of an empty dim")
            require(self.mode != "reflect" or max(p0, p1) < max(dim, 1), f"reflecting {max(p0, p1)} of a dim of {dim}")
        shape = tuple(d + p0 + p1 for d, p0, p1 in zip(x.shape, self.pads[:n], self.pads[n:], strict=True))
        return (TensorType(shape, x.dtype, x.order),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        x = operands[0]
        if x.ndim == 0:  # NumPy refuses an empty list of widths
            return (x,)
        widths = list(zip(self.pads[: x.ndim], self.pads[x.ndim :], strict=True))
        if self.mode == "constant":
            with np.errstate(all="ignore"):
                return (xp.pad(x, widths, constant_values=x.dtype.type(self.value)),)
        return (xp.pad(x, widths, mode=self.mode),)


@dataclass(frozen=True)
class Dilate(Op):
    """Put zeros between elements: element i of dim d becomes element i * steps[d] of a result of shape `sizes`."""

    steps: tuple[int, ...]
    sizes: tuple[int, ...]
    name: ClassVar[str] = "dilate"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        require(len(self.steps) == len(self.sizes) == x.rank, f"steps and sizes need {x.rank} entries each")
        for dim, step, size in zip(x.shape, self.steps, self.sizes, strict=True):
            require(step >= 1, f"steps {list(self.steps)}: each is at least 1")
            last = (dim - 1) * step
            require(dim == 0 or last < size, f"element {last} of a dim of {size}")
        return (TensorType(self.sizes, x.dtype, x.order),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        (x,) = operands
        y = xp.zeros(self.sizes, x.dtype)
        y[tuple(_range(0, dim, step) for dim, step in zip(x.shape, self.steps, strict=True))] = x
        return (y,)


def fills(dtype: DType, value: float) -> bool:
    """Tell if a pad of tensors of this type may have this value. Narrow integers are padded with zeros only."""
    if dtype.is_float:
        return True
    if dtype is DType.BOOL:
        return value in (0, 1)
    if dtype.is_narrow:
        return value == 0
    return value.is_integer() and int(np.iinfo(dtype.numpy).min) <= value <= int(np.iinfo(dtype.numpy).max)


@dataclass(frozen=True)
class Gather(Op):
    """Rows of x along `axis` picked by an integer tensor; negative indices count from the end."""

    axis: int = 0
    name: ClassVar[str] = "gather"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 2)
        x, indices = operands
        axis = normalize_axis(self.axis, x.rank)
        require(indices.dtype.is_int, f"indices are {indices.dtype.value}, not integers")
        require(x.shape[axis] > 0 or indices.size == 0, "gather from an empty dim")
        return (TensorType((*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]), x.dtype),)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        x, indices = operands
        size, indices = x.shape[self.axis], indices.astype(xp.int64)
        return (xp.take(x, xp.where(indices < 0, indices + size, indices), axis=self.axis),)


def on_ties(xp: Any, at: Array) -> Array:
    """Move coordinates that are a rounding error away from a multiple of 1/2 onto it.

    A scale such as 0.6 is rounded to 32 bits in a model: element 3 / 0.6 is element 5, not just below it.
    """
    tie = xp.round(2 * at) / 2
    return xp.where(xp.abs(at - tie) <= 4e-7 * xp.maximum(1.0, xp.abs(at)), tie, at)


@dataclass(frozen=True)
class Resize(Op):
    """Interpolate to shape `sizes`: mode nearest or linear (separable over the resized dims).

    `scales` map output to input coordinates (one per dim; output size / input size if the model gave
    sizes). `coordinates` and `rounding` take ONNX's values of coordinate_transformation_mode and
    nearest_mode (https://onnx.ai/onnx/operators/onnx__Resize.html).
    """

    sizes: tuple[int, ...]
    scales: tuple[float, ...]
    mode: str = "nearest"
    coordinates: str = "half_pixel"
    rounding: str = "round_prefer_floor"
    name: ClassVar[str] = "resize"

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        require_arity(self.name, operands, 1)
        x = operands[0]
        require(len(self.sizes) == len(self.scales) == x.rank, f"sizes and scales need {x.rank} entries each")
        require(all(s >= 1 for s in self.sizes) and x.size > 0, f"resize {list(x.shape)} to {list(self.sizes)}")
        require(all(s > 0 and math.isfinite(s) for s in self.scales), f"scales {list(self.scales)}")
        for n, scale, size in zip(x.shape, self.scales, self.sizes, strict=True):  # rounded up, down or to nearest
            require(abs(n * scale - size) < 1.0, f"{n} scaled by {scale} is not {size}")
        require(self.mode in ("nearest", "linear"), f"resize knows no mode {self.mode!r}")
        require(self.mode == "nearest" or x.dtype.is_float, f"linear resize of {x.dtype.value}")
        require(
            self.coordinates
            in ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
            f"resize knows no coordinate transformation {self.coordinates!r}",
        )
        require(
            self.rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"),
            f"resize knows no rounding {self.rounding!r}",
        )
        return (TensorType(self.sizes, x.dtype, x.order),)

    def positions(self, xp: Any, dim: int, size: int) -> Array:
        """Return for each output index along a dim of input size `size` the input coordinate, a float64."""
        count, scale = self.sizes[dim], self.scales[dim]
        i = xp.arange(count, dtype=xp.float64)
        if self.coordinates == "asymmetric":
            return i / scale
        if self.coordinates == "align_corners":
            return i * ((size - 1) / (count - 1)) if count > 1 else i * 0.0
        if self.coordinates == "pytorch_half_pixel" and count == 1:
            return i * 0.0
        shift = 0.0
        if self.coordinates == "half_pixel_symmetric":
            shift = (size - count / scale) / 2  # size/2 * (1 - count/(scale*size)), with fewer roundings
        return shift + (i + 0.5) / scale - 0.5

    def nearest(self, xp: Any, dim: int, size: int) -> Array:
        """Return for each output index along `dim` the input index that it copies."""
        at = on_ties(xp, self.positions(xp, dim, size))
        if self.rounding == "floor":
            index = xp.floor(at)
        elif self.rounding == "ceil":
            index = xp.ceil(at)
        elif self.rounding == "round_prefer_floor":
            index = xp.ceil(at - 0.5)
        else:
            index = xp.floor(at + 0.5)
        return xp.clip(index, 0, size - 1).astype(xp.int64)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        resized = [d for d, n in enumerate(operands[0].shape) if self.sizes[d] != n or self.scales[d] != 1.0]
        if self.mode == "nearest":
            result = operands[0]
            for dim in resized:
                result = xp.take(result, self.nearest(xp, dim, result.shape[dim]), axis=dim)
            return (result,)

        def interpolate(x: Array) -> Array:
            for dim in resized:
                size = x.shape[dim]
                at = xp.clip(self.positions(xp, dim, size), 0, size - 1)
                low = xp.floor(at).astype(xp.int64)
                high = xp.minimum(low + 1, size - 1)
                weight = (at - low).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
                below, above = (1 - weight).astype(x.dtype), weight.astype(x.dtype)
                x = xp.take(x, low, axis=dim) * below + xp.take(x, high, axis=dim) * above
            return x

        return (widened(interpolate, operands[0]),)
