"""Sum the gradients of attention in a fixed order, for the same bits every time, where the caller asked for that."""

from __future__ import annotations

from dataclasses import replace

from fusec.ir import Graph
from fusec.ops import AttentionBackward
from fusec.passes.base import Options, Pass


class DeterministicAttention(Pass):
    """Set `ordered` on gradients of attention."""

    name = "deterministic_attention"

    def run(self, graph: Graph, options: Options) -> None:
        if not options.deterministic:
            return
        for node in list(graph.nodes):
            if isinstance(node.op, AttentionBackward):
                graph.set_op(node, replace(node.op, ordered=True))
