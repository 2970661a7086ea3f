"""Test products where a kernel is known to be faster than cuDNN: cuDNN is not asked, and builds no plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from gpu.kernels.cases import FIGURES, Case
from gpu.kernels.convolution import test_resident_filters as windows
from gpu.kernels.product.test_thin_product import convolution, quantised, strided
from lowering.lowers_judge import LowersJudge

from fusec.gpu.autotune.candidates.candidate_times import StepTuning, Timers, choose_steps
from fusec.gpu.autotune.plans.plan_search import RivalTimes
from fusec.gpu.kernels import Kernel
from fusec.gpu.known_faster_kernels import KnownFasterKernels, is_known_faster
from fusec.ir import DType, Graph
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.partition import partition
from fusec.plans.verdict import PROPOSED, Legal, Verdict
from fusec.schedule.program import Program
from fusec.targets.target import load
from fusec.text import parse

MEMORY_BOUND = quantised((32, 64, 56, 56), 256, residual=True)
OFTEN_MULTIPLIED = quantised((32, 1024, 14, 14), 512)


@pytest.mark.parametrize(
    ("case", "faster"),
    [
        (MEMORY_BOUND, True),
        (quantised((32, 256, 28, 28), 128), True),
        (strided(DType.I8, (32, 256, 56, 56), 512, (2, 2)), True),
        (strided(DType.I8, (32, 512, 28, 28), 1024, (2, 2)), False),  # it reads a quarter of its image
        (OFTEN_MULTIPLIED, False),
        (quantised((32, 160, 7, 7), 960), False),  # few rows
        (convolution(DType.F16, (32, 64, 56, 56), 256), False),
        (windows.quantised((32, 64, 56, 56), 64), True),
        (windows.quantised((1, 64, 56, 56), 64), False),
    ],
)
def test_products_of_bytes_that_memory_bounds_are_known(case: Case, faster: bool) -> None:
    assert is_known_faster(case.nodes, FIGURES) is faster


class Recorded:
    """A judge that records what it is asked about."""

    def __init__(self) -> None:
        self.asked: list[Graph] = []

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        self.asked += bodies
        return [Legal(()) for _ in bodies]


def test_only_others_are_asked_about() -> None:
    inner = Recorded()
    bodies = [OFTEN_MULTIPLIED.graph, MEMORY_BOUND.graph]
    assert KnownFasterKernels(inner, FIGURES).judge(bodies)[1] is PROPOSED
    assert inner.asked == bodies[:1]


def test_pointwise_ops_are_asked_about_only_as_steps() -> None:
    """Most bodies that are proposed do not become a step, and cuDNN compiles a plan for each. Tuning times the rest."""
    inner = Recorded()
    body = parse('graph "g" (%x: f16[64,64]) {\n  %e = exp(%x)\n  %y = relu(%e)\n  return %y\n}')
    assert KnownFasterKernels(inner, FIGURES).judge([body]) == [PROPOSED]
    assert inner.asked == []
    assert not is_known_faster(tuple(body.nodes), FIGURES)


def program(case: Case) -> Program:
    return partition(case.graph, LowersJudge(), load("h200"))


@pytest.mark.parametrize(
    ("level", "kernel_us", "timed", "runs"),
    [
        ("quick", 5.0, [0], "kernel"),
        ("quick", float("inf"), [0, 1], "cudnn"),  # the kernel does not run after all
        ("full", 5.0, [1], "kernel"),
    ],
)
def test_plans_are_timed_where_the_kernel_does_not_run(
    level: str, kernel_us: float, timed: list[int], runs: str
) -> None:
    asked: list[int] = []

    def graphs_us(graphs: Mapping[str, CudnnGraph], rivals_us: RivalTimes) -> dict[str, float]:
        asked.append(len({key for key, graph in graphs.items() if ":f16[" not in str(graph)}))
        return dict.fromkeys(graphs, 9.0)

    def kernels_us(found: Mapping[str, Kernel]) -> dict[str, float]:
        return dict.fromkeys(found, kernel_us)

    timers = Timers(graphs_us, kernels_us)
    (choice,) = choose_steps(program(MEMORY_BOUND), StepTuning(True, 1.0, level, FIGURES), timers).values()
    assert asked == timed and [part.runs for part in choice] == [runs]
