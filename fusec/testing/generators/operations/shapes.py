"""Draw ops that move elements."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.ir import DType, TensorType, Value
from fusec.ops import (
    Concat,
    Dilate,
    Expand,
    Gather,
    GridSample,
    Pad,
    Relayout,
    Reshape,
    Resize,
    RoiAlign,
    RoiPool,
    Scatter,
    Slice,
    Split,
    Transpose,
)
from fusec.testing.generators.graph_builder import RandomGraph


def reshaped(b: RandomGraph, x: Value) -> Value:
    """Draw a reshape: merge two dims, split one, add or remove a dim of size 1, or flatten."""
    shape = x.type.shape
    options: list[tuple[int, ...]] = [(*shape, 1), (1, *shape), (math.prod(shape),)]
    options += [(*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :]) for i in range(len(shape) - 1)]
    options += [(*shape[:i], 2, d // 2, *shape[i + 1 :]) for i, d in enumerate(shape) if d and d % 2 == 0]
    options += [tuple(d for d in shape if d != 1)] if 1 in shape else []
    if len(shape) > 2:
        options.append((shape[0], math.prod(shape[1:])))
    return b.add(Reshape(b.pick(options)), x)


def reshape(b: RandomGraph) -> None:
    reshaped(b, b.some())


def transposed(b: RandomGraph, x: Value) -> Value:
    """Draw a transpose: to channels last or back, of the last two dims, or any other."""
    rank = x.type.rank
    common = [(0, *range(2, rank), 1), (0, rank - 1, *range(1, rank - 1)), (*range(rank - 2), rank - 1, rank - 2)]
    return b.add(Transpose(b.pick(common) if rank >= 3 and b.chance(60) else b.permutation(rank)), x)


def transpose(b: RandomGraph) -> None:
    transposed(b, b.some())


def relayout(b: RandomGraph) -> None:
    x = b.some(lambda t: t.rank >= 2)
    b.add(Relayout(b.permutation(x.type.rank)), x)


def expand(b: RandomGraph) -> None:
    x = b.some()
    wide = tuple(b.pick([2, 3, 1]) if d == 1 else d for d in x.type.shape)
    b.add(Expand((b.pick([2, 1]), *wide) if b.chance(30) else wide), x)


def concat(b: RandomGraph) -> None:
    x = b.some(lambda t: t.rank >= 1)
    axis = b.below(x.type.rank)
    others: list[Value] = []
    for _ in range(b.pick([1, 1, 2, 0])):
        size = b.pick([x.type.shape[axis], 1, 2])
        shape = (*x.type.shape[:axis], size, *x.type.shape[axis + 1 :])
        found = [v for v in b.values if v.type.same_value_type(TensorType(shape, x.type.dtype))]
        others.append(b.pick(found) if found and not b.chance(30) else b.fresh(TensorType(shape, x.type.dtype)))
    operands = [x, *others]
    b.insert(Concat(axis - x.type.rank if b.chance(20) else axis), *(operands[::-1] if b.chance(30) else operands))


def split(b: RandomGraph) -> None:
    x = b.some(lambda t: t.rank >= 1)
    axis = b.below(x.type.rank)
    size = x.type.shape[axis]
    first = b.below(size + 1)
    sizes = [first, size - first]
    if sizes[1] > 1 and b.chance(30):
        sizes = [first, 1, sizes[1] - 1]
    if 0 in sizes and not b.chance(5):
        sizes = [s for s in sizes if s] or [0]
    b.insert(Split(axis, tuple(sizes)), x)


def slice_(b: RandomGraph) -> None:
    x = b.some(lambda t: t.rank >= 1)
    starts, sizes, steps = list[int](), list[int](), list[int]()
    for dim in x.type.shape:
        step = b.pick([1, 2, -1]) if b.chance(25) else 1
        if dim == 0 or b.chance(50):
            start, size, step = 0, dim, 1
        else:
            start = b.below(dim)
            room = (dim - 1 - start) // step if step > 0 else start // -step
            size = 1 + b.below(room + 1)
        starts.append(start)
        sizes.append(size)
        steps.append(step)
    b.add(Slice(tuple(starts), tuple(sizes), tuple(steps)), x)


def pad(b: RandomGraph) -> None:
    x = b.some()
    mode = b.pick(["constant", "constant", "constant", "edge", "reflect", "wrap"])
    most = [2 if mode != "reflect" else min(2, d - 1) for d in x.type.shape]
    only_space = x.type.rank >= 3 and b.chance(70)
    pads = [
        0 if (only_space and dim % x.type.rank < 2) or not b.chance(70) else b.below(max(m, 0) + 1)
        for dim, m in enumerate(most * 2)
    ]
    value = b.pick([0.0, 1.0, -0.5, -math.inf]) if x.type.dtype.is_float and b.chance(30) else 0.0
    b.add(Pad(tuple(pads), mode, value if mode == "constant" else 0.0), x)


def dilate(b: RandomGraph) -> None:
    x = b.some(lambda t: t.size <= 4096)
    only_space = x.type.rank >= 3 and b.chance(70)
    steps = [1 if only_space and dim < 2 else b.between(1, 3) for dim in range(x.type.rank)]
    sizes = [(d - 1) * step + 1 + b.below(step) if d else 0 for d, step in zip(x.type.shape, steps, strict=True)]
    b.add(Dilate(tuple(steps), tuple(sizes)), x)


def gather(b: RandomGraph) -> None:
    x = b.some(lambda t: t.rank >= 1 and t.size > 0)
    axis = b.below(x.type.rank)
    shape = b.pick([(3,), (), (2, 2), (1,), ()])
    dtype = b.pick([DType.I64, DType.I32])
    if b.chance(40):
        indices = b.input(TensorType(shape, dtype)) if len(b.graph.inputs) < 6 else None
        if indices is not None:
            b.values.pop()  # no other op may read the indices, because they have to stay in range
            b.add(Gather(axis), x, indices)
            return
    size = x.type.shape[axis]
    numbers = [b.between(-size, size - 1) for _ in range(math.prod(shape))]
    b.add(
        Gather(axis - x.type.rank if b.chance(20) else axis),
        x,
        b.graph.constant(np.array(numbers, dtype.numpy).reshape(shape)),
    )


def scatter(b: RandomGraph) -> None:
    """Draw a scatter. Without a reduction no index occurs twice, because the result would be undefined."""
    x = b.some(lambda t: t.rank >= 1 and t.size > 0 and t.dtype is not DType.BOOL)
    reduction = b.pick(["none", "add", "mul", "max", "min"])
    rows, count = x.type.shape[0], b.between(1, 4)
    if reduction == "none":
        places = list(b.permutation(rows))[:count]
    else:
        places = [b.below(rows) for _ in range(count)]
    at = [p - rows if b.chance(20) else p for p in places]
    indices = b.graph.constant(np.array(at, b.pick([DType.I64, DType.I32]).numpy))
    b.add(Scatter(reduction), x, indices, b.fresh(TensorType((len(at), *x.type.shape[1:]), x.type.dtype)))


def grid_sample(b: RandomGraph) -> None:
    """Draw a grid_sample at known places, which rounding to 16 bits leaves where they are, and off every tie."""
    x = b.some(lambda t: 3 <= t.rank <= 5 and t.size > 0 and t.dtype.is_float and t.size <= 4096)
    n = x.type.rank - 2
    coordinates = b.pick(["edges", "centres", "pixels"])
    places = [b.between(1, 3) for _ in range(n)]
    numbers = [2 * b.between(-20, 20) + 1 for _ in range(x.type.shape[0] * math.prod(places) * n)]
    unit = 8 if coordinates == "pixels" else 32
    grid = (np.array(numbers) / unit).astype(x.type.dtype.numpy).reshape(x.type.shape[0], *places, n)
    op = GridSample(b.pick(["nearest", "linear", "cubic"]), b.pick(["zeros", "border", "reflection"]), coordinates)
    b.add(op, x, b.graph.constant(grid))


def roi_align(b: RandomGraph) -> None:
    """Draw a roi_align of known regions, which rounding to 16 bits leaves where they are."""
    x = b.some(lambda t: t.rank == 4 and 0 < t.size <= 4096 and t.dtype.is_float)
    count = b.between(1, 3)
    corners, sizes = ([b.between(*bounds) for _ in range(2 * count)] for bounds in ((-4, 12), (2, 24)))
    regions = _regions(b, x, corners, sizes)
    op = RoiAlign((b.between(1, 2), b.between(1, 3)), b.between(1, 2), b.pick(["avg", "max"]), 0.5, b.chance(50))
    b.add(op, x, *regions)


def roi_pool(b: RandomGraph) -> None:
    """Draw a roi_pool of known regions, none of which has a corner halfway between whole pixels."""
    x = b.some(lambda t: t.rank == 4 and 0 < t.size <= 4096 and t.dtype.is_float)
    count = b.between(1, 3)
    corners = [2 * b.between(-3, 6) + 1 for _ in range(2 * count)]
    sizes = [2 * b.between(-1, 12) for _ in range(2 * count)]
    regions = _regions(b, x, corners, sizes)
    b.add(RoiPool((b.between(1, 3), b.between(1, 3)), b.pick([0.5, 1.0])), x, *regions)


def _regions(b: RandomGraph, x: Value, corners: Sequence[int], sizes: Sequence[int]) -> tuple[Value, Value]:
    """Return regions by their first corners and sizes, in quarters of a pixel, and the image that each is of."""
    first, extent = (np.array(numbers).reshape(-1, 2) / 4 for numbers in (corners, sizes))
    rois = np.concatenate([first, first + extent], 1).astype(x.type.dtype.numpy)
    images = np.array([b.below(x.type.shape[0]) for _ in rois], np.int64)
    return b.graph.constant(rois), b.graph.constant(images)


def resize(b: RandomGraph) -> None:
    x = b.some(lambda t: t.rank >= 1 and t.size > 0)
    mode = "linear" if x.type.dtype.is_float and b.chance(40) else "nearest"
    first = 2 if x.type.rank >= 3 and b.chance(80) else 0
    sizes, scales = list(x.type.shape), [1.0] * x.type.rank
    for dim in range(first, x.type.rank):
        factor = b.pick([2.0, 1.0, 3.0, 0.5, 1.5])
        sizes[dim] = max(1, int(sizes[dim] * factor))
        scales[dim] = (
            factor if b.chance(50) and int(x.type.shape[dim] * factor) >= 1 else sizes[dim] / x.type.shape[dim]
        )
    coordinates = b.pick(["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "half_pixel_symmetric"])
    rounding = b.pick(["round_prefer_floor", "floor", "ceil", "round_prefer_ceil"])
    b.add(Resize(tuple(sizes), tuple(scales), mode, coordinates, rounding), x)
