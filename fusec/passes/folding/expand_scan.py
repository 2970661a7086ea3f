"""Expand scans that no kernel runs: each step becomes nodes of its own.

Large products, for instance, take less time as launches of many blocks than in the one block of a scan.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.ir import Graph, Node, Op, Value
from fusec.lowering.scan_plan import scan_plan
from fusec.lowering.unroll_scan import unroll_scan
from fusec.ops import Scan
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import erase_unused


class ExpandScan(Pass):
    """Expand scans that the op's kernel does not run."""

    name = "expand_scan"

    def run(self, graph: Graph, options: Options) -> None:
        while found := [n for n in graph.nodes if isinstance(n.op, Scan) and scan_plan(n.op) is None]:
            for node in found:  # a body may have scans, too
                assert isinstance(node.op, Scan)
                expand_scan(graph, node, node.op)


def expand_scan(graph: Graph, node: Node, op: Scan) -> None:
    """Replace a scan by the nodes of all its steps."""

    def add(made: Op, operands: Sequence[Value]) -> Sequence[Value]:
        return graph.insert(made, operands, before=node, origin=node.origin).results

    for old, new in zip(node.results, unroll_scan(op, node.operands, add), strict=True):
        if old.uses:
            graph.replace(old, new)
    erase_unused(graph, node)
