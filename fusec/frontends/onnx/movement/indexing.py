"""Import Concat, Split, Slice, Pad and Gather."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.frontends.onnx.emit import Emitter, Table, axes_of
from fusec.ir import Value
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
    first = g.ints(starts, "starts")
    return _slice(
        g,
        x,
        first,
        g.ints(ends, "ends"),
        range(len(first)) if axes is None else g.ints(axes, "axes"),
        [1] * len(first) if steps is None else g.ints(steps, "steps"),
    )


def _slice(
    g: Emitter, x: Value, starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> Value:
    """Clamp bounds out of range as Python's slices do, except that a start before index 0 is 0 for negative steps."""
    shape = x.type.shape
    require(
        len(starts) == len(ends) == len(axes) == len(steps),
        f"{len(starts)} starts, {len(ends)} ends, {len(axes)} axes, {len(steps)} steps",
    )
    axes_of(axes, len(shape))
    begin, size, by = [0] * len(shape), list(shape), [1] * len(shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        require(step != 0, "a step is 0")
        if step < 0:
            start = max(start, -shape[axis])
        taken = range(*slice(start, end, step).indices(shape[axis]))
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
