"""Import ops whose result is known at import: Constant, ConstantOfShape, Shape, Size, Range."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from fusec.errors import VerifyError
from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.frontends.onnx.model_file.limits import by_blocks, require_constant
from fusec.frontends.onnx.model_file.tensors import shape_of
from fusec.ir import Array, DType, Literal, TensorType, Value
from fusec.ops.spec import require


def constant(
    g: Emitter,
    /,
    *,
    value: Literal | None = None,
    sparse_value: Literal | None = None,
    value_float: float | None = None,
    value_floats: Sequence[float] | None = None,
    value_int: int | None = None,
    value_ints: Sequence[int] | None = None,
    value_string: str | None = None,
    value_strings: Sequence[str] | None = None,
) -> Value:
    literals = [v for v in (value, sparse_value) if v is not None]
    floats = [v for v in (value_float, value_floats) if v is not None]
    ints = [v for v in (value_int, value_ints) if v is not None]
    strings = [v for v in (value_string, value_strings) if v is not None]
    require(len(literals) + len(floats) + len(ints) + len(strings) == 1, "needs exactly one value")
    if literals:
        return g.literal(literals[0])
    if strings:
        return g.constant(np.array(strings[0], object))
    return g.constant(np.array(floats[0], np.float32) if floats else np.array(ints[0], np.int64))


def constant_of_shape(g: Emitter, shape: Value, /, *, value: Literal | None = None) -> Value:
    element = np.zeros((), np.float32) if value is None else value.array
    require(element.size == 1, f"value must be one element, not of shape {list(element.shape)}")
    return g.full(TensorType(shape_of(g.ints(shape, "the shape")), DType.of(element.dtype)), element)


def shape(g: Emitter, x: Value, /, *, end: int | None = None, start: int = 0) -> Value:
    return g.constant(np.array(x.type.shape[start:end], np.int64))


def size(g: Emitter, x: Value, /) -> Value:
    return g.constant(np.array(x.type.size, np.int64))


def range_(g: Emitter, start: Value, limit: Value, delta: Value, /, *, stash_type: int = 1) -> Value:
    """Import Range: start, start + delta, … up to but not including limit."""
    dtype = start.type.dtype
    for operand in (limit, delta):
        require(operand.type.dtype is dtype, f"operands differ in dtype: {dtype.value}, {operand.type.dtype.value}")
    bounds = (start, limit, delta)
    for name, operand in zip(("start", "limit", "delta"), bounds, strict=True):
        require(operand.type.size == 1, f"{name} must be one number, not of shape {list(operand.type.shape)}")
    if any(operand.literal is None for operand in bounds):
        return g.on_host("start, limit and delta", lambda arrays: (_counted(arrays, dtype),), *bounds)[0]
    count, at = _count_up([g.number(operand, "a bound") for operand in bounds], dtype)
    return g.indexed((count,), at, dtype)


def _counted(bounds: Sequence[Array], dtype: DType) -> Array:
    """Return the numbers of Range as an array."""
    count, at = _count_up([array.reshape(-1)[0].item() for array in bounds], dtype)
    type = TensorType((count,), dtype)
    require_constant(type, "the result of Range,")
    return by_blocks(type, at)


def _count_up(bounds: Sequence[float], dtype: DType) -> tuple[int, Callable[[Array], Array]]:
    """Return how many numbers Range has, and a function from their indices to the numbers."""
    first, last, step = bounds
    require(step != 0, "delta is 0")
    require(all(math.isfinite(v) for v in bounds), f"from {first} to {last} by {step}")
    count = max(0, math.ceil((last - first) / step) if dtype.is_float else -((first - last) // step))
    wide = np.float64 if dtype.is_float else np.int64
    try:
        begin, by = wide(first), wide(step)
    except OverflowError as error:
        raise VerifyError(f"from {first} to {last} by {step}: {error}") from error
    return int(count), lambda i: begin + i * by


TABLE: Table = {
    ("Constant", 1): constant,
    ("ConstantOfShape", 9): constant_of_shape,
    ("Shape", 1): shape,
    ("Size", 1): size,
    ("Range", 11): range_,
}
