"""Differentiate ops that gather, scatter, sort or move elements, and running sums, products and recurrences."""

from __future__ import annotations

import numpy as np

from fusec.builder import Tensor
from fusec.gradients.core import BackwardStep, Gradients, Rule, zeros
from fusec.ops import Cumulate, Gather, LinearScan, Pad, Resize, Scatter, Slice


def moveaxis(x: Tensor, source: int, target: int) -> Tensor:
    """Move one dim to another place, as np.moveaxis does."""
    order = [i for i in range(x.rank) if i != source % x.rank]
    order.insert(target % x.rank, source % x.rank)
    return x.transpose(order)


def sliced(x: Tensor, axis: int, piece: slice) -> Tensor:
    """Slice one dim, which is not counted from the end."""
    return x[(slice(None),) * axis + (piece,)]


def reversed_along(x: Tensor, axis: int) -> Tensor:
    return sliced(x, axis, slice(None, None, -1))


def running(x: Tensor, kind: str, axis: int = -1, backwards: bool = False) -> Tensor:
    """Compute a running sum or product along an axis; `backwards` starts at the last element."""
    axis %= x.rank
    if backwards:
        return reversed_along(running(reversed_along(x, axis), kind, axis), axis)
    return x.builder.apply(Cumulate(kind, axis), x)


def add_along(dy: Tensor, indices: Tensor, axis: int, size: int) -> Tensor:
    """Add slices of dy along an axis to a tensor of zeros, at `indices` of a dim of `size`."""
    rows = moveaxis(dy, axis, 0)
    added = dy.builder.apply(Scatter("add"), zeros(dy, (size, *rows.shape[1:])), indices, rows)
    return moveaxis(added, 0, axis)


def _gather(step: BackwardStep) -> Gradients:
    op, (x, indices), dy = step.op, step.x, step.dy
    axis = op.axis % x.rank
    flat = dy.reshape(*x.shape[:axis], indices.size, *x.shape[axis + 1 :])
    return add_along(flat, indices.reshape(indices.size), axis, x.shape[axis]), None


def _scatter(step: BackwardStep) -> Gradients:
    op, (x, indices, updates), dy, y = step.op, step.x, step.dy, step.y[0]
    b = step.b

    def picked(t: Tensor) -> Tensor:
        return b.apply(Gather(0), t, indices)

    match op.reduction:
        case "none":
            return b.apply(Scatter("none"), dy, indices, zeros(updates)), None, picked(dy)
        case "add":
            return dy, None, picked(dy)
        case "mul":
            ones, nothing = (b.constant(v, x.dtype).expand(x.shape) for v in (1.0, 0.0))
            zero = updates.eq(0.0)
            factor = b.apply(Scatter("mul"), ones, indices, updates)
            # the product of the other updates of the same row: without zeros, and how many of those there are
            rest = picked(b.apply(Scatter("mul"), ones, indices, b.where(zero, 1.0, updates)))
            count = picked(b.apply(Scatter("add"), nothing, indices, zero.astype(x.dtype)))
            others = rest / b.where(zero, 1.0, updates)
            alone = b.where(zero, count.eq(1.0), count.eq(0.0))
            return dy * factor, None, picked(dy * x) * b.where(alone, others, 0.0)
        case _:
            return b.where(x.eq(y), dy, 0.0), None, b.where(updates.eq(picked(y)), picked(dy), 0.0)


def _top_k(step: BackwardStep) -> Gradients:
    """Add the gradient of each value at the index that the value came from."""
    op, x, dy = step.op, step.x[0], step.dys[0]
    if dy is None:
        return None
    axis = op.axis % x.rank
    axis_last = moveaxis(dy, axis, -1)
    places = moveaxis(step.y[1], axis, -1).reshape(-1, op.k)
    rows, size = places.shape[0], x.shape[axis]
    flat = (places + np.arange(rows, dtype=np.int64)[:, None] * size).reshape(-1)
    added = step.b.apply(Scatter("add"), zeros(x, (rows * size,)), flat, axis_last.reshape(-1))
    return moveaxis(added.reshape(*axis_last.shape[:-1], size), -1, axis)


def _cumulate(step: BackwardStep) -> Gradients:
    """Differentiate a running sum or product.

    For a sum: the running sum of dy from the end. For a product: a sum over all pairs, because dividing by x would
    fail for zeros.
    """
    op, x, dy = step.op, step.x[0], step.dy
    axis = op.axis % x.rank
    if op.kind == "sum":
        return running(dy, "sum", axis, backwards=True)
    size = x.shape[axis]
    rows, loss = moveaxis(x, axis, -1), moveaxis(dy, axis, -1)
    # [..., i, j]: x_j, but 1 for j = i; its running product over j is the slope of y_j by x_i for j >= i
    others = step.b.where(step.b.constant(np.eye(size, dtype=np.bool_)), 1.0, rows[..., None, :])
    slopes = step.b.where(step.b.constant(np.triu(np.ones((size, size), np.bool_))), running(others, "prod"), 0.0)
    return moveaxis((slopes * loss[..., None, :]).sum(-1), -1, axis)


