"""Undo a reduction's loss of dims where a reshape restores them, so that patterns of norms and softmax are one each."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from fusec.ir import Graph, Node, Value
from fusec.ops import Cast, Pointwise, Reduce
from fusec.passes.rewriting.rewriter import local

MOST_NODES = 16  # between a reduction and the reshape after it


@local("reshape", equation="reshape(f(reduce(x))) = f(reduce(x, keepdims=true)) for pointwise f")
def keep_reduced_dims(graph: Graph, node: Node) -> Value | None:
    """Undo a reduction's loss of dims where a reshape restores them, if only pointwise ops are between the two."""
    (value,) = node.operands
    reductions = _reductions(value)
    if not reductions:
        return None
    first = cast(Reduce, reductions[0].op)
    shape = reductions[0].operands[0].type.shape
    if any(cast(Reduce, r.op).axes != first.axes or r.operands[0].type.shape != shape for r in reductions):
        return None
    if node.result.type.shape != tuple(1 if i in first.axes else d for i, d in enumerate(shape)):
        return None
    return _with_dims(graph, value, node, {})


def _reductions(value: Value) -> list[Node]:
    """Return the reductions that pointwise ops compute a value from; none if it depends on something else."""
    found: dict[Node, None] = {}
    seen, waiting = set[Value](), [value]
    while waiting:
        one = waiting.pop()
        if one in seen or (one.literal is not None and one.type.size == 1):
            continue
        seen.add(one)
        node = one.node
        if node is None or len(seen) > MOST_NODES or one.type.shape != value.type.shape:
            return []
        if isinstance(node.op, Reduce) and not node.op.keepdims and node.op.axes:
            found[node] = None
        elif isinstance(node.op, Pointwise | Cast) and node.operands:
            waiting += node.operands
        else:
            return []
    return list(found)


def _with_dims(graph: Graph, value: Value, before: Node, made: dict[Value, Value]) -> Value:
    """Compute a value anew from reductions that keep their dims."""
    if value.literal is not None:
        return value
    if value not in made:
        node = value.node
        assert node is not None
        if isinstance(node.op, Reduce):
            made[value] = graph.add(replace(node.op, keepdims=True), node.operands[0], before=before)
        else:
            operands = [_with_dims(graph, v, before, made) for v in node.operands]
            made[value] = graph.add(node.op, *operands, before=before)
    return made[value]
