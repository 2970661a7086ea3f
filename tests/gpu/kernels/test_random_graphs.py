"""Test that the kernels of random programs compute what the reference does."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.kernels.cases import FIGURES, ROUNDING
from gpu.kernels.emulator import Emulator, needs_compiler
from helpers import HEALTH_CHECKS
from hypothesis import Phase, given, seed, settings
from lowering.lowers_judge import LowersJudge

from fusec.gpu import kernels
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.kernels import Kernel
from fusec.ir import Graph, Value
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.plans.verdict import Refused
from fusec.reference import evaluate_node
from fusec.schedule.program import Kind, Partition
from fusec.targets.target import load
from fusec.testing.generators.arrays import draw_feeds
from fusec.testing.strategies import graphs, single_ops

COUNT = 50


class Refuses:
    """cuDNN takes nothing, so that everything is left to kernels."""

    def judge(self, bodies: Any) -> list[Any]:
        return [Refused("support", "NONE", "not here") for _ in bodies]


def drawn(strategy: Any) -> list[Graph]:
    """The same graphs each time: they are compiled once."""
    found: list[Graph] = []

    checks = HEALTH_CHECKS

    @seed(3)
    @settings(max_examples=COUNT, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=checks)
    @given(strategy)
    def collect(graph: Graph) -> None:
        found.append(graph)

    collect()
    return found


def values(graph: Graph, number: int) -> dict[Value, np.ndarray]:
    """Every value, each node computed from what the reference gave for its operands."""
    feeds = draw_feeds(graph, number, "normal")
    held: dict[Value, np.ndarray] = {v: feeds[v.name] for v in graph.inputs}
    with np.errstate(all="ignore"):
        for node in graph.nodes:
            results = evaluate_node(node, [held[v] for v in node.operands])
            held.update(zip(node.results, results, strict=True))
    return held


def check(programs: list[tuple[Graph, tuple[Partition, ...]]]) -> int:
    jobs: list[tuple[Partition, Kernel, dict[Value, np.ndarray]]] = []
    for number, (graph, steps) in enumerate(programs):
        held = values(graph, number)
        for step in steps:
            kernel = kernels.find(step.nodes, step.outputs, FIGURES) if step.kind is Kind.KERNEL else None
            if kernel is not None:
                jobs.append((step, kernel, held))
    emulator = Emulator([kernel for _, kernel, _ in jobs])
    for step, kernel, held in jobs:
        for value, got in zip(step.outputs, emulator.run(kernel, held, step.outputs), strict=True):
            a, b = got.astype(np.float64), held[value].astype(np.float64)
            finite = np.isfinite(b)
            np.testing.assert_array_equal(a[~finite], b[~finite], err_msg=repr(step.nodes))
            spread = np.sqrt(np.mean(b[finite] ** 2)) if finite.any() else 0.0
            made = [v.type.dtype for node in step.nodes for v in node.results]
            rounding = max(ROUNDING.get(dtype, 0.0) for dtype in made) * 1.5 * len(step.nodes)
            wrong = ~(np.abs(a[finite] - b[finite]) <= rounding * (np.abs(b[finite]) + spread))
            few = 0.0 if value.type.dtype.is_float or len(made) == 1 else 0.02  # a comparison of what was rounded
            assert wrong.sum() <= few * wrong.size, (
                f"{step.nodes}: {a[finite][wrong][:3]} instead of {b[finite][wrong][:3]}"
            )
    return len(jobs)


@needs_compiler
def test_single_ops() -> None:
    found = [(graph, partition(graph, Refuses(), load("h200")).steps) for graph in drawn(single_ops())]
    assert check(found) > COUNT // 3


@needs_compiler
def test_programs() -> None:
    found: list[tuple[Graph, tuple[Partition, ...]]] = []
    for number, graph in enumerate(drawn(graphs())):
        whole = run(PIPELINE, graph.clone(), Options(("fp32", "fp16", "bf16")[number % 3]))
        judge = Refuses() if number % 2 else LowersJudge()
        found.append((whole, fuse_steps(partition(whole, judge, load("h200")), FIGURES).steps))
    assert any(len(step.nodes) > 2 for _, steps in found for step in steps if step.kind is Kind.KERNEL)
    assert check(found) > COUNT // 3
