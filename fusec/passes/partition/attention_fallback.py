"""Expand attention that cuDNN refused into products and a softmax, and partition the graph again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fusec.ir import Graph
from fusec.ops import ATTENTION_OPS
from fusec.passes import LATE_PASSES
from fusec.passes.attention.expand_attention import expand
from fusec.passes.base import Options, run
from fusec.passes.partition.judge import Judge
from fusec.plans.verdict import UNASKED, Refused
from fusec.schedule.program import Kind, Program, Refusal

Partitioner = Callable[[Graph], Program]


def expand_refused_attention(
    program: Program, early: Callable[[], Graph], split: Partitioner, judge: Judge, options: Options
) -> Program:
    """Expand attention that was left to a kernel, and partition again; without any, return the program.

    cuDNN has no engine for such attention, but it has engines for its products.

    early: makes the graph again, as it was before LATE_PASSES
    split: partitions a graph
    """
    left = [s for s in program.steps if s.kind is Kind.KERNEL and isinstance(s.nodes[0].op, ATTENTION_OPS)]
    verdicts = dict(zip(left, judge.judge([step.body for step in left]), strict=True)) if left else {}
    left = [step for step in left if verdicts[step] != UNASKED]  # its products would not be asked about either
    if not left:
        return program
    graph = early()
    written = expand(graph, {step.nodes[0].results[0].name for step in left})
    again = split(run(LATE_PASSES, graph, options))
    made = {v.name: v.node for v in again.graph.values() if v.node is not None}
    refusals: list[Refusal] = []
    for step in left:
        nodes = tuple(made[name] for name in written.get(step.nodes[0].results[0].name, ()) if name in made)
        verdict = verdicts[step]
        if nodes and isinstance(verdict, Refused):
            refusals.append(Refusal(nodes, step.body, verdict))
    return replace(again, refusals=(*again.refusals, *refusals))
