"""Test that products of 8-bit integers compete with their form in fp16, and the times of both are recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES
from gpu.kernels.product.test_thin_product import quantised
from lowering.bodies import BODIES, load
from lowering.lowers_judge import LowersJudge

from fusec.gpu.autotune.candidates.candidate_times import StepTuning, Timers, choose_steps, precision_times
from fusec.gpu.autotune.candidates.step_candidates import candidates
from fusec.gpu.autotune.plans.plan_search import RivalTimes
from fusec.gpu.autotune.step_choices import PrecisionTimes
from fusec.ir import DType, Graph, TensorType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import Cast, MatMul, pw
from fusec.passes.partition import partition
from fusec.passes.partition.equivalent_spellings import IN_HALVES
from fusec.schedule.program import Program
from fusec.targets.target import load as load_target

TUNING = StepTuning(True, 1.0, "quick", FIGURES)
F8, F32 = DType.F8E4M3, DType.F32
WINDOWED = "integer conv, scale, bias, integer residual, relu, rounded"
MATMUL = "integer matmul, rounded with a zero point and limits, and as it was before"


def program(title: str = MATMUL) -> Program:
    return partition(load(BODIES[title]), LowersJudge(), load_target("h200"))


def time_us(graph: CudnnGraph, halves_us: float) -> float:
    return halves_us if ":f16[" in str(graph) else 41.0


@pytest.mark.parametrize(("halves_us", "spelling"), [(29.0, (IN_HALVES,)), (50.0, ())])
def test_the_faster_form_is_chosen(halves_us: float, spelling: tuple[str, ...]) -> None:
    def graphs_us(graphs: Mapping[str, CudnnGraph], rivals_us: RivalTimes) -> dict[str, float]:
        return {key: time_us(graph, halves_us) for key, graph in graphs.items()}

    before = program()
    (choice,) = choose_steps(before, TUNING, Timers(graphs_us)).values()
    assert [part.spelling for part in choice] == [spelling]
    (times,) = precision_times(before, TUNING, lambda graph: time_us(graph, halves_us)).values()
    assert times == PrecisionTimes(41.0, halves_us)


def test_a_convolution_of_integers_is_timed_in_fp16_where_everything_is() -> None:
    def graphs_us(graphs: Mapping[str, CudnnGraph], rivals_us: RivalTimes) -> dict[str, float]:
        return {key: time_us(graph, 29.0) for key, graph in graphs.items()}

    for level, spelling in (("quick", ()), ("full", (IN_HALVES,))):
        (choice,) = choose_steps(program(WINDOWED), replace(TUNING, level=level), Timers(graphs_us)).values()
        assert [part.spelling for part in choice] == [spelling]


def test_forms_that_were_not_timed_have_no_times() -> None:
    assert precision_times(program(), TUNING, lambda graph: None) == {}


@pytest.mark.parametrize(("columns", "dtype", "halves"), [(256, F8, True), (4096, F8, False), (4096, DType.I8, False)])
def test_a_large_matmul_of_8_bits_is_not_timed_in_fp16(columns: int, dtype: DType, halves: bool) -> None:
    """Another engine or a kernel multiplies it twice as fast."""
    graph = Graph("product")
    x = graph.add_input("x", TensorType((1024, 512), dtype))
    sums = graph.add(MatMul(), x, graph.constant(np.ones((512, columns), dtype.numpy)))
    graph.set_outputs([graph.add(pw("mul"), graph.add(Cast(F32), sums), graph.constant(np.float32(0.5)))])
    assert tries_halves(graph) is halves


@pytest.mark.parametrize(("size", "halves"), [(7, True), (80, False)])
def test_a_large_convolution_without_a_kernel_is_not_timed_in_fp16(size: int, halves: bool) -> None:
    case = quantised((8, 1024, size, size), 168)
    assert case.kernel is None and tries_halves(case.graph) is halves


def tries_halves(graph: Graph) -> bool:
    """Tell if a candidate of the only step multiplies in fp16."""
    (step,) = partition(graph, LowersJudge(), load_target("h200")).steps
    found = candidates(graph, step, "quick", FIGURES)
    return any(IN_HALVES in part.spelling for candidate in found for part in candidate)
