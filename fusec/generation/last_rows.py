"""Find the ops at the end of a decoder that only the last token of a prompt needs."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.ir import Graph, Node, Value
from fusec.ops import POINTWISE_OPS, LayerNorm, MatMul, RmsNorm


def ops_of_last_rows(graph: Graph, logits: Value, rows: tuple[int, int]) -> set[Node]:
    """Return the nodes that may compute one row for each sequence, where the model computes one for each token.

    Only the scores after the last token of a prompt are used. So the product with the vocabulary, often the largest of
    the model, needs one row for each sequence. The same holds for the ops before it that work row by row and that
    nothing else reads.

    rows: batch and length, the first two dims of the logits.
    """
    found: set[Node] = set()
    for node in reversed(list(graph.nodes)):
        results = [v for v in node.results if v.uses]
        for value in results:
            at_end = value is logits and all(user is graph.return_node for user in value.users)
            if not at_end and not found.issuperset(value.users):
                break
        else:
            if results and _row_by_row(node, rows):
                found.add(node)
    return found


def has_rows(value: Value, rows: Sequence[int]) -> bool:
    """Tell if a value has one row for each token: [batch, length, features]."""
    return value.type.rank == 3 and value.type.shape[:2] == tuple(rows)


def _row_by_row(node: Node, rows: tuple[int, int]) -> bool:
    if len(node.results) > 1 or not has_rows(node.result, rows):
        return False
    first, *others = node.operands
    if isinstance(node.op, POINTWISE_OPS):
        return all(has_rows(v, rows) or v.type.rank < 2 or v.type.shape[-2] == 1 for v in node.operands)
    if isinstance(node.op, MatMul):
        return has_rows(first, rows) and all(v.type.rank == 2 for v in others)
    if isinstance(node.op, (LayerNorm, RmsNorm)):
        return node.op.axis % 3 == 2 and all(v.type.rank == 1 for v in others)
    return False
