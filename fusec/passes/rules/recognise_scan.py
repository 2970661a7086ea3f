"""Recognise a selective scan (Mamba), which exporters write out step by step.

A step is h_t = a_t h_{t-1} + b_t, and often y_t = h_t c_t, with slices of a, b and c. All steps of h become one
`linear_scan`. The products become one product with all of c and a sum, and a concat of all steps of y is that sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.ir import Graph, Node, Value
from fusec.ops import Cast, Concat, LinearScan, MatMul, Reduce, Reshape, Slice, Split, Transpose, pw
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.value_facts import all_equal
from fusec.system.dataclass import dataclass

LEAST_STEPS = 2


@dataclass(frozen=True)
class _Piece:
    """Element number `at` of a tensor along `axis`."""

    whole: Value
    axis: int
    at: int


def _piece(value: Value, shape: Sequence[int]) -> _Piece | None:
    """Return what a value is an element of; None if it is none, or has another shape than an element has.

    shape: the dims that the element has, up to dims of one.
    """
    while value.node is not None and _is_view(value.node):
        (value,) = value.node.operands
    node = value.node
    if node is None or not isinstance(node.op, (Slice, Split)):
        return None
    (whole,) = node.operands
    sizes = value.type.shape
    cut = [d for d, (size, all_of) in enumerate(zip(sizes, whole.type.shape, strict=True)) if size != all_of]
    if len(cut) != 1 or sizes[cut[0]] != 1:
        return None
    (axis,) = cut
    at = node.op.starts[axis] if isinstance(node.op, Slice) else sum(node.op.sizes[: node.results.index(value)])
    rest = [size for d, size in enumerate(whole.type.shape) if d != axis and size != 1]
    return _Piece(whole, axis, at) if rest == [size for size in shape if size != 1] else None


def _is_view(node: Node) -> bool:
    """Tell if a node gives all elements of its operand in another shape."""
    whole = isinstance(node.op, Slice) and node.op.sizes == node.operands[0].type.shape
    return whole or isinstance(node.op, Reshape)


@dataclass
class _Scan:
    """A recurrence over all steps of a and b."""

    a: Value
    b: Value
    axis: int
    states: list[Value]

    @classmethod
    def beginning(cls, add: Node) -> _Scan | None:
        """Return the scan whose first step is an addition; None if there is none over all elements."""
        step = _step(add)
        if step is None or not all_equal(step[1], 0.0):
            return None
        a, _, b = step
        if a.at or b.at or a.axis != b.axis or a.whole.type != b.whole.type:
            return None
        found = cls(a.whole, b.whole, a.axis, [add.result])
        before, after = a.whole.type.shape[: a.axis], a.whole.type.shape[a.axis + 1 :]
        if add.result.type.shape not in ((*before, *after), (*before, 1, *after)):
            return None
        while len(found.states) < a.whole.type.shape[a.axis]:
            following = found.following()
            if following is None:
                return None
            found.states.append(following)
        return found if len(found.states) >= LEAST_STEPS else None

    def following(self) -> Value | None:
        """Return the state after the last one that is known."""
        number, state = len(self.states), self.states[-1]
        wanted = [_Piece(whole, self.axis, number) for whole in (self.a, self.b)]
        for product in state.users:
            for add in product.results[0].users if product.op == pw("mul") else ():
                step = _step(add)
                if step is not None and step[1] is state and [step[0], step[2]] == wanted:
                    return add.result
        return None


def _step(add: Node) -> tuple[_Piece, Value, _Piece] | None:
    """Return the element of a, the state before, and the element of b, of an addition that is a step."""
    if add.op != pw("add") or add.result.literal is not None:
        return None
    shape = add.result.type.shape
    for product, term in (add.operands, add.operands[::-1]):
        b = _piece(term, shape)
        if b is None or product.node is None or product.node.op != pw("mul"):
            continue
        for factor, state in (product.node.operands, product.node.operands[::-1]):
            a = _piece(factor, shape)
            if a is not None and (state.type.shape == shape or all_equal(state, 0.0)):
                return a, state, b
    return None


class RecogniseScan(Pass):
    """Recognise a recurrence that is written out step by step, and the products of its states."""

    name = "recognise_scan"

    def run(self, graph: Graph, options: Options) -> None:
        """Replace each scan by one op, and its states by slices of the result."""
        scans = [scan for node in graph.nodes if (scan := _Scan.beginning(node)) is not None]
        for scan in scans:
            _replace(graph, scan)
        for node in list(graph.nodes) if scans else ():
            _replace_stack(graph, node)


def _replace(graph: Graph, scan: _Scan) -> None:
    first = scan.states[0].node  # a and b are complete there, because it reads slices of them
    assert first is not None
    h = graph.add(LinearScan(scan.axis), scan.a, scan.b, before=first)
    products = [_product(state, number) for number, state in enumerate(scan.states)]
    if all(product is not None for product in products):
        _replace_products(graph, h, scan.axis, [product for product in products if product is not None])
    for number, state in enumerate(scan.states):
        if state.uses:
            assert state.node is not None
            graph.replace(state, _element(graph, h, scan.axis, number, state))


def _element(graph: Graph, whole: Value, axis: int, number: int, like: Value) -> Value:
    """Slice an element of a tensor, in the shape of a value that it replaces."""
    shape = whole.type.shape
    starts = tuple(number if d == axis else 0 for d in range(len(shape)))
    sizes = tuple(1 if d == axis else size for d, size in enumerate(shape))
    node = like.node
    assert node is not None
    part = graph.add(Slice(starts, sizes, (1,) * len(shape)), whole, before=node)
    return graph.add(Reshape(like.type.shape), part, before=node)


@dataclass(frozen=True)
class _Product:
    """Product of a state, or of its cast, with an element of c."""

    result: Value
    cast: Cast | None
    c: _Piece


def _product(state: Value, number: int) -> _Product | None:
    """Return the product of a state with element `number` of some c; None if there is none or more than one."""
    found: list[_Product] = []
    for user in state.users:
        cast = user.op if isinstance(user.op, Cast) else None
        for product in [user] if cast is None else user.results[0].users:
            if not isinstance(product.op, MatMul) or product.op != MatMul():
                continue
            left, right = product.operands
            inner = right.type.shape
            if left is not (state if cast is None else user.results[0]) or inner[-1] != 1:
                continue
            c = _piece(right, inner)
            lead = state.type.shape[:-2]
            if c is not None and c.at == number and inner[:-2] == lead and _is_rows(c, (*lead, inner[-2])):
                found.append(_Product(product.result, cast, c))
    return found[0] if len(found) == 1 else None


def _is_rows(c: _Piece, shape: tuple[int, ...]) -> bool:
    """Tell if c has the dims of an element, with the steps before the last of them."""
    whole = c.whole.type.shape
    return c.axis == len(whole) - 2 and (*whole[: c.axis], whole[-1]) == shape


def _replace_products(graph: Graph, h: Value, axis: int, products: Sequence[_Product]) -> None:
    """Replace the products of all steps by slices of one sum of products, where they are all of one c."""
    first, steps, rank = products[0], h.type.shape[axis], h.type.rank
    same = all((each.c.whole, each.cast) == (first.c.whole, first.cast) for each in products)
    if not same or axis not in (rank - 3, rank - 2) or first.c.whole.type.shape[-2] != steps:
        return
    places = {node: place for place, node in enumerate(graph.nodes)}
    before = min((each.result.node for each in products if each.result.node), key=places.__getitem__)
    lead, width = h.type.shape[: rank - 3], h.type.shape[-1]
    shape = (*lead, 1, steps, width) if axis == rank - 2 else (*lead, steps, 1, width)
    assert math.prod(shape) == first.c.whole.type.size
    states = h if first.cast is None else graph.add(first.cast, h, before=before)
    c = graph.add(Reshape(shape), first.c.whole, before=before)
    y = graph.add(Reduce("sum", (rank - 1,), True), graph.add(pw("mul"), states, c, before=before), before=before)
    for number, product in enumerate(products):
        graph.replace(product.result, _element(graph, y, axis, number, product.result))


def _replace_stack(graph: Graph, node: Node) -> None:
    """Replace a concat of all elements of one tensor, in order, by that tensor."""
    if not isinstance(node.op, Concat):
        return
    result = node.result.type.shape
    axis = node.op.axis % len(result)
    pieces = [_piece(value, value.type.shape) for value in node.operands]
    first = pieces[0]
    if first is None or any(value.type.shape[axis] != 1 for value in node.operands):
        return
    if pieces != [_Piece(first.whole, first.axis, at) for at in range(first.whole.type.shape[first.axis])]:
        return
    shape = first.whole.type.shape
    order = [d for d in range(len(shape)) if d != first.axis]
    before = sum(size != 1 for size in result[:axis])  # dims that the steps come after
    place = next(p for p in range(len(shape)) if sum(shape[d] != 1 for d in order[:p]) == before)
    order.insert(place, first.axis)
    moved = graph.add(Transpose(tuple(order)), first.whole, before=node)
    graph.replace(node.result, graph.add(Reshape(result), moved, before=node))
