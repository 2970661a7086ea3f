"""Prove that a dim of a model's inputs may be padded, by following it from the inputs to the results.

The proof compares two graphs of one model op by op: for the real size of the dim, and for a larger one. If each op
keeps the rows along the dim separate, and all else is equal, the first rows of the larger results are the results.
Messages call the dim "it", because the caller's message starts with its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from fusec.errors import ModelError
from fusec.ir import Array, Constant, Graph, Node, Value, print_node, quote
from fusec.ops import Cast, Pointwise
from fusec.ops.recurrent import Recurrent


@dataclass(frozen=True)
class Crop:
    """Slices that crop a padded result, each as (axis, outer, size, rest).

    The axis has `outer` groups of `size` rows. The first `rest` rows of each group stay.
    """

    steps: tuple[tuple[int, int, int, int], ...] = ()

    def then(self, other: Crop) -> Crop:
        """Return this crop followed by another."""
        return Crop(self.steps + other.steps)

    def of(self, rest: int) -> Crop:
        """Return the same crop that leaves `rest` rows of each group."""
        return Crop(tuple((axis, outer, size, rest) for axis, outer, size, _ in self.steps))

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell if a result of this shape can be cropped, which a file may claim wrongly."""
        sizes = list(shape)
        for axis, outer, size, rest in self.steps:
            if not (0 <= axis < len(sizes) and outer > 0 and 0 <= rest <= size and size > 0):
                return False
            if sizes[axis] % (outer * size):
                return False
            sizes[axis] = sizes[axis] // size * rest
        return True

    def apply(self, array: Array) -> Array:
        """Return the cropped result."""
        for axis, outer, size, rest in self.steps:
            before, after = array.shape[:axis], array.shape[axis + 1 :]
            inner = array.shape[axis] // (outer * size)
            if outer == 1:  # a view in any layout, because nothing is reshaped
                array = array[(slice(None),) * axis + (slice(rest * inner),)]
                continue
            rows = array.reshape((*before, outer, size, inner, *after))
            rows = rows[(slice(None),) * (axis + 1) + (slice(rest),)]
            array = rows.reshape((*before, outer * rest * inner, *after))
        return array


@dataclass(frozen=True)
class RowPlace:
    """Position of the dim in a value: dim `axis` consists of `outer` groups of rows."""

    axis: int
    outer: int = 1


class _MixesError(Exception):
    """Reason why an op does not keep the rows separate."""


def crops(
    small: Graph, large: Graph, axes: Mapping[str, Sequence[int]], small_size: int, large_size: int
) -> tuple[Crop, ...]:
    """Return, for each output, how the result of `large` is cropped to that of `small`.

    The graphs are of one model, for two sizes of a dim that the inputs have at `axes`.

    Raises ModelError if a row of the results could depend on more than the same row of the inputs.
    """
    return _Proof(small, large, small_size, large_size).run(axes)


def rows_of(graph: Graph, axes: Mapping[str, Sequence[int]], size: int) -> dict[Value, RowPlace]:
    """Return the place of a dim of the inputs in each value that has it. Values without it are the same for all rows.

    Raises ModelError if a row of the results could depend on another row of the inputs.
    """
    proof = _Proof(graph, graph, size, size)
    proof.run(axes)
    return proof.rows


