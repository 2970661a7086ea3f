"""What is done where cuDNN declines attention as one step: it is written out, and the graph cut again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusec.ir import Graph
from fusec.passes import FINISH
from fusec.passes.attention.expand_attention import expand
from fusec.passes.base import Options, run
from fusec.passes.partition.candidates import ATTENTIONS
from fusec.passes.partition.oracle import Oracle
from fusec.plans.verdict import Refused
from fusec.schedule.program import Kind, Program, Refusal

Cut = Callable[[Graph], Program]


def settle(program: Program, unlaid: Callable[[], Graph], cut: Cut, oracle: Oracle, options: Options) -> Program:
    """The program as it is, or, if attention was left to a kernel, that of the same graph with it written out.

    unlaid: makes the graph once more as it was before what FINISH does. cut: the partitioner.
    """
    left = [s for s in program.steps if s.kind is Kind.KERNEL and isinstance(s.nodes[0].op, ATTENTIONS)]
    if not left:
        return program
    graph = unlaid()
    written = expand(graph, {step.nodes[0].results[0].name for step in left})
    again = cut(run(FINISH, graph, options))
    made = {v.name: v.node for v in again.graph.values() if v.node is not None}
    refusals: list[Refusal] = []
    for step, verdict in zip(left, oracle.judge([step.body for step in left]), strict=True):
        nodes = tuple(made[name] for name in written.get(step.nodes[0].results[0].name, ()) if name in made)
        if nodes and isinstance(verdict, Refused):
            refusals.append(Refusal(nodes, step.body, verdict))
    return replace(again, refusals=(*again.refusals, *refusals))
