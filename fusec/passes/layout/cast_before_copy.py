"""Move the narrowing cast of an input past views, next to the op that copies its elements.

So one kernel reads the input in fp32 and stores its patches, for example, in 16 bits. The pass runs after the layout,
because that decides what copies.
"""

from __future__ import annotations

from fusec.ir import Graph, Node, Value
from fusec.ops import Cast, Reshape, Transpose
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import single_use, substitute
from fusec.schedule.aliasing import is_view


class CastBeforeCopy(Pass):
    """Move narrowing casts of inputs past views, up to an op that copies."""

    name = "cast_before_copy"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, Cast) and node.operands[0].node is None and _narrows(node):
                _move(graph, node)


def _narrows(node: Node) -> bool:
    return node.result.type.dtype.bits < node.operands[0].type.dtype.bits


def _move(graph: Graph, cast: Node) -> None:
    """Move a cast past the views of its result if an op after them copies."""
    views: list[Node] = []
    value: Value = cast.result
    while single_use(value) and isinstance((user := value.users[0]).op, (Reshape, Transpose)):
        if not is_view(user):
            break
        views.append(user)
        value = user.result
    else:
        return
    source = cast.operands[0]
    for view in views:
        type = view.result.type.with_dtype(source.type.dtype)
        source = graph.insert(view.op, [source], before=views[-1], types=[type]).result
    if views:
        moved = graph.insert(cast.op, [source], before=views[-1], types=[value.type]).result
        substitute(graph, value, moved, fresh=True)
