"""Expand scans that no kernel runs: each step becomes nodes of its own.

Large products, for instance, need more blocks than a scan has.
"""

from __future__ import annotations

from fusec.ir import Graph
from fusec.lowering.scan_plan import scan_plan
from fusec.lowering.unroll_scan import unroll_all
from fusec.passes.base import Options, Pass


class ExpandScan(Pass):
    """Expand scans that the op's kernel does not run."""

    name = "expand_scan"

    def run(self, graph: Graph, options: Options) -> None:
        unroll_all(graph, lambda op: scan_plan(op) is None)
