"""Count passes and rules that fired, and steps, calls and kernels that ran, as coverage.

A fuzzing process wraps the compiler's functions from outside, so the compiler has no code for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

from fusec import lower_cudnn
from fusec.ir import Graph, Node, TensorType, Value
from fusec.passes import PIPELINE, rules_by_pass
from fusec.passes.partition import partition_graph
from fusec.passes.rewriting import rewriter
from fusec.schedule.program import Partition
from fusec.testing.properties import kernels_on_device
from fusec.testing.runner.coverage import Coverage

Current = Callable[[], Coverage | None]
_State = list[tuple[object, tuple[Value, ...], tuple[TensorType, ...]]]


def observe(current: Current) -> None:
    """Wrap the compiler's functions for the rest of this process.

    current: returns the coverage to count into, or None to count nothing.
    """
    rules_of = {name: {rule.name for rule in known} for name, known in rules_by_pass().items()}
    running: list[str] = []  # names of the passes that run, under which rules are counted
    _passes(current, running)
    _rules(current, running, rules_of)
    _steps(current)
    _calls(current)
    count_kernels(current)


def _passes(current: Current, running: list[str]) -> None:
    for kind in dict.fromkeys(type(step) for step in PIPELINE):

        def wrap(name: str, inner: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(inner)
            def run(self: Any, graph: Graph, options: Any) -> None:
                counters = current()
                before = _state(graph) if counters is not None else None
                running.append(name)
                try:
                    inner(self, graph, options)
                finally:
                    running.pop()
                if counters is not None and _state(graph) != before:
                    counters.add("passes", name)

            return run

        cast("Any", kind).run = wrap(kind.name, kind.run)


def _state(graph: Graph) -> _State:
    """Return a state of the graph that differs after any change."""
    return [(n.op, n.operands, tuple(v.type for v in n.results)) for n in (*graph.nodes, graph.return_node)]


def _rules(current: Current, running: list[str], rules_of: dict[str, set[str]]) -> None:
    module = cast("Any", rewriter)
    inner: Callable[[Graph, Any, dict[str, int]], None] = module._sweep

    def sweep(graph: Graph, index: Any, fired: dict[str, int]) -> None:
        before = dict(fired)
        inner(graph, index, fired)
        counters = current()
        step = running[-1] if running else ""
        for name, count in fired.items() if counters is not None else ():
            # a rule that a property runs outside the pipeline counts for the pass that has it
            owner = step if name in rules_of.get(step, ()) else next((s for s, k in rules_of.items() if name in k), "")
            if owner and count > before.get(name, 0):
                cast("Coverage", counters).add("rules", f"{owner}.{name}", count - before.get(name, 0))

    module._sweep = sweep


def _steps(current: Current) -> None:
    module = cast("Any", partition_graph)
    inner: Callable[..., tuple[Partition, ...]] = module.ordered

    def ordered(steps: Sequence[Partition], wiring: Any) -> tuple[Partition, ...]:
        counters = current()
        for step in steps if counters is not None else ():
            assert counters is not None
            counters.add("steps", step.kind.value)
            if step.kind.value == "cudnn":
                counters.add("partitions", step.signature)
                for name in step.spelling:
                    counters.add("spellings", name)
        return inner(steps, wiring)

    module.ordered = ordered


def _calls(current: Current) -> None:
    module = cast("Any", lower_cudnn)
    inner: Callable[[Any, list[Node]], lower_cudnn.Lowered] = module._write

    def write(b: Any, anchors: list[Node]) -> lower_cudnn.Lowered:
        lowered = inner(b, anchors)
        counters = current()
        for call in lowered.graph.calls if counters is not None else ():
            assert counters is not None
            counters.add("calls", call.op)
            if call.mode:
                counters.add("calls", f"{call.op}.{call.mode}")
        return lowered

    module._write = write


def count_kernels(current: Current) -> None:
    """Count the family of each kernel that runs on a device."""
    module = cast("Any", kernels_on_device)
    inner: Callable[..., None] = module.kernel_agrees

    def kernel_agrees(job: kernels_on_device.Job, *rest: Any) -> None:
        counters = current()
        if counters is not None:
            counters.add("kernels", job.family)
        inner(job, *rest)

    module.kernel_agrees = kernel_agrees
