"""Import ops that find, gather and scatter elements by index: ArgMax, TopK, Gather*, Scatter*, OneHot, CumSum."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction, Table
from fusec.frontends.onnx.model_file.tensors import dtype_of
from fusec.ir import Array, DType, TensorType, Value
from fusec.ops import Cumulate, Expand, Gather, Pad, Reduce, Scatter, Slice, TopK, pw
from fusec.ops.indexing import REDUCTIONS
from fusec.ops.spec import broadcast, normalize_axis, require


def along(g: Emitter, count: int, axis: int, rank: int) -> Value:
    """Make a constant of `rank` dims with 0, 1, … along one axis."""
    return g.indexed([count if i == axis else 1 for i in range(rank)], lambda i: i)


def _places_of(g: Emitter, shape: Sequence[int], strides: Sequence[int]) -> Value:
    """Make a constant of the memory offset of each index of `shape`. Dims of size 1 can have any stride."""

    def places(index: Array) -> Array:
        return sum((at * step for at, step in zip(np.unravel_index(index, shape), strides, strict=True)), index * 0)

    return g.indexed(shape, places)


def _counted(g: Emitter, indices: Value) -> Value:
    """Cast indices to i64."""
    require(indices.type.dtype.is_int, f"indices are {indices.type.dtype.value}, not integers")
    return g.cast(indices, DType.I64)


def from_front(g: Emitter, indices: Value, size: Value | int) -> Value:
    """Cast indices to i64, and count negative ones from the end of a dim of that size."""
    at = _counted(g, indices)
    end = size if isinstance(size, Value) else g.constant(np.array(size, np.int64))
    return g(pw("where"), g(pw("cmp_lt"), at, g.scalar(0, at)), g(pw("add"), at, end), at)


# positions of extremes -------------------------------------------------------------------------------------


def first_of(g: Emitter, x: Value, axis: int, kind: str, last: bool = False) -> Value:
    """Find the index of the first (or last) maximum or minimum along an axis. NaN counts as the extreme.

    The result has size 1 along the axis.
    """
    size = x.type.shape[axis]
    require(size > 0, f"{kind} over an empty dim")
    if x.type.dtype is DType.BOOL:
        x = g.cast(x, DType.U8)
    found = g(pw("cmp_eq"), x, g(Reduce(kind, (axis,)), x))
    if x.type.dtype.is_float:
        found = g(pw("logical_or"), found, g(pw("is_nan"), x))
    places = along(g, size, axis, x.type.rank)
    other = g.constant(np.array(-1 if last else size, np.int64))
    return g(Reduce("max" if last else "min", (axis,)), g(pw("where"), found, places, other))


def _arg(kind: str) -> OpFunction:
    def emit(g: Emitter, x: Value, /, *, axis: int = 0, keepdims: int = 1, select_last_index: int = 0) -> Value:
        axis = normalize_axis(axis, x.type.rank)
        at = first_of(g, x, axis, kind, bool(select_last_index))
        return at if keepdims else g.reshape(at, (*x.type.shape[:axis], *x.type.shape[axis + 1 :]))

    return emit


def _hardmax(g: Emitter, x: Value, axis: int) -> Value:
    if not x.type.size:
        return x
    at = first_of(g, x, axis, "max")
    return g.cast(g(pw("cmp_eq"), at, along(g, x.type.shape[axis], axis, x.type.rank)), x.type.dtype)


def hardmax_1(g: Emitter, x: Value, /, *, axis: int = 1) -> Value:
    rank = x.type.rank
    require(-rank <= axis <= rank, f"axis {axis} is out of range for rank {rank}")
    axis = axis + rank if axis < 0 else axis
    shape = x.type.shape
    return g.reshape(_hardmax(g, g.reshape(x, (math.prod(shape[:axis]), math.prod(shape[axis:]))), 1), shape)


def hardmax(g: Emitter, x: Value, /, *, axis: int = -1) -> Value:
    return _hardmax(g, x, normalize_axis(axis, x.type.rank))


def top_k_1(g: Emitter, x: Value, /, *, k: int, axis: int = -1) -> tuple[Value, ...]:
    return g.many(TopK(k, normalize_axis(axis, x.type.rank)), x)


def top_k(g: Emitter, x: Value, k: Value, /, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Value, ...]:
    return g.many(TopK(int(g.number(k, "K")), normalize_axis(axis, x.type.rank), bool(largest)), x)


# gather and scatter ------------------------------------------------------------------------------------------


def _element_places(g: Emitter, x: Value, indices: Value, axis: int) -> Value:
    """Convert indices along an axis to indices in x flattened. The other coordinates are those of the index itself."""
    rank, shape = x.type.rank, indices.type.shape
    require(indices.type.rank == rank, f"indices have rank {indices.type.rank}, x {rank}")
    for d, (n, m) in enumerate(zip(shape, x.type.shape, strict=True)):
        require(d == axis or n <= m, f"indices of shape {list(shape)} for x of shape {list(x.type.shape)}")
    if x.type.size == x.type.shape[axis]:  # gather and scatter count negative ones from the end by themselves
        return _counted(g, indices)
    strides = TensorType(x.type.shape, DType.BOOL).strides
    at = from_front(g, indices, x.type.shape[axis])
    at = g(pw("mul"), at, g.scalar(strides[axis], at))
    return g(pw("add"), at, _places_of(g, [n if d != axis else 1 for d, n in enumerate(shape)], strides))


def _index_of_slices(g: Emitter, x: Value, indices: Value, axis: int) -> Value | None:
    """Return one index for each slice along an axis, in place of one for each element; None if the elements differ.

    So exporters spell a gather or scatter of whole slices: as one of elements, by an index that is expanded.
    """
    shape, wanted = indices.type.shape, list(x.type.shape)
    if len(shape) != len(wanted) or not x.type.size:
        return None
    wanted[axis] = shape[axis]
    node = indices.node
    if list(shape) != wanted or node is None or not isinstance(node.op, Expand):
        return None
    source = node.operands[0]
    if source.type.rank < len(shape) - axis:
        return None
    if source.type.size != source.type.shape[axis - len(shape)]:
        return None
    index = g.reshape(source, (source.type.size,))
    return g(Expand((shape[axis],)), index) if source.type.size < shape[axis] else index


def gather_elements(g: Emitter, x: Value, indices: Value, /, *, axis: int = 0) -> Value:
    axis = normalize_axis(axis, x.type.rank)
    if (index := _index_of_slices(g, x, indices, axis)) is not None:
        return g(Gather(axis), x, _counted(g, index))
    return g(Gather(0), g.reshape(x, (x.type.size,)), _element_places(g, x, indices, axis))


def _rows(g: Emitter, x: Value, indices: Value, batch: int) -> tuple[Value, int]:
    """Convert index tuples to rows of x with its first dims flattened. Also returns the number of these dims.

    batch: number of leading dims that x and indices share.
    """
    shape = x.type.shape
    require(indices.type.rank >= 1, "indices are a scalar")
    depth = indices.type.shape[-1]
    require(0 <= batch < indices.type.rank, f"batch_dims is {batch} for indices of rank {indices.type.rank}")
    require(batch + depth <= len(shape), f"index tuples of {depth} for {list(shape)}")
    require(indices.type.shape[:batch] == shape[:batch], f"batch dims differ: {indices.type} and {x.type}")
    if batch == 0 and depth == 1:  # gather and scatter count negative ones from the end by themselves
        return g.reshape(_counted(g, indices), indices.type.shape[:-1]), 1
    covered = shape[: batch + depth]
    strides = TensorType(covered, DType.BOOL).strides
    sizes = g.constant(np.array(covered[batch:], np.int64))
    at = from_front(g, indices, sizes)
    rows = g(
        Reduce("sum", (at.type.rank - 1,), False), g(pw("mul"), at, g.constant(np.array(strides[batch:], np.int64)))
    )
    within = [shape[d] if d < batch else 1 for d in range(rows.type.rank)]
    base = _places_of(g, within, [*strides[:batch], *[0] * (rows.type.rank - batch)])
    return g(pw("add"), rows, base), batch + depth


def gather_nd(g: Emitter, x: Value, indices: Value, /, *, batch_dims: int = 0) -> Value:
    rows, covered = _rows(g, x, indices, batch_dims)
    rest = x.type.shape[covered:]
    return g(Gather(0), g.reshape(x, (math.prod(x.type.shape[:covered]), *rest)), rows)


def scatter(g: Emitter, x: Value, indices: Value, updates: Value, /, *, axis: int = 0) -> Value:
    return scatter_elements(g, x, indices, updates, axis=axis)


def scatter_elements(
    g: Emitter, x: Value, indices: Value, updates: Value, /, *, axis: int = 0, reduction: str = "none"
) -> Value:
    axis = normalize_axis(axis, x.type.rank)
    require(reduction in REDUCTIONS, f"knows no reduction {reduction!r}")
    require(updates.type.shape == indices.type.shape, f"updates {updates.type} for indices {indices.type}")
    shape, rest = x.type.shape, x.type.shape[axis + 1 :]
    index = _index_of_slices(g, x, indices, axis) if math.prod(rest) > 1 else None
    if index is None:
        places, rest = _element_places(g, x, indices, axis), ()
    else:  # whole rows of what is after the axis
        places = _counted(g, index) if axis == 0 else from_front(g, index, shape[axis])
        if axis:
            first = shape[axis] * np.arange(math.prod(shape[:axis]), dtype=np.int64)
            places = g(pw("add"), g.constant(first[:, None]), g.reshape(places, (1, places.type.size)))
    flat = g.reshape(x, (math.prod(shape) // math.prod(rest), *rest))
    rows = g.reshape(places, (places.type.size,))
    return g.reshape(g(Scatter(reduction), flat, rows, g.reshape(updates, (places.type.size, *rest))), shape)


def scatter_nd(g: Emitter, x: Value, indices: Value, updates: Value, /, *, reduction: str = "none") -> Value:
    require(reduction in REDUCTIONS, f"knows no reduction {reduction!r}")
    rows, covered = _rows(g, x, indices, 0)
    rest = x.type.shape[covered:]
    wanted = (*indices.type.shape[:-1], *rest)
    require(updates.type.shape == wanted, f"updates of shape {list(updates.type.shape)}, not {list(wanted)}")
    flat = g.reshape(x, (math.prod(x.type.shape[:covered]), *rest))
    given = g.reshape(updates, (rows.type.size, *rest))
    return g.reshape(g(Scatter(reduction), flat, g.reshape(rows, (rows.type.size,)), given), x.type.shape)


def tensor_scatter(
    g: Emitter, cache: Value, update: Value, starts: Value | None = None, /, *, axis: int = -2, mode: str = "linear"
) -> Value:
    """Import TensorScatter: write the update of each image at the start given for it. `circular` wraps around."""
    axis = normalize_axis(axis, cache.type.rank)
    require(mode in ("linear", "circular"), f"knows no mode {mode!r}")
    require(axis > 0, "axis 0 is the batch")
    require(update.type.rank == cache.type.rank, f"an update {update.type} of a cache {cache.type}")
    require(starts is None or starts.type.shape == cache.type.shape[:1], "needs one write index for each image")
    length, covered = cache.type.shape[axis], cache.type.shape[: axis + 1]
    rest, rows = cache.type.shape[axis + 1 :], update.type.shape[: axis + 1]
    fits = (*rows[:axis], *update.type.shape[axis + 1 :]) == (*covered[:axis], *rest)
    require(fits, f"an update {update.type} of a cache {cache.type}")
    at = along(g, rows[axis], axis, axis + 1)
    if starts is not None:
        at = g(pw("add"), at, g.reshape(g.cast(starts, DType.I64), (starts.type.size, *[1] * axis)))
    if mode == "circular":
        at = g(pw("floor_mod"), at, g.scalar(length, at))
    # whole rows, so that there is one index for each row and not for each element
    at = g(pw("add"), at, _places_of(g, [*rows[:axis], 1], TensorType(covered, DType.BOOL).strides))
    at = g.reshape(spread(g, at, rows), (math.prod(rows),))
    flat, given = g.reshape(cache, (math.prod(covered), *rest)), g.reshape(update, (math.prod(rows), *rest))
    return g.reshape(g(Scatter("none"), flat, at, given), cache.type.shape)


def spread(g: Emitter, x: Value, shape: Sequence[int]) -> Value:
    """Broadcast x to a shape."""
    require(broadcast([x.type.shape, tuple(shape)]) == tuple(shape), f"{x.type} does not expand to {list(shape)}")
    return x if x.type.shape == tuple(shape) else g(Expand(tuple(shape)), x)


def reverse_sequence(g: Emitter, x: Value, lengths: Value, /, *, batch_axis: int = 1, time_axis: int = 0) -> Value:
    require({batch_axis, time_axis} == {0, 1}, f"batch_axis={batch_axis}, time_axis={time_axis}")
    return reversed_in_time(g, x, lengths, time_axis)


def reversed_in_time(g: Emitter, x: Value, lengths: Value, time: int) -> Value:
    """Reverse the first `lengths[b]` steps of each sequence b. The other steps stay in place."""
    rank, shape = x.type.rank, x.type.shape
    require(rank >= 2, f"takes [steps, batch, …], not {list(shape)}")
    step = along(g, shape[time], time, rank)
    require(lengths.type.shape == (shape[1 - time],), f"lengths of shape {list(lengths.type.shape)} for x {x.type}")
    length = g.reshape(g.cast(lengths, DType.I64), [shape[d] if d == 1 - time else 1 for d in range(rank)])
    mirrored = g(pw("sub"), g(pw("sub"), length, g.scalar(1, length)), step)
    at = g(pw("where"), g(pw("cmp_lt"), step, length), mirrored, step)
    return gather_elements(g, x, spread(g, at, shape), axis=time)


def one_hot(g: Emitter, indices: Value, depth: Value, values: Value, /, *, axis: int = -1) -> Value:
    """Import OneHot. An index out of range gives the "off" value everywhere."""
    count = int(g.number(depth, "depth"))
    require(values.type.shape == (2,), f"values has shape {list(values.type.shape)}, not [2]")
    rank = indices.type.rank + 1
    axis = normalize_axis(axis, rank)
    at = g.cast(indices, DType.I64)
    at = from_front(g, g.reshape(at, (*at.type.shape[:axis], 1, *at.type.shape[axis:])), count)
    hot = g(pw("cmp_eq"), at, along(g, count, axis, rank))
    off, on = (g.reshape(g.window(values, 0, i, 1), ()) for i in (0, 1))
    return g(pw("where"), hot, on, off)


# triangles and running sums ------------------------------------------------------------------------------------


def trilu(g: Emitter, x: Value, k: Value | None = None, /, *, upper: int = 1) -> Value:
    require(x.type.rank >= 2, f"takes matrices, not {list(x.type.shape)}")
    shift = 0 if k is None else int(g.number(k, "k"))
    width = x.type.shape[-1]

    def inside(index: Array) -> Array:
        offset = index % width - index // width
        return offset >= shift if upper else offset <= shift

    return g(pw("where"), g.indexed(x.type.shape[-2:], inside, DType.BOOL), x, g.scalar(0, x))


def eye_like(g: Emitter, x: Value, /, *, dtype: int = 0, k: int = 0) -> Value:
    require(x.type.rank == 2, f"takes a matrix, not {list(x.type.shape)}")
    to = dtype_of(dtype) if dtype else x.type.dtype
    width = x.type.shape[1]
    return g.indexed(x.type.shape, lambda i: i % width - i // width == k, to)


def _running(kind: str) -> OpFunction:
    def emit(g: Emitter, x: Value, axis: Value, /, *, exclusive: int = 0, reverse: int = 0) -> Value:
        at = normalize_axis(int(g.number(axis, "axis")), x.type.rank)
        shape = x.type.shape
        if reverse:
            x = _flipped(g, x, at)
        if exclusive and shape[at]:
            pads = [0] * (2 * len(shape))
            pads[at] = 1
            x = g(Pad(tuple(pads), "constant", 0.0 if kind == "sum" else 1.0), g.window(x, at, 0, shape[at] - 1))
        y = g(Cumulate(kind, at), x)
        return _flipped(g, y, at) if reverse else y

    return emit


def _flipped(g: Emitter, x: Value, axis: int) -> Value:
    shape = x.type.shape
    if shape[axis] < 2:
        return x
    starts = tuple(d - 1 if i == axis else 0 for i, d in enumerate(shape))
    return g(Slice(starts, shape, tuple(-1 if i == axis else 1 for i in range(len(shape)))), x)


TABLE: Table = {
    ("ArgMax", 1): _arg("max"),
    ("ArgMin", 1): _arg("min"),
    ("Hardmax", 1): hardmax_1,
    ("Hardmax", 13): hardmax,
    ("TopK", 1): top_k_1,
    ("TopK", 10): top_k,
    ("GatherElements", 11): gather_elements,
    ("GatherND", 11): gather_nd,
    ("Scatter", 9): scatter,
    ("ScatterElements", 11): scatter_elements,
    ("ScatterND", 11): scatter_nd,
    ("TensorScatter", 24): tensor_scatter,
    ("ReverseSequence", 10): reverse_sequence,
    ("OneHot", 9): one_hot,
    ("Trilu", 14): trilu,
    ("EyeLike", 9): eye_like,
    ("CumSum", 11): _running("sum"),
    ("CumProd", 26): _running("prod"),
}
