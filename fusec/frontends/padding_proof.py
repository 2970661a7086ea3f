"""Prove that a dim of a model's inputs may be padded, by following it from the inputs to the results.

The proof compares two graphs of one model op by op: for the real size of the dim, and for a larger one. If each op
keeps the rows along the dim separate, and all else is equal, the first rows of the larger results are the results.
Messages call the dim "it", because the caller's message starts with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.errors import ModelError
from fusec.frontends.padding_rules import RULES, MixesError, RowPlace, RowTracker
from fusec.ir import Array, Constant, Graph, Node, Value, print_node, quote
from fusec.ops import Cast, Pointwise, Scan
from fusec.system.dataclass import dataclass

# attributes that may differ between the sizes, because the shape of the result is checked instead
_SIZED: Mapping[str, frozenset[str]] = {
    "reshape": frozenset({"shape"}),
    "expand": frozenset({"shape"}),
    "slice": frozenset({"sizes"}),
    "resize": frozenset({"sizes"}),
    "scan": frozenset({"body"}),
}


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


class _Proof(RowTracker):
    """A proof in progress.

    n, m: the size of the dim, and the larger one.
    """

    def __init__(self, small: Graph, large: Graph, n: int, m: int):
        super().__init__(n)
        self.small, self.large, self.m = small, large, m

    def run(self, axes: Mapping[str, Sequence[int]]) -> tuple[Crop, ...]:
        for value, other in zip(self.small.inputs, self.large.inputs, strict=True):
            self.twin[value] = other
            found = axes.get(value.name, ())
            if len(found) > 1:
                raise ModelError(f"input {quote(value.name)} has it twice")
            if found:
                self.rows[value] = RowPlace(found[0])
        self._nodes()
        rows = [self.rows.get(value) for value in self.small.outputs]
        return tuple(Crop() if row is None else Crop(((row.axis, row.outer, self.m, self.n),)) for row in rows)

    def _nodes(self) -> None:
        pairs = list(zip(self.small.nodes, self.large.nodes, strict=False))
        if len(self.small) != len(self.large):
            raise ModelError("the model becomes another graph for another size of it")
        for node, other in pairs:
            try:
                self._node(node, other)
            except MixesError as reason:
                raise ModelError(f"{reason} in {print_node(node)}") from None
        if [self.twin[v] for v in self.small.outputs] != list(self.large.outputs):
            raise ModelError("the model becomes another graph for another size of it")

    def _node(self, node: Node, other: Node) -> None:
        if node.op.name != other.op.name or [self.twin[v] for v in node.operands] != list(other.operands):
            raise MixesError("the model becomes another graph for another size of it")
        self.twin.update(zip(node.results, other.results, strict=True))
        if isinstance(node.op, Constant):
            row = self._constant(node, other)
        else:
            free = _SIZED.get(node.op.name, frozenset())
            for name, value in node.op.attributes.items():
                if name not in free and value != other.op.attributes[name]:
                    raise MixesError(f"{name} depends on it")
            row = self._follow(node, other)
        rows = row if isinstance(row, list) else [row] * len(node.results)
        for value, wide, place in zip(node.results, other.results, rows, strict=True):
            if place is not None:
                self.rows[value] = place
            self._check(value, wide, place)

    def _check(self, value: Value, wide: Value, row: RowPlace | None) -> None:
        """Check that two shapes differ only in the dim that has the rows, and there by whole rows."""
        a, b = value.type.shape, wide.type.shape
        axis = -1 if row is None else row.axis
        if len(a) != len(b) or any(x != y for i, (x, y) in enumerate(zip(a, b, strict=True)) if i != axis):
            raise MixesError("another dim depends on it")
        if row is not None:
            inner, rest = divmod(a[axis], row.outer * self.n)
            if rest or b[axis] != row.outer * self.m * inner:
                raise MixesError("it is joined with other dims")

    def _constant(self, node: Node, other: Node) -> RowPlace | None:
        """Check that a constant is the same for both sizes, or starts with the rows of the smaller one."""
        literals = [n.op.attributes["literal"] for n in (node, other)]
        if literals[0].type.shape == literals[1].type.shape:
            if literals[0].digest != literals[1].digest:  # also known of weights that a file was written without
                raise MixesError("a number depends on it")
            return None
        held, wide = (literal.array for literal in literals)
        axis = _differing(held.shape, wide.shape)
        first = wide[(slice(None),) * axis + (slice(held.shape[axis]),)]
        if first.tobytes() != held.tobytes():
            raise MixesError("a number depends on it")
        return RowPlace(axis)

    def _follow(self, node: Node, other: Node) -> RowPlace | list[RowPlace | None] | None:
        """Return the row of all results, or a list of the row of each."""
        rows = [self.rows.get(v) for v in node.operands]
        if isinstance(node.op, Scan) and isinstance(other.op, Scan):
            return self._through_loop(node.op, other.op, rows)
        if not any(rows):
            if node.op.name != "expand" or node.result.type.shape == other.result.type.shape:
                return None
            return RowPlace(_differing(node.result.type.shape, other.result.type.shape))  # one row, repeated
        if isinstance(node.op, Pointwise | Cast):
            if node.op.name == "gen_index" and any(row is not None and row.outer > 1 for row in rows):
                raise MixesError("indices of a dim with several groups of rows are counted")
            return self.aligned(node, rows)
        rule = RULES.get(node.op.name)
        if rule is None:
            raise MixesError("fusec has no rule that this op keeps rows separate")
        return rule(self, node, rows)

    def _through_loop(self, op: Scan, other: Scan, rows: Sequence[RowPlace | None]) -> list[RowPlace | None]:
        """Follow rows through the body of a loop. They must have the same place in a state before and after a step."""
        first = op.states + op.sequences
        if any(row is not None and row.axis == 0 for row in rows[op.states : first]):
            raise MixesError("it numbers the steps of a loop")
        places = [RowPlace(r.axis - 1, r.outer) if r and op.states <= i < first else r for i, r in enumerate(rows)]
        after = self._through_body(op.body.graph, other.body.graph, places)
        for _ in range(op.states):  # a first state that is the same for all rows may have them after a step
            joined = [b if a is None else a for a, b in zip(places, after[: op.states], strict=False)]
            if places[: op.states] == joined:
                break
            places[: op.states] = joined
            after = self._through_body(op.body.graph, other.body.graph, places)
        if places[: op.states] != after[: op.states]:
            raise MixesError("a step of a loop moves it")
        return [*after[: op.states], *(r and RowPlace(r.axis + 1, r.outer) for r in after[op.states :])]

    def _through_body(self, small: Graph, large: Graph, places: Sequence[RowPlace | None]) -> list[RowPlace | None]:
        inner = _Proof(small, large, self.n, self.m)
        inner.twin = dict(zip(small.inputs, large.inputs, strict=True))
        inner.rows = {value: row for value, row in zip(small.inputs, places, strict=True) if row is not None}
        for value, row in zip(small.inputs, places, strict=True):
            inner._check(value, inner.twin[value], row)
        try:
            inner._nodes()
        except ModelError as reason:
            raise MixesError(str(reason)) from None
        self.rows |= inner.rows
        return [inner.rows.get(value) for value in small.outputs]


def _differing(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the only dim in which two shapes differ."""
    places = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if len(a) != len(b) or len(places) != 1:
        raise MixesError("more than one dim depends on it")
    return places[0]
