"""Expand attention and flipped convolutions that cuDNN refused into other ops, and partition the graph again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from fusec.ir import Graph
from fusec.ops import ATTENTION_OPS, FlippedConv
from fusec.passes import LATE_PASSES
from fusec.passes.attention.expand_attention import expand
from fusec.passes.base import Options, run
from fusec.passes.cleanup.reverse_filters import expand_flipped, unflipped
from fusec.passes.partition.judge import Judge
from fusec.plans.verdict import UNASKED, Legal, Refused, Verdict
from fusec.schedule.program import Kind, Program, Refusal

Partitioner = Callable[[Graph], Program]
Refusals = Mapping[str, tuple[Graph, Verdict]]  # by the name of an op's first result: what was refused, and why
EXPANDED = (*ATTENTION_OPS, FlippedConv)


def expand_refused(
    program: Program, early: Callable[[], Graph], split: Partitioner, judge: Judge, options: Options
) -> Program:
    """Expand attention and flipped convolutions that cuDNN refused, and partition again.

    cuDNN has engines for the products of such attention, and for plain convolutions. Without any such op, the program
    is returned.

    early: makes the graph again, as it was before LATE_PASSES
    split: partitions a graph
    """
    refused = {**_refused_by_others(program, judge), **_refused_alone(program, judge)}
    if not refused:
        return program
    graph = early()
    written = {**expand(graph, refused), **expand_flipped(graph, refused)}
    again = split(run(LATE_PASSES, graph, options))
    made = {v.name: v.node for v in again.graph.values() if v.node is not None}
    refusals: list[Refusal] = []
    for name, (body, verdict) in refused.items():
        nodes = tuple(made[part] for part in written.get(name, ()) if part in made)
        if nodes and isinstance(verdict, Refused):
            refusals.append(Refusal(nodes, body, verdict))
    return replace(again, refusals=(*again.refusals, *refusals))


def _refused_alone(program: Program, judge: Judge) -> Refusals:
    """Find the ops that were left to a kernel."""
    left = [s for s in program.steps if s.kind is Kind.KERNEL and isinstance(s.nodes[0].op, EXPANDED)]
    verdicts = judge.judge([step.body for step in left]) if left else []
    return {
        step.nodes[0].results[0].name: (step.body, verdict)
        for step, verdict in zip(left, verdicts, strict=True)
        # the products of attention would not be asked about either, but kernels may run a plain convolution
        if verdict != UNASKED or isinstance(step.nodes[0].op, FlippedConv)
    }


def _refused_by_others(program: Program, judge: Judge) -> Refusals:
    """Find flipped convolutions that cuDNN runs alone, while it would run plain ones together with their neighbours.

    Engines that are compiled for an epilogue do not reverse filters. A kernel that reverses them moves fewer bytes than
    a step that reads the result of the convolution again, unless the filters are larger than that result.
    """
    found: list[tuple[str, Graph, Refused]] = []
    for refusal in program.refusals:
        for node in refusal.nodes if len(refusal.nodes) > 1 else ():
            small = isinstance(node.op, FlippedConv) and node.operands[1].type.nbytes <= node.result.type.nbytes
            if small and program.step_of[node].kind is Kind.CUDNN and isinstance(refusal.reason, Refused):
                found.append((node.result.name, refusal.body, refusal.reason))
    verdicts = judge.judge([unflipped(body) for _, body, _ in found]) if found else []
    return {
        name: (body, reason)
        for (name, body, reason), verdict in zip(found, verdicts, strict=True)
        if isinstance(verdict, Legal)
    }
