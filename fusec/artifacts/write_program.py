"""Write the program of a compiled model as plain data, which `read_program` reads: steps, refusals, bodies of steps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from fusec.execution.compilation import Compiled
from fusec.gpu.cudnn.legality.verdict_json import encode
from fusec.ir import Constant, Graph, Literal, print_graph
from fusec.passes.partition.equivalent_spellings import respell
from fusec.passes.rewriting.derived_constants import EAGER_BYTES
from fusec.schedule.program import Partition, Program, body_of


def program_data(program: Program, text: Callable[[Graph], str]) -> dict[str, Any]:
    """Return steps and refusals as plain data. They name the nodes of the program's graph by number.

    text: prints the body of a step that the graph does not imply
    """
    number = {node: i for i, node in enumerate(program.graph.nodes)}
    steps = [
        {
            "nodes": [number[node] for node in step.nodes],
            "kind": step.kind.value,
            "spelling": list(step.spelling),
            "body": None if _follows(program.graph, step) else text(step.body),
            "verdict": None if step.verdict is None else encode(step.verdict),
        }
        for step in program.steps
    ]
    refusals = [
        {
            "nodes": [number[node] for node in refusal.nodes],
            "reason": refusal.reason if isinstance(refusal.reason, str) else encode(refusal.reason),
        }
        for refusal in program.refusals
    ]
    return {"steps": steps, "refusals": refusals}


def graphs_of(compiled: Compiled) -> list[Graph]:
    """Return the graphs that a file must hold for a program: its own, and bodies that it does not imply."""
    return [compiled.graph, *(s.body for s in compiled.program.steps if not _follows(compiled.graph, s))]


def literals_of(graph: Graph) -> Iterator[Literal]:
    """Iterate over the constants of a graph."""
    return (node.op.literal for node in graph.nodes if isinstance(node.op, Constant))


def _follows(graph: Graph, step: Partition) -> bool:
    """Tell if the graph and the names of the spelling say what the body of a step is.

    Then the file does not hold the body, whose weights are often those of the graph in another order.
    """
    numbers: dict[Hashable, int] = {}

    def label(literal: Literal) -> str:
        large = literal.type.nbytes > EAGER_BYTES
        return f"={numbers.setdefault(literal.key, len(numbers))}" if large else literal.digest

    if not step.spelling:
        return True
    again = respell(body_of(graph, step.nodes), step.spelling)
    return print_graph(again, label=label) == print_graph(step.body, label=label)
