"""Write out the steps of a scan as ops of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from fusec.ir import Graph, Node, Op, Value
from fusec.ops import Concat, Reshape, Scan, Slice

AddOp = Callable[[Op, Sequence[Value]], Sequence[Value]]  # adds an op with these operands, and returns its results


def unroll_scan(op: Scan, operands: Sequence[Value], add: AddOp) -> list[Value]:
    """Add the ops of all steps, and return the results of the scan."""
    count, first = op.states, op.states + op.sequences
    state, sequences, shared = list(operands[:count]), operands[count:first], operands[first:]
    rows: list[list[Value]] = [[] for _ in op.body.graph.outputs[count:]]
    for step in range(op.steps):
        results = add_step(op, [*state, *(_row(v, step, add) for v in sequences), *shared], add)
        state = results[:count]
        for items, result in zip(rows, results[count:], strict=True):
            items += add(Reshape((1, *result.type.shape)), [result])
    return [*state, *(items[0] if len(items) == 1 else add(Concat(0), items)[0] for items in rows)]


def unroll_all(graph: Graph, wanted: Callable[[Scan], bool] = lambda op: True) -> None:
    """Replace scans by the nodes of all their steps, also those in bodies. wanted: tells which; default: all."""
    while found := [n for n in graph.nodes if isinstance(n.op, Scan) and wanted(n.op)]:
        for node in found:

            def add(op: Op, operands: Sequence[Value], before: Node = node) -> Sequence[Value]:
                return graph.insert(op, operands, before=before, origin=before.origin).results

            for old, new in zip(node.results, unroll_scan(cast(Scan, node.op), node.operands, add), strict=True):
                if old.uses:
                    graph.replace(old, new)
            graph.erase(node)


def unrolled(graph: Graph) -> Graph:
    """Return a graph without scans: the graph itself if it has none."""
    if not any(isinstance(node.op, Scan) for node in graph.nodes):
        return graph
    made = graph.clone()
    unroll_all(made)
    return made


def _row(value: Value, step: int, add: AddOp) -> Value:
    rank, shape = value.type.rank, value.type.shape[1:]
    (whole,) = add(Slice((step, *[0] * (rank - 1)), (1, *shape), (1,) * rank), [value])
    (row,) = add(Reshape(shape), [whole])
    return row


def add_step(op: Scan, operands: Sequence[Value], add: AddOp) -> list[Value]:
    """Add the ops of one step, and return its results."""
    body = op.body.graph
    made = dict(zip(body.inputs, operands, strict=True))
    for node in body.nodes:
        made.update(zip(node.results, add(node.op, [made[v] for v in node.operands]), strict=True))
    return [made[v] for v in body.outputs]
