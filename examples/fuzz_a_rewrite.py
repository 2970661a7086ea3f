"""Find a mistake in a rewrite with the fuzzer: `fusec fuzz --property examples/fuzz_a_rewrite.py:check`.

As a script, it runs the fuzzer and prints the reduced graph. docs/fuzzing.md explains it step by step.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fusec.ir import Graph
from fusec.ops import pw
from fusec.testing import keeps_meaning
from fusec.testing.fuzz import fuzz


def common_factor(graph: Graph) -> None:
    """Rewrite a*c + b*c as (a + b)*c.

    The mistake: if the second product has the common factor on the left, the rewrite keeps the wrong operand.
    """
    for node in list(graph.nodes):
        if node.op.name != "add" or any(v.node is None or v.node.op.name != "mul" for v in node.operands):
            continue
        left, right = (v.node for v in node.operands)
        assert left is not None and right is not None
        (a, c), (b, _) = left.operands, right.operands
        if c not in right.operands:
            continue
        if a.type != b.type or c.type != a.type or node.result.type != a.type:
            continue
        total = graph.add(pw("add"), a, b, before=node)
        graph.replace(node.result, graph.add(pw("mul"), total, c, before=node))
        graph.erase(node)


def check(graph: Graph) -> None:
    """Check that the rewrite changes no result."""
    keeps_meaning(graph, common_factor)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        report = fuzz(
            [f"{__file__}:check"],
            examples=4000,
            max_findings=1,
            database=folder / "database",
            findings=folder / "findings",
        )
        print(f"{report.examples} graphs")
        for finding in report.findings:
            print(finding.message)
            print((Path(finding.folder) / "graph.txt").read_text())


if __name__ == "__main__":
    main()
