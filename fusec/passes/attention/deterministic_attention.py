"""Gradients of attention summed in a fixed order, the same bits every time, where that was asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fusec.ir import Graph
from fusec.ops import AttentionBackward
from fusec.passes.base import Options


@dataclass(frozen=True)
class OrderGradients:
    """See the module."""

    name: ClassVar[str] = "order_gradients"

    def run(self, graph: Graph, options: Options) -> None:
        if not options.deterministic:
            return
        for node in list(graph.nodes):
            if isinstance(node.op, AttentionBackward):
                graph.set_op(node, replace(node.op, ordered=True))