def _linear_scan(step: BackwardStep) -> Gradients:
    """Differentiate a linear recurrence: its gradient is the same recurrence, from the end.

    The gradient of h_t is g_t = dy_t + a_{t+1} g_{t+1}. Then b_t has g_t, and a_t has g_t h_{t-1}.
    """
    (a, _), y, dy = step.x, step.y[0], step.dy
    axis, size = step.op.axis % a.rank, a.shape[step.op.axis]
    if not a.size:
        return zeros(a), dy
    first = zeros(a, (*a.shape[:axis], 1, *a.shape[axis + 1 :]))
    after = step.b.concat([sliced(a, axis, slice(1, size)), first], axis)
    before = step.b.concat([first, sliced(y, axis, slice(0, size - 1))], axis)
    found = step.b.apply(LinearScan(axis), reversed_along(after, axis), reversed_along(dy, axis))
    g = reversed_along(found, axis)
    return g * before, g


# moves -----------------------------------------------------------------------------------------------


def _slice(step: BackwardStep) -> Gradients:
    op, x, dy = step.op, step.x[0], step.dy
    if dy.size == 0:
        return zeros(x)
    starts, ends = list[int](), list[int]()
    for axis, (start, size, step_size, dim) in enumerate(zip(op.starts, op.sizes, op.steps, x.shape, strict=True)):
        first = start
        if step_size < 0:
            dy, first = reversed_along(dy, axis), start + (size - 1) * step_size
        gap = abs(step_size)
        if gap > 1 and size > 1:  # zeros between the elements
            spread = [0] * (dy.rank + 1) * 2
            spread[dy.rank + 1 + axis + 1] = gap - 1
            opened = dy.reshape(*dy.shape[: axis + 1], 1, *dy.shape[axis + 1 :])
            padded = step.b.apply(Pad(tuple(spread)), opened)
            dy = padded.reshape(*dy.shape[:axis], size * gap, *dy.shape[axis + 1 :])
            dy = sliced(dy, axis, slice((size - 1) * gap + 1))
        starts.append(first)
        ends.append(dim - first - dy.shape[axis])
    return step.b.apply(Pad((*starts, *ends)), dy) if any((*starts, *ends)) else dy


def _pad(step: BackwardStep) -> Gradients:
    op, x, dy = step.op, step.x[0], step.dy
    for axis in range(x.rank):
        p0, p1, size = op.pads[axis], op.pads[axis + x.rank], x.shape[axis]
        if not (p0 or p1):
            continue
        if op.mode == "constant":
            dy = sliced(dy, axis, slice(p0, p0 + size))
        else:  # `source` is the index that each padded element copies
            source = np.pad(np.arange(size), (p0, p1), mode=op.mode)
            dy = add_along(dy, step.b.constant(source), axis, size)
    return dy


def _resize(step: BackwardStep) -> Gradients:
    """Differentiate a resize dim by dim.

    Nearest: add the gradient to the element that was copied. Linear: multiply by the interpolation weights.
    """
    op, x, dy = step.op, step.x[0], step.dy
    assert isinstance(op, Resize)
    for axis, size in enumerate(x.shape):
        if op.sizes[axis] == size and op.scales[axis] == 1.0:
            continue
        if op.mode == "nearest":
            dy = add_along(dy, step.b.constant(op.nearest(np, axis, size)), axis, size)
            continue
        at = np.clip(op.positions(np, axis, size), 0, size - 1)
        low = np.floor(at).astype(np.int64)
        weights, rows = np.zeros((len(at), size)), np.arange(len(at))
        np.add.at(weights, (rows, low), 1 - (at - low))
        np.add.at(weights, (rows, np.minimum(low + 1, size - 1)), at - low)
        axis_last = moveaxis(dy, axis, -1)
        weighted = axis_last.reshape(-1, len(at)) @ step.b.constant(weights, x.dtype)
        dy = moveaxis(weighted.reshape(*axis_last.shape[:-1], size), -1, axis)
    return dy


def _dilate(step: BackwardStep) -> Gradients:
    x = step.x[0]
    return step.b.apply(Slice((0,) * x.rank, x.shape, step.op.steps), step.dy)


def _concat(step: BackwardStep) -> Gradients:
    axis, at = step.op.axis % step.x[0].rank, 0
    parts: list[Tensor] = []
    for x in step.x:
        parts.append(sliced(step.dy, axis, slice(at, at + x.shape[axis])))
        at += x.shape[axis]
    return parts


def _split(step: BackwardStep) -> Gradients:
    parts = [zeros(y) if dy is None else dy for y, dy in zip(step.y, step.dys, strict=True)]
    return step.b.concat(parts, step.op.axis)


def _transpose(step: BackwardStep) -> Gradients:
    return step.dy.transpose([step.op.perm.index(i) for i in range(step.dy.rank)])


RULES: dict[str, Rule] = {
    "gather": _gather,
    "scatter": _scatter,
    "top_k": _top_k,
    "cumulate": _cumulate,
    "linear_scan": _linear_scan,
    "slice": _slice,
    "pad": _pad,
    "dilate": _dilate,
    "resize": _resize,
    "concat": _concat,
    "split": _split,
    "transpose": _transpose,
    "reshape": lambda s: s.dy.reshape(s.x[0].shape),
    "expand": lambda s: s.dy,  # `core.fitted` sums it to the operand's shape
    "relayout": lambda s: s.dy,
}

STOPS: dict[str, str] = {
    "random_bits": "its results are not floating-point numbers",
    "all_finite": "its result is not a floating-point number",
    "non_max_suppression": "its results are not floating-point numbers",
}
