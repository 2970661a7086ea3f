"""Read the program of a `.fusec` file: steps, refusals, and the bodies of steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fusec.gpu.cudnn.legality.verdict_json import decode
from fusec.ir import Constant, Graph, Literal, Node
from fusec.passes.partition.equivalent_spellings import REWRITES, respell
from fusec.passes.rewriting.derived_constants import EAGER_BYTES
from fusec.plans.verdict import Legal
from fusec.schedule.program import Kind, Partition, Program, Refusal, body_of
from fusec.text import parse


def read_program(
    graph: Graph, data: Mapping[str, Any], weights: Mapping[str, Literal], derived: dict[Hashable, Literal]
) -> Program:
    """Read the steps and refusals of a program from plain data, and verify it.

    graph: the graph of the program, whose nodes the data names by number.
    weights: constants by digest.
    derived: constants that steps computed from the graph's, which programs share.
    Raises ValueError or VerifyError: when the data is no program of this graph.
    """
    nodes = list(graph.nodes)
    steps: list[Partition] = []
    for item in data["steps"]:
        members = _nodes(nodes, item["nodes"])
        if unknown := [name for name in item["spelling"] if name not in REWRITES]:
            raise ValueError(f"no rewrite is named {unknown[0]!r}")
        if item["body"] is None:
            body = respell(body_of(graph, members), tuple(item["spelling"]))
            _share(body, derived)
        else:
            body = parse(item["body"], weights)
        verdict = None if item["verdict"] is None else decode(item["verdict"])
        if verdict is not None and not isinstance(verdict, Legal):
            raise ValueError("a step that cuDNN refused")
        steps.append(Partition(members, Kind(item["kind"]), body, tuple(map(str, item["spelling"])), verdict))
    refusals: list[Refusal] = []
    for item in data["refusals"]:
        members = _nodes(nodes, item["nodes"])
        if not members:
            raise ValueError("a refusal of no nodes")
        reason = item["reason"] if isinstance(item["reason"], str) else decode(item["reason"])
        if isinstance(reason, Legal):
            raise ValueError("a refusal that cuDNN accepted")
        refusals.append(Refusal(members, body_of(graph, members), reason))
    program = Program(graph, tuple(steps), tuple(refusals))
    program.verify()
    return program


def _share(body: Graph, derived: dict[Hashable, Literal]) -> None:
    """Replace the constants of a body by equal ones of the bodies before, so that programs share their memory."""
    for node in body.nodes:
        if isinstance(node.op, Constant):
            literal = node.op.literal
            key = literal.key if literal.type.nbytes > EAGER_BYTES else literal.digest
            held = derived.setdefault((key, literal.label), literal)
            if held is not literal:
                body.set_op(node, Constant(held))


def _nodes(nodes: Sequence[Node], numbers: Sequence[int]) -> tuple[Node, ...]:
    if any(type(i) is not int or i < 0 for i in numbers) or sorted(set(numbers)) != list(numbers):
        raise ValueError(f"nodes {numbers}")
    return tuple(nodes[i] for i in numbers)
