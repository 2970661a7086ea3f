"""Draw loops whose bodies are random graphs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from fusec.ir import INLINE_ELEMENTS, Body, Constant, DType, Node, TensorType, Value
from fusec.lowering.indexed_dims import indexed_sizes
from fusec.ops import BY_NAME, CLASSES, Reduce, Scan
from fusec.testing.generators.graph_builder import Draw, RandomGraph, Unfit
from fusec.testing.generators.operations import pointwise, products, rows, shapes

MOST_ELEMENTS = 100  # of a value of a body, because all steps are computed in the tests
MOST_NODES = 30  # of a body, for the same reason

_POINTWISE = tuple(pointwise.drawing(name) for name in ("add", "mul", "sub", "max", "where", "relu", "sigmoid", "neg"))
_MOVES = (shapes.slice_, shapes.pad, shapes.concat, shapes.transpose, shapes.reshape, shapes.expand, shapes.gather)


def _any_pointwise(b: RandomGraph) -> None:
    pointwise.draw_pointwise(b, b.pick(list(CLASSES)))


_KINDS: tuple[Draw, ...] = (
    *_POINTWISE,
    *_MOVES,
    *(_any_pointwise, rows.reduce) * 3,
    *(pointwise.cast, products.matmul) * 2,
    *(shapes.split, shapes.relayout),
    *(rows.softmax, rows.cumulate),  # no kernel of a scan runs these: their loops become nodes of each step
)


def scan(b: RandomGraph) -> None:
    """Draw a loop of one or two states, up to two sequences, and up to two values that all steps read."""
    body = b.nested()
    body.most_elements = MOST_ELEMENTS
    steps = b.pick([3, 1, 2, 5, 12])
    states = [_state(b, body) for _ in range(b.pick([1, 1, 2]))]
    sequences = [_row(body, states[0]) for _ in range(b.pick([1, 0, 2]))]
    for _ in range(b.pick([1, 0, 2])):
        _row(body, states[0])
    for _ in range(b.between(1, 4)):
        with suppress(Unfit):
            body.pick(_KINDS)(body)
    if b.chance(4) and not b.is_nested:
        with suppress(Unfit):
            scan(body)
    made = [v for v in body.values if v.node is not None and not isinstance(v.node.op, Constant)]
    nexts = [_next_state(body, state, made) for state in states]
    unread = [v for v in made if not v.uses and v not in nexts]
    run(b, body, (nexts, unread[-2:] if not b.chance(15) else [states[0]]), (steps, len(sequences)))


def run(
    b: RandomGraph, body: RandomGraph, outputs: tuple[Sequence[Value], Sequence[Value]], counts: tuple[int, int]
) -> Node:
    """Add the loop of a drawn body, with values of the graph as operands.

    outputs: the states after a step, and the rows that it gives.
    counts: the number of steps, and of sequences.
    """
    (nexts, given), (steps, sequences) = outputs, counts
    graph = body.graph
    graph.set_outputs([*nexts, *given], [f"y{index}" for index in range(len(nexts) + len(given))])
    graph.prune()
    weights = _lift_constants(body)
    if len(list(graph.nodes)) > MOST_NODES:
        raise Unfit("a long body")
    operands: list[Value] = []
    for index, value in enumerate(graph.inputs):
        type = TensorType(value.type.shape, value.type.dtype)
        if len(nexts) <= index < len(nexts) + sequences:
            type = TensorType((steps, *type.shape), type.dtype)
        operands.append(b.graph.constant(weights[value]) if value in weights else _operand(b, value, type))
    return b.insert(Scan(Body(graph), steps, len(nexts), sequences), *operands)


def _state(b: RandomGraph, body: RandomGraph) -> Value:
    """Draw a state: mostly floats, often of the type of a value of the graph; else a number that counts, or a mask."""
    found = [v.type for v in b.values if v.type.dtype is b.dtype and 0 < v.type.size <= MOST_ELEMENTS]
    if found and body.chance(40):
        type = body.pick(found)
        return body.input(TensorType(type.shape, type.dtype))
    kind = body.below(8)
    dtype = body.dtype if kind < 6 else DType.I64 if kind == 6 else DType.BOOL
    shape = tuple(min(d, 5) for d in body.shape(0 if kind >= 6 else 1, 3))
    return body.input(TensorType(shape if math.prod(shape) <= MOST_ELEMENTS else shape[:1], dtype))


def _row(body: RandomGraph, state: Value) -> Value:
    """Draw what a step reads besides its states: of a state's shape, of one that broadcasts with it, or any."""
    shape = state.type.shape
    kind = body.below(4)
    if kind >= 2:
        shape = body.broadcast_shape(shape) if kind == 2 else body.shape(0, 2)
    return body.input(TensorType(shape, body.pick([body.dtype, body.dtype, body.dtype, DType.BOOL])))


def _next_state(body: RandomGraph, state: Value, made: Sequence[Value]) -> Value:
    """Draw a state after a step, from what the body has computed.

    Floats stay small, because errors of a step would grow with all that follow.
    """
    type = state.type
    same = [v for v in reversed(made) if v.type.same_value_type(type)]
    if not type.dtype.is_float:
        name = "logical_not" if type.dtype is DType.BOOL else "add"
        operands = [state] if name == "logical_not" else [state, body.graph.constant(np.array(1, np.int64))]
        return body.pick(same) if same and body.chance(50) else body.pointwise(name, *operands)
    if same and body.chance(70):
        x = body.pick(same[:3])
    else:
        x = body.pointwise("add", state, _fitted(body, made[-1], type) if made else body.broadcastable(state))
    return body.pointwise("clip", x, min=-1.0, max=1.0) if not body.chance(10) else x


def _fitted(body: RandomGraph, x: Value, type: TensorType) -> Value:
    """Make a value broadcast to a type: what does not fit is reduced."""
    x = body.pointwise("identity", x) if x.type.dtype is type.dtype else body.add(BY_NAME["cast"](to=type.dtype), x)  # type: ignore[call-arg]
    with suppress(ValueError):
        if np.broadcast_shapes(x.type.shape, type.shape) == type.shape:
            return x
    return (
        body.add(Reduce("max", tuple(range(x.type.rank)), False), x) if x.type.size else body.constant((), type.dtype)
    )


def _lift_constants(body: RandomGraph) -> dict[Value, np.ndarray]:
    """Make values that all steps read of the constants that are too large for a body."""
    found: dict[Value, np.ndarray] = {}
    for node in list(body.graph.nodes):
        if isinstance(node.op, Constant) and node.result.type.size > INLINE_ELEMENTS:
            value = body.graph.add_input(f"w{len(found)}", node.result.type)
            found[value] = node.op.literal.array
            body.graph.replace(node.result, value)
    body.graph.prune()
    return found


def _operand(b: RandomGraph, value: Value, type: TensorType) -> Value:
    """Draw an operand for an input of a body. Indices are an input that nothing else reads, or a constant."""
    if sizes := indexed_sizes(value):
        if b.chance(50):
            indices = b.fresh(type)
            if indices in b.values:
                b.values.remove(indices)  # no other op may read the indices, because they have to stay in range
            if indices.node is None:
                return indices
        size = min(sizes)
        numbers = np.array([b.between(-size, size - 1) for _ in range(type.size)], type.dtype.numpy)
        return b.graph.constant(numbers.reshape(type.shape))
    return b.of_type(type)
