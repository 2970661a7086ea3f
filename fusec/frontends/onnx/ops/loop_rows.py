"""Find the rows that steps of a loop read, and compute for all steps together what depends on no state.

Such a product is then one large product instead of a small one in each step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, MutableMapping

from fusec.frontends.onnx.emission.emit import Emitter
from fusec.ir import Node, Value
from fusec.ops import Cast, Gather, MatMul, Pointwise, Reshape, Transpose

WITH_STEPS = (Pointwise, Cast, MatMul, Reshape, Transpose)  # ops whose operands may have a dim of steps as well
Rows = MutableMapping[Value, Value]  # the tensor with the rows of all steps, by the value that stands for one row


def add_gathered(g: Emitter, rows: Rows, inner: Iterable[Node], trip: Value, steps: int) -> None:
    """Add the rows of tensors that steps read by the number of the step.

    inner: nodes of a step whose first operand is the same in all steps.
    """
    for node in inner:
        if not isinstance(node.op, Gather) or not _is_number(node.operands[1], trip):
            continue
        x = first_dim(g, node.operands[0], node.op.axis % node.operands[0].type.rank)
        if x.type.shape[0] >= steps:
            rows[node.result] = g.reshape(g.window(x, 0, 0, steps), (steps, *node.result.type.shape))


def _is_number(value: Value, trip: Value) -> bool:
    """Tell if a value is the number of the step, in any integer type and with dims of one."""
    while value is not trip and value.node is not None and isinstance(value.node.op, Cast | Reshape):
        if not value.type.dtype.is_int:
            return False
        (value,) = value.node.operands
    return value is trip


def add_computed(g: Emitter, rows: Rows, inner: Iterable[Node], varying: Container[Value], *, has_states: bool) -> None:
    """Add the results of nodes that depend on rows alone. With states, only if products are among them.

    varying: the states, and all values that depend on the step.
    """
    known, found = set(rows), list[Node]()
    for node in inner:
        ready = all(v in known or v not in varying for v in node.operands)
        if ready and node.results[0] not in known and isinstance(node.op, WITH_STEPS):
            found.append(node)
            known.update(node.results)
    if not has_states or any(isinstance(node.op, MatMul) for node in found):
        for node in found:
            rows[node.result] = _of_all_steps(g, node, rows)


def _of_all_steps(g: Emitter, node: Node, rows: Mapping[Value, Value]) -> Value:
    """Apply an op to the rows of all steps. Dims of one keep the steps apart from what broadcasts."""
    op, rank = node.op, node.result.type.rank
    steps = next(rows[v].type.shape[0] for v in node.operands if v in rows)
    if isinstance(op, Reshape):
        return g.reshape(rows[node.operands[0]], (steps, *op.shape))
    if isinstance(op, Transpose):
        return g(Transpose((0, *(d + 1 for d in op.perm))), rows[node.operands[0]])
    wide = [
        g.reshape(rows[v], (steps, *[1] * (rank - v.type.rank), *v.type.shape)) if v in rows else v
        for v in node.operands
    ]
    return g(op, *wide)


def first_dim(g: Emitter, x: Value, axis: int) -> Value:
    """Return a tensor with one of its dims moved to the front."""
    others = [d for d in range(x.type.rank) if d != axis]
    return x if axis == 0 else g(Transpose((axis, *others)), x)


def last_place(g: Emitter, x: Value, axis: int) -> Value:
    """Return a tensor with its first dim moved to another place."""
    others = list(range(1, x.type.rank))
    return x if axis == 0 else g(Transpose((*others[:axis], 0, *others[axis:])), x)
