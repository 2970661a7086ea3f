"""Import Concat, Split, Slice, Pad and Gather."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table, axes_of
from fusec.ir import Array, Value
from fusec.ops import Concat, Gather, Pad, Slice, Split
from fusec.ops.spec import normalize_axis, require


def concat(g: Emitter, /, *operands: Value, axis: int) -> Value:
    axis = normalize_axis(axis, operands[0].type.rank)
    return operands[0] if len(operands) == 1 else g(Concat(axis), *operands)


def split_2(g: Emitter, x: Value, /, *, axis: int = 0, split: Sequence[int] = ()) -> tuple[Value, ...]:
    return _split(g, x, axis, split, even=True)


def split_13(g: Emitter, x: Value, sizes: Value | None = None, /, *, axis: int = 0) -> tuple[Value, ...]:
    return _split(g, x, axis, () if sizes is None else g.ints(sizes, "split"), even=True)


def split(
    g: Emitter, x: Value, sizes: Value | None = None, /, *, axis: int = 0, num_outputs: int = 0
) -> tuple[Value, ...]:
    require(num_outputs in (0, g.outputs), f"num_outputs is {num_outputs}, the node has {g.outputs} outputs")
    require(sizes is None or num_outputs == 0, "both split and num_outputs")
    return _split(g, x, axis, () if sizes is None else g.ints(sizes, "split"), even=False)


def _split(g: Emitter, x: Value, axis: int, sizes: Sequence[int], *, even: bool) -> tuple[Value, ...]:
    """Split x into one part for each output of the node.

    sizes: empty for equal parts.
    even: the last part may not be smaller, as in versions before 18.
    """
    axis = normalize_axis(axis, x.type.rank)
    dim = x.type.shape[axis]
    if not sizes:
        part = -(-dim // g.outputs)
        last = dim - part * (g.outputs - 1)
        require(last == part or not even, f"{dim} of axis {axis} does not divide into {g.outputs} equal parts")
        require(last >= 0, f"{dim} of axis {axis} does not divide into {g.outputs} parts")
        sizes = (*([part] * (g.outputs - 1)), last)
    require(len(sizes) == g.outputs, f"{len(sizes)} sizes, but the node has {g.outputs} outputs")
    return (x,) if len(sizes) == 1 and sizes[0] == dim else g.many(Split(axis, tuple(sizes)), x)


def slice_1(g: Emitter, x: Value, /, *, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int] = ()) -> Value:
    return _slice(g, x, starts, ends, axes or range(len(starts)), [1] * len(starts))


def slice_10(
    g: Emitter, x: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None, /
) -> Value:
    count = _length(starts, "starts")
    along = range(count) if axes is None else g.ints(axes, "axes")
    if any(v is not None and v.literal is None for v in (starts, ends, steps)):
        return _sliced_by_index(g, x, along, (starts, ends, *(() if steps is None else (steps,))))
    by = [1] * count if steps is None else g.ints(steps, "steps")
    return _slice(g, x, g.ints(starts, "starts"), g.ints(ends, "ends"), along, by)


def _length(value: Value, what: str) -> int:
    require(value.type.dtype.is_int, f"{what} must be integers, not {value.type.dtype.value}")
    require(value.type.rank <= 1, f"{what} must be a list, not of shape {list(value.type.shape)}")
    return value.type.size


def _sliced_by_index(g: Emitter, x: Value, axes: Sequence[int], bounds: Sequence[Value]) -> Value:
    """Slice by bounds that are computed: the host makes the indices of each dim, and the device gathers them.

    bounds: starts, ends and, if given, steps. Another start of the same length is no other program then.
    """
    count = len(axes)
    for value, what in zip(bounds, ("starts", "ends", "steps"), strict=False):
        require(_length(value, what) == count, f"{value.type.size} {what} for {count} axes")
    axes = tuple(axis % x.type.rank for axis in axes) if axes_of(axes, x.type.rank) else ()
    sizes = [x.type.shape[axis] for axis in axes]

    def compute(arrays: Sequence[Array]) -> list[Array]:
        starts, ends, *steps = ([int(i) for i in array.reshape(-1)] for array in arrays)
        by = steps[0] if steps else [1] * count
        taken = map(_taken, starts, ends, by, sizes)
        return [np.arange(t.start, t.stop, t.step, dtype=np.int64) for t in taken]

    for axis, indices in zip(axes, g.on_host("the bounds of the slice", compute, *bounds), strict=True):
        x = g(Gather(axis), x, indices)
    return x


def _taken(start: int, end: int, step: int, size: int) -> range:
    """Clamp bounds out of range as Python's slices do, except that a start before index 0 is 0 for negative steps."""
    require(step != 0, "a step is 0")
    return range(*slice(max(start, -size) if step < 0 else start, end, step).indices(size))