class _Proof:
    """A proof in progress: `twin` maps values to those of the larger graph, `rows` holds values that have the dim.

    n, m: the size of the dim, and the larger one.
    """

    def __init__(self, small: Graph, large: Graph, n: int, m: int):
        self.small, self.large, self.n, self.m = small, large, n, m
        self.twin: dict[Value, Value] = {}
        self.rows: dict[Value, RowPlace] = {}

    def run(self, axes: Mapping[str, Sequence[int]]) -> tuple[Crop, ...]:
        for value, other in zip(self.small.inputs, self.large.inputs, strict=True):
            self.twin[value] = other
            found = axes.get(value.name, ())
            if len(found) > 1:
                raise ModelError(f"input {quote(value.name)} has it twice")
            if found:
                self.rows[value] = RowPlace(found[0])
        pairs = list(zip(self.small.nodes, self.large.nodes, strict=False))
        if len(self.small) != len(self.large):
            raise ModelError("the model becomes another graph for another size of it")
        for node, other in pairs:
            try:
                self._node(node, other)
            except _MixesError as reason:
                raise ModelError(f"{reason} in {print_node(node)}") from None
        if [self.twin[v] for v in self.small.outputs] != list(self.large.outputs):
            raise ModelError("the model becomes another graph for another size of it")
        rows = [self.rows.get(value) for value in self.small.outputs]
        return tuple(Crop() if row is None else Crop(((row.axis, row.outer, self.m, self.n),)) for row in rows)

    def _node(self, node: Node, other: Node) -> None:
        if node.op.name != other.op.name or [self.twin[v] for v in node.operands] != list(other.operands):
            raise _MixesError("the model becomes another graph for another size of it")
        self.twin.update(zip(node.results, other.results, strict=True))
        if isinstance(node.op, Constant):
            row = self._constant(node, other)
        else:
            free = _SIZED.get(node.op.name, frozenset())
            for name, value in node.op.attributes.items():
                if name not in free and value != other.op.attributes[name]:
                    raise _MixesError(f"{name} depends on it")
            row = self._follow(node, other)
        for value, wide in zip(node.results, other.results, strict=True):
            if row is not None:
                self.rows[value] = row
            self._check(value, wide, row)

    def _check(self, value: Value, wide: Value, row: RowPlace | None) -> None:
        """Check that two shapes differ only in the dim that has the rows, and there by whole rows."""
        a, b = value.type.shape, wide.type.shape
        axis = -1 if row is None else row.axis
        if len(a) != len(b) or any(x != y for i, (x, y) in enumerate(zip(a, b, strict=True)) if i != axis):
            raise _MixesError("another dim depends on it")
        if row is not None:
            inner, rest = divmod(a[axis], row.outer * self.n)
            if rest or b[axis] != row.outer * self.m * inner:
                raise _MixesError("it is joined with other dims")

    def _constant(self, node: Node, other: Node) -> RowPlace | None:
        """Check that a constant is the same for both sizes, or starts with the rows of the smaller one."""
        literals = [n.op.attributes["literal"] for n in (node, other)]
        if literals[0].type.shape == literals[1].type.shape:
            if literals[0].digest != literals[1].digest:  # also known of weights that a file was written without
                raise _MixesError("a number depends on it")
            return None
        held, wide = (literal.array for literal in literals)
        axis = _differing(held.shape, wide.shape)
        first = wide[(slice(None),) * axis + (slice(held.shape[axis]),)]
        if first.tobytes() != held.tobytes():
            raise _MixesError("a number depends on it")
        return RowPlace(axis)

    def _follow(self, node: Node, other: Node) -> RowPlace | None:
        rows = [self.rows.get(v) for v in node.operands]
        if not any(rows):
            if node.op.name != "expand" or node.result.type.shape == other.result.type.shape:
                return None
            return RowPlace(_differing(node.result.type.shape, other.result.type.shape))  # one row, repeated
        if isinstance(node.op, Pointwise | Cast):
            if node.op.name == "gen_index" and any(row is not None and row.outer > 1 for row in rows):
                raise _MixesError("indices of a dim with several groups of rows are counted")
            return self.aligned(node, rows)
        rule = _RULES.get(node.op.name)
        if rule is None:
            raise _MixesError("fusec has no rule that this op keeps rows separate")
        return rule(self, node, rows)

    def aligned(self, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
        """Return the row of the result of an op that broadcasts: dims are counted from the right."""
        rank = node.results[0].type.rank
        found: set[tuple[int, int, int]] = set()
        for value, row in zip(node.operands, rows, strict=True):
            if row is not None:
                inner = value.type.shape[row.axis] // (row.outer * self.n)
                found.add((row.axis - value.type.rank, row.outer, inner))
        if len(found) > 1:
            raise _MixesError("rows meet other rows")
        ((axis, outer, _),) = found
        return RowPlace(rank + axis, outer)

    def only(self, rows: Sequence[RowPlace | None], operand: int = 0) -> RowPlace:
        """Return the row of one operand, and check that no other operand has one."""
        row = rows[operand]
        if row is None or any(r is not None for i, r in enumerate(rows) if i != operand):
            raise _MixesError("rows meet other rows")
        return row


def _differing(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the only dim in which two shapes differ."""
    places = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if len(a) != len(b) or len(places) != 1:
        raise _MixesError("more than one dim depends on it")
    return places[0]


_Rule = Callable[[_Proof, Node, Sequence[RowPlace | None]], RowPlace]


def _images(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Follow the batch dim. Images are separate from each other; channels and pixels are not."""
    row = proof.only(rows)
    if row.axis != 0:
        raise _MixesError("it is not the batch dim")
    return row


def _resize(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = _images(proof, node, rows)
    if node.op.attributes["scales"][0] != 1.0:
        raise _MixesError("it is resized")
    return row


def _matmul(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    a, b = node.operands
    left, right = rows
    if left is not None and left.axis == a.type.rank - 1:
        raise _MixesError("it is summed over")
    if right is not None and right.axis == b.type.rank - 2:
        raise _MixesError("it is summed over")
    matrices = [r is not None and r.axis >= v.type.rank - 2 for r, v in zip(rows, node.operands, strict=True)]
    if any(matrices):
        row = proof.only(rows, matrices.index(True))
        return RowPlace(node.result.type.rank - (node.operands[matrices.index(True)].type.rank - row.axis), row.outer)
    return proof.aligned(node, rows)


def _packed_matmul(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = proof.only(rows)
    if row.axis == node.operands[0].type.rank - 1:
        raise _MixesError("it is summed over")
    return row


def _norm_from(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = proof.only(rows)
    if row.axis >= node.op.attributes["axis"] % node.operands[0].type.rank:
        raise _MixesError("it is normalised over")
    return row


def _reduce(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row, rank = proof.only(rows), node.operands[0].type.rank
    axes = {a % rank for a in node.op.attributes["axes"]}
    if row.axis in axes:
        raise _MixesError("it is reduced")
    return row if node.op.attributes["keepdims"] else RowPlace(row.axis - sum(a < row.axis for a in axes), row.outer)


def _not_along(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Check that an op works along another axis."""
    row = proof.only(rows) if len(rows) == 1 else _same(rows)
    if row.axis == node.op.attributes["axis"] % node.operands[0].type.rank:
        raise _MixesError(f"{node.op.name} works along it")
    return row


def _linear_scan(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = proof.aligned(node, rows)
    if row.axis == int(node.op.attributes["axis"]) % node.result.type.rank:
        raise _MixesError("linear_scan works along it")
    return row


def _same(rows: Sequence[RowPlace | None]) -> RowPlace:
    found = {row for row in rows if row is not None}
    if len(found) > 1:
        raise _MixesError("rows meet other rows")
    return found.pop()


def _reshape(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Follow rows through a reshape. A row stays a row if a new dim consists of whole rows of `step` elements."""
    row, shape = proof.only(rows), node.operands[0].type.shape
    step = math.prod(shape[row.axis :]) // (row.outer * proof.n)
    if not step:
        raise _MixesError("a row is empty")
    for axis, size in enumerate(node.result.type.shape):
        after = math.prod(node.result.type.shape[axis + 1 :])
        rows_end = step * proof.n
        if after and step % after == 0 and (after * size) % rows_end == 0 and (size > 1 or proof.n == 1):
            # with one row, several axes could be the dim: the right one is larger in the larger graph
            if proof.n == 1 and proof.twin[node.result].type.shape[axis] == size:
                continue
            return RowPlace(axis, after * size // rows_end)
    raise _MixesError("it is split or joined")


def _transpose(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = proof.only(rows)
    return RowPlace(node.op.attributes["perm"].index(row.axis), row.outer)


def _slice(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row, a = proof.only(rows), node.op.attributes
    whole = (0, node.operands[0].type.shape[row.axis], 1)
    if (a["starts"][row.axis], a["sizes"][row.axis], a["steps"][row.axis]) != whole:
        raise _MixesError("it is sliced")
    return row


def _pad(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row, pads = proof.only(rows), node.op.attributes["pads"]
    if pads[row.axis] or pads[row.axis + len(pads) // 2]:
        raise _MixesError("it is padded by the model itself")
    return row


def _gather(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    data, indices = node.operands
    axis = node.op.attributes["axis"] % data.type.rank
    if rows[0] is None:
        row = proof.only(rows, 1)
        return RowPlace(axis + row.axis, row.outer)
    row = proof.only(rows)
    if row.axis == axis:
        raise _MixesError("rows are gathered")
    return row if row.axis < axis else RowPlace(row.axis + indices.type.rank - 1, row.outer)


def _attention(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Follow the batch or the queries, which are separate. Keys are summed over, and heads may be shared."""
    query, *others = rows[:3]
    bias = rows[3] if len(rows) > 3 else None
    if query is None or query.axis not in (0, 2) or (query.axis == 2 and query.outer > 1):
        raise _MixesError("it is neither the batch nor the queries")
    if any(other != (query if query.axis == 0 else None) for other in others):
        raise _MixesError("rows meet other rows")
    if bias is not None and RowPlace(bias.axis + 4 - node.operands[3].type.rank, bias.outer) != query:
        raise _MixesError("rows meet other rows")
    return query


def _rotary(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    row = proof.aligned(node, rows)
    if row.axis == node.result.type.rank - 1:
        raise _MixesError("its halves are exchanged")
    return row


def _recurrent(proof: _Proof, node: Node, rows: Sequence[RowPlace | None]) -> RowPlace:
    """Follow the batch, whose sequences are separate. It is dim 1 of x, the states and all results, 0 of lengths."""
    op = cast("Recurrent", node.op)
    _, lengths = op.places([v.type.dtype for v in node.operands])
    batch = {0: 1, **dict.fromkeys(range(2, 2 + op.states), 1)} | ({} if lengths is None else {lengths: 0})
    axes = {place: row.axis for place, row in enumerate(rows) if row is not None}
    if axes != batch:
        raise _MixesError("it is not the batch dim")
    return _same([row and RowPlace(1, row.outer) for row in rows])


# attributes that may differ between the sizes, because the shape of the result is checked instead
_SIZED: Mapping[str, frozenset[str]] = {
    "reshape": frozenset({"shape"}),
    "expand": frozenset({"shape"}),
    "slice": frozenset({"sizes"}),
    "resize": frozenset({"sizes"}),
}
_RULES: Mapping[str, _Rule] = {
    **dict.fromkeys(("conv", "conv_transpose", "max_pool", "avg_pool"), _images),
    **dict.fromkeys(("batch_norm", "instance_norm", "group_norm", "lrn"), _images),
    **dict.fromkeys(("layer_norm", "rms_norm"), _norm_from),
    **dict.fromkeys(("softmax", "concat", "split", "top_k", "cumulate"), _not_along),
    "linear_scan": _linear_scan,
    "resize": _resize,
    "matmul": _matmul,
    "packed_matmul": _packed_matmul,
    "attention": _attention,
    "rotary": _rotary,
    "recurrent": _recurrent,
    "reduce": _reduce,
    "reshape": _reshape,
    "transpose": _transpose,
    "relayout": lambda proof, node, rows: proof.only(rows),
    "expand": lambda proof, node, rows: proof.aligned(node, rows),
    "slice": _slice,
    "pad": _pad,
    "gather": _gather,
}
