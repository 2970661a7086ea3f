"""Partition a graph into steps: cuDNN graphs grown from anchors, views, and kernels for the rest.

convexity.py decides what may be merged, candidates.py what to propose, equivalent_spellings.py in which spelling.
verdict_cache.py asks the judge, cost_model.py models times, and cover.py chooses. docs/partitioning.md gives reasons.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

from fusec.ir import Constant, Graph, Node
from fusec.ops import ANCHORS, POINTWISE_OPS
from fusec.passes.partition.convexity import Wiring
from fusec.passes.partition.cover import CoverSearch
from fusec.passes.partition.equivalent_spellings import respell
from fusec.passes.partition.judge import Judge
from fusec.schedule.multi_tensor import multi_tensor_steps
from fusec.schedule.program import Kind, Partition, Program, Refusal, body_of, single_step
from fusec.schedule.row_writes import row_write_steps
from fusec.targets.target import Target

UNPROPOSED = (
    "fusec does not ask cuDNN: the op is neither an anchor (convolution, product, norm, reduction) nor pointwise"
)


def partition(
    graph: Graph,
    judge: Judge,
    target: Target,
    progress: Callable[[int, int], None] | None = None,
    state: Mapping[str, str] | None = None,
) -> Program:
    """Partition the graph into steps in dependency order; the judge has accepted each cuDNN step.

    The result is deterministic: the same graph, target and verdicts give the same program. The graph is not changed.

    progress: is called with the number of judged bodies, and of bodies known so far
    state: inputs that stay on the device, with the outputs that replace them
    """
    kernel_steps = [*multi_tensor_steps(graph, state or {}), *row_write_steps(graph)]
    planner = CoverSearch(graph, judge, target, progress, kernel_steps)
    plan = planner.run()
    steps: list[Partition] = []
    refusals = planner.refusals(plan)
    taken: set[int] = set()
    for numbers, answer in plan.steps:
        nodes = planner.nodes(numbers)
        accepted = answer.legal
        assert accepted is not None
        names, verdict = accepted
        body = respell(body_of(graph, nodes), names)
        steps.append(Partition(nodes, Kind.CUDNN, body, names, verdict))
        taken.update(numbers)
    for numbers in planner.kernel_steps:
        nodes = planner.nodes(numbers)
        steps.append(Partition(nodes, Kind.KERNEL, body_of(graph, nodes)))
        taken.update(numbers)
    for i, node in enumerate(planner.wiring.nodes):
        if i in taken:
            continue
        step = single_step(graph, node)
        steps.append(step)
        if step.kind is Kind.KERNEL and not isinstance(node.op, (*ANCHORS, *POINTWISE_OPS)):
            refusals.append(Refusal((node,), step.body, UNPROPOSED))
    program = Program(graph, ordered(steps, planner.wiring), tuple(refusals))
    program.verify()
    return program


def kernels_only(graph: Graph) -> Program:
    """Make a program of one kernel or view per node, without asking cuDNN."""
    return Program(graph, tuple(single_step(graph, node) for node in graph.nodes if not isinstance(node.op, Constant)))


def ordered(steps: Sequence[Partition], wiring: Wiring) -> tuple[Partition, ...]:
    """Sort steps by dependency; among ready steps, the one that begins first in the graph.

    networkx.lexicographical_topological_sort gives the same order, but takes 23 times the time for 2,000 steps. The
    import of networkx alone takes the time of 100 such sorts here.
    """
    step_of: dict[Node, int] = {node: s for s, step in enumerate(steps) for node in step.nodes}
    of = [step_of[node] for node in wiring.nodes]
    edges = dict.fromkeys((of[p], of[i]) for i, preds in enumerate(wiring.preds) for p in preds if of[p] != of[i])
    followers: list[list[int]] = [[] for _ in steps]
    missing = [0] * len(steps)
    for before, after in edges:
        followers[before].append(after)
        missing[after] += 1
    begins = [wiring.index[step.nodes[0]] for step in steps]
    ready = [(begins[s], s) for s in range(len(steps)) if not missing[s]]
    heapq.heapify(ready)
    result: list[Partition] = []
    while ready:
        _, s = heapq.heappop(ready)
        result.append(steps[s])
        for after in followers[s]:
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, (begins[after], after))
    assert len(result) == len(steps), "the condensation has a cycle"
    return tuple(result)
