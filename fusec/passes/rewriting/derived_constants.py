"""Derive constants from constants: small ones immediately, large ones when their data is first needed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fusec.ir import Array, Constant, Graph, Literal, Node, Op, TensorType, Value
from fusec.ops import Reshape, Transpose
from fusec.passes.rewriting.computations import recorded
from fusec.passes.rewriting.row_by_row import in_parts, is_row_by_row, rows_of
from fusec.passes.rewriting.row_major import row_major
from fusec.system.threaded_parts import PARALLEL_BYTES

EAGER_BYTES = 1 << 16  # shapes, scalars and per-channel vectors: cheaper computed than remembered


class Derived(Literal):
    """A literal computed from others; `base` is the label of the literal it is named after.

    Equal computations of equal sources have an equal `key`. For this `compute` must be a module's function, a `partial`
    of one, or have a `key` attribute.
    """

    __slots__ = ("_compute", "base")

    def __init__(
        self, type: TensorType, sources: Sequence[Literal], compute: Callable[..., Array], base: str, label: str = ""
    ):
        once = _Once(type, tuple(sources), compute)
        super().__init__(type, once, label, (_key(compute), type, *(s.key for s in sources)), sources=sources)
        self.base, self._compute = base, once

    @property
    def computation(self) -> tuple[Callable[..., Array], tuple[Literal, ...]]:
        """Return the function that computes the data, and its operands; none once the data is in memory for good."""
        return self._compute.compute, self._compute.sources

    def _operand(self) -> Array:
        return self._compute.rounded()

    def rounded(self, dtype: np.dtype[Any]) -> Array | None:
        """Return the data in another type, each number rounded once as it is read; see `Literal.rounded`.

        A transpose or reshape of what is read so is a view of it, in another memory order.
        """
        self._note_read()
        return self._compute.moved(dtype) if self._array is None else None

    def rows(self, start: int, end: int) -> Array | None:
        """Compute some rows alone; None if that is not possible, or all rows are in memory."""
        self._note_read()
        return self._compute.rows(start, end) if self._array is None else None


def derive(
    graph: Graph,
    before: Node,
    type: TensorType,
    sources: Sequence[Literal],
    compute: Callable[..., Array],
    name: str | Literal,
) -> Value:
    """Insert a constant of `type`, computed from the arrays of `sources` and rounded once to its dtype.

    It is named after the source given as `name` (w.folded), or by `name` itself. Its name differs from the source's,
    because its data does.
    """
    base = name if isinstance(name, str) else name.base if isinstance(name, Derived) else name.label
    literal = Derived(type, sources, compute, base)
    if max([type.nbytes, *(s.type.nbytes for s in sources)]) <= EAGER_BYTES:
        _ = literal.array
    node = graph.insert(
        Constant(literal), before=before, names=(base if isinstance(name, str) else f"{base}.folded",), types=(type,)
    )
    literal.label = node.result.name  # unique in the graph, as the text form needs it
    return node.result


def overflows(type: TensorType, sources: Sequence[Literal], compute: Callable[..., Array]) -> bool:
    """Tell if `derive` would make an infinity or NaN of finite numbers.

    An infinite weight times zero is NaN, where the model's own spelling gives a number or overflows elsewhere. Large
    constants are not checked, because that would read a model's weights during compilation.
    """
    if max([type.nbytes, *(s.type.nbytes for s in sources)]) > EAGER_BYTES:
        return False
    with np.errstate(all="ignore"):
        made = np.asarray(compute(*(s.array for s in sources))).astype(type.dtype.numpy)
        return not np.isfinite(made).all() and all(np.isfinite(s.array).all() for s in sources)


def _key(compute: Callable[..., Array]) -> Hashable:
    """Return a key that equal computations share; a function with variables of its own has none."""
    if isinstance(compute, partial):
        given = (*compute.args, *compute.keywords.values())
        return compute.func, *(contents(x) if isinstance(x, np.ndarray) else repr(x) for x in given)
    known = getattr(compute, "key", None)
    if known is not None:
        return type(compute), known
    return object() if getattr(compute, "__closure__", None) else compute


def contents(array: Array) -> Hashable:
    """Return a key that is equal for arrays of equal bits."""
    data = np.ascontiguousarray(array)
    return data.shape, data.dtype.str, hashlib.sha256(data.view(np.uint8).reshape(-1).data).digest()


class _Once:
    """Loader of a derived literal; drops its sources once they have been used."""

    def __init__(self, type: TensorType, sources: tuple[Literal, ...], compute: Callable[..., Array]):
        self.type = type
        self.sources = sources
        self.compute = compute

    def __call__(self) -> Array:
        result = row_major(self._computed(), self.type.dtype.numpy)
        self.sources = ()
        return result.reshape(self.type.shape)

    def rounded(self) -> Array:
        """Return the result, in any memory order. The sources stay, because it may be asked for again."""
        with np.errstate(all="ignore"):
            return self._computed().astype(self.type.dtype.numpy, copy=False).reshape(self.type.shape)

    def rows(self, start: int, end: int) -> Array | None:
        """Compute some rows of the result; None if they depend on other rows, or the sources were dropped."""
        sources = self.sources  # which another thread may drop
        op = self._row_by_row(sources)
        if op is None:
            return None
        with np.errstate(all="ignore"):
            return rows_of(op, self.type, sources, start, end)

    def moved(self, dtype: np.dtype[Any]) -> Array | None:
        """Return the result in another type if it has the elements of a source that can be read so; None otherwise."""
        sources, op = self.sources, self._op
        if not sources or not isinstance(op, (Reshape, Transpose)):
            return None
        read = sources[0].rounded(dtype)
        return None if read is None else op.reference(np, read)[0]

    @property
    def _op(self) -> Op | None:
        return getattr(self.compute, "op", None)

    def _row_by_row(self, sources: Sequence[Literal]) -> Op | None:
        """Return the op that computes the result, if it does so row by row."""
        op = self._op
        return op if op is not None and sources and is_row_by_row(op, self.type, [s.type for s in sources]) else None

    def _computed(self) -> Array:
        sources = self.sources
        op = self._row_by_row(sources) if self.type.nbytes >= PARALLEL_BYTES else None
        if op is not None:
            return in_parts(lambda start, end: rows_of(op, self.type, sources, start, end), self.type)
        with np.errstate(all="ignore"):
            # not `array`, which would stay in memory, and let go of what says how it is computed
            return np.asarray(self.compute(*(row_major(s.operand(), s.type.dtype.numpy) for s in sources)))


def folded(graph: Graph, value: Value, before: Node) -> Value | None:
    """Return a value that depends on constants alone as a constant; None if it depends on anything else."""
    node = value.node
    if value.literal is not None or node is None:
        return value if value.literal is not None else None
    operands = [folded(graph, v, before) for v in node.operands]
    sources = [v.literal for v in operands if v is not None and v.literal is not None]
    if not sources or len(sources) < len(operands):
        return None
    compute = partial(_result, op=node.op, index=node.results.index(value))
    return derive(graph, before, value.type, sources, compute, sources[0] if len(sources) == 1 else value.name)


@recorded
def _result(*arrays: Array, op: Op, index: int) -> Array:
    return op.reference(np, *arrays)[index]


def wide(literal: Literal) -> np.ndarray[Any, Any]:
    """Return the payload in float64."""
    return literal.array.astype(np.float64)


@recorded
def product(weight: Array, factor: Array) -> Array:
    """Multiply in float64, rounded once to the weight's dtype, without a float64 copy of the whole weight."""
    result = np.empty(np.broadcast_shapes(weight.shape, factor.shape), weight.dtype)
    return np.multiply(weight, factor, out=result, dtype=np.float64, casting="unsafe")


def per_channel(value: Value, shape: Sequence[int], axis: int) -> np.ndarray[Any, Any] | None:
    """Return a constant that varies along one axis at most as a float64 vector along that axis.

    Returns None if it is no constant or varies along another axis.
    """
    literal = value.literal
    if literal is None or not literal.type.dtype.is_float or literal.type.rank > len(shape):
        return None
    own = (1,) * (len(shape) - literal.type.rank) + literal.type.shape
    if any(d != 1 for i, d in enumerate(own) if i != axis) or own[axis] not in (1, shape[axis]):
        return None
    return np.broadcast_to(wide(literal).reshape(-1), (shape[axis],))


def along(vector: Array, rank: int, axis: int) -> Array:
    """Reshape a vector to broadcast along `axis` of a tensor of that rank."""
    return vector.reshape([-1 if i == axis else 1 for i in range(rank)])


def channel_constant(graph: Graph, before: Node, vector: Array, like: TensorType, name: str) -> Value:
    """Insert a constant of `like`'s dtype and rank that holds a number for each channel: [1, C, 1, 1] for an image."""
    return graph.constant(along(vector, like.rank, 1).astype(like.dtype.numpy), name, before=before)