def _slice(
    g: Emitter, x: Value, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Value:
    shape = x.type.shape
    require(
        len(starts) == len(ends) == len(axes) == len(steps),
        f"{len(starts)} starts, {len(ends)} ends, {len(axes)} axes, {len(steps)} steps",
    )
    axes_of(axes, len(shape))
    begin, size, by = [0] * len(shape), list(shape), [1] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        taken = _taken(start, end, step, shape[axis])
        begin[axis], size[axis], by[axis] = (taken.start if taken else 0), len(taken), step
    if tuple(size) == shape and all(step > 0 for step in by):
        return x
    return g(Slice(tuple(begin), tuple(size), tuple(by)), x)


def pad_2(g: Emitter, x: Value, /, *, pads: Sequence[int], mode: str = "constant", value: float = 0.0) -> Value:
    return _pad(g, x, pads, range(x.type.rank), mode, value)


def pad(
    g: Emitter,
    x: Value,
    pads: Value,
    fill: Value | None = None,
    axes: Value | None = None,
    /,
    *,
    mode: str = "constant",
) -> Value:
    amounts = g.ints(pads, "pads")
    along = range(x.type.rank) if axes is None else g.ints(axes, "axes")
    return _pad(g, x, amounts, along, mode, 0.0 if fill is None or mode != "constant" else g.number(fill, "the fill"))


def _pad(g: Emitter, x: Value, pads: Sequence[int], axes: Sequence[int], mode: str, value: float) -> Value:
    """Remove elements for negative pads first, then add padding for the others."""
    rank = x.type.rank
    require(len(pads) == 2 * len(axes), f"{len(pads)} pads for {len(axes)} axes")
    axes_of(axes, rank)
    starts, ends = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        starts[axis], ends[axis] = pads[i], pads[i + len(axes)]
    if any(p < 0 for p in pads):
        sizes = tuple(d + min(s, 0) + min(e, 0) for d, s, e in zip(x.type.shape, starts, ends, strict=True))
        require(all(s >= 0 for s in sizes), f"pads {list(pads)} remove more than x of shape {list(x.type.shape)} has")
        x = g(Slice(tuple(max(-s, 0) if d else 0 for s, d in zip(starts, sizes, strict=True)), sizes, (1,) * rank), x)
        starts, ends = [max(s, 0) for s in starts], [max(e, 0) for e in ends]
    if not any(starts) and not any(ends):
        return x
    return g(Pad((*starts, *ends), mode, float(value)), x)


def gather(g: Emitter, x: Value, indices: Value, /, *, axis: int = 0) -> Value:
    return g(Gather(normalize_axis(axis, x.type.rank)), x, indices)


TABLE: Table = {
    ("Concat", 4): concat,
    ("Split", 2): split_2,
    ("Split", 13): split_13,
    ("Split", 18): split,
    ("Slice", 1): slice_1,
    ("Slice", 10): slice_10,
    ("Pad", 2): pad_2,
    ("Pad", 11): pad,
    ("Gather", 1): gather,
}
