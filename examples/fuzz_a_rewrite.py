"""A rewrite with a mistake in it, for the fuzzer to find: `fusec fuzz --property examples/fuzz_a_rewrite.py:check`.

Run as a script, it does that and prints the reduced graph. docs/fuzzing.md tells the story.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from fusec.ir import Graph
from fusec.ops import pw
from fusec.testing import keeps_meaning
from fusec.testing.fuzz import fuzz


def common_factor(graph: Graph) -> None:
    """a*c + b*c = (a + b)*c. The mistake: where the second product has its factor on the left, the wrong
    operand is taken for the common one."""
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
    """The rewrite changes no answer."""
    keeps_meaning(graph, common_factor)


def main() -> None:
    """Find the mistake."""
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
