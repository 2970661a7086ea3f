"""Test that a kernel that reads packed weights competes with the product of floats that cuDNN runs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES
from helpers import relative_l2
from lowering.lowers_judge import LowersJudge

from fusec.gpu.autotune.candidates.candidate_times import StepTuning, Timers, choose_steps
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.autotune.plans.plan_search import RivalTimes
from fusec.gpu.autotune.step_choices import apply_choices
from fusec.gpu.kernels import Kernel
from fusec.ir import DType, Graph, TensorType, Value
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import PackedMatMul, RmsNorm, pw
from fusec.passes.partition import partition
from fusec.passes.partition.equivalent_spellings import UNPACKED
from fusec.reference import evaluate
from fusec.schedule.program import Kind, Program
from fusec.targets.target import load

TUNING = StepTuning(True, 1.0, "quick", FIGURES)


def program(rng: np.random.Generator) -> Program:
    graph = Graph("packed")
    x = graph.add_input("x", TensorType((1, 128), DType.F16))
    codes = graph.constant(rng.integers(-8, 8, (64, 128)).astype(DType.I4.numpy), "q")
    scales = graph.constant(rng.uniform(0.01, 0.1, (64, 4)).astype(np.float16), "s")
    y = graph.add(PackedMatMul(32), x, codes, scales)
    y = graph.add(pw("add"), y, graph.constant(np.ones(64, np.float16), "b"))
    graph.set_outputs([graph.add(pw("relu"), y)])
    return partition(graph, LowersJudge(), load("h200"))


def test_the_kernel_takes_the_epilogue(rng: np.random.Generator) -> None:
    before = program(rng)
    assert [step.kind for step in before.steps] == [Kind.KERNEL, Kind.CUDNN]
    (step,) = fuse_steps(before, FIGURES).steps
    assert step.signature == "packed_matmul+bias+relu"


@pytest.mark.parametrize(("graph_us", "kernel_us"), [(9.0, 5.0), (5.0, 9.0)])
def test_the_faster_one_is_chosen(graph_us: float, kernel_us: float, rng: np.random.Generator) -> None:
    def graphs_us(graphs: Mapping[str, CudnnGraph], rivals_us: RivalTimes) -> dict[str, float]:
        return dict.fromkeys(graphs, graph_us)

    def kernels_us(found: Mapping[str, Kernel]) -> dict[str, float]:
        return dict.fromkeys(found, kernel_us)

    before = program(rng)
    fused = fuse_steps(before, FIGURES, products=True)
    chosen = choose_steps(fused, TUNING, Timers(graphs_us, kernels_us))
    (choice,) = chosen.values()
    after = apply_choices(before, chosen, FIGURES)
    (step,) = after.steps
    if kernel_us < graph_us:
        assert [(part.runs, part.spelling) for part in choice] == [("kernel", ())]
        assert step.kind is Kind.KERNEL
        return
    assert [part.spelling[0] for part in choice] == [UNPACKED]
    assert step.kind is Kind.CUDNN
    assert {v.type.dtype for v in step.body.values()} == {DType.F16}
    x = rng.standard_normal((1, 128)).astype(np.float16)
    (want,) = evaluate(before.graph, {"x": x}).values()
    (got,) = evaluate(step.body, {"x": x}).values()
    assert relative_l2(got, want) < 2e-3


def gated_program(rng: np.random.Generator, normed: bool = False) -> Program:
    """Two products of one row, the first of which gates the second, perhaps after an RMS norm."""
    graph = Graph("gated")
    x = graph.add_input("x", TensorType((1, 1024), DType.F16))
    if normed:
        x = graph.add(RmsNorm(-1), x, graph.constant(np.ones(1024, np.float16), "g"))
    products = list[Value]()
    for name in ("gate", "up"):
        codes = graph.constant(rng.integers(-8, 8, (64, 1024)).astype(DType.I4.numpy), f"{name}_q")
        scales = graph.constant(rng.uniform(0.01, 0.1, (64, 32)).astype(np.float16), f"{name}_s")
        products.append(graph.add(PackedMatMul(32), x, codes, scales))
    gate, up = products
    graph.set_outputs([graph.add(pw("mul"), graph.add(pw("swish", beta=1.0), gate), up)])
    return partition(graph, LowersJudge(), load("h200"))


@pytest.mark.parametrize(("together_us", "apart_us"), [(9.0, 5.0), (9.0, 3.0)])
def test_two_products_of_a_gate_are_one_launch_or_two(
    together_us: float, apart_us: float, rng: np.random.Generator
) -> None:
    def kernels_us(found: Mapping[str, Kernel]) -> dict[str, float]:
        return {key: together_us if kernel.name.count("packed") == 2 else apart_us for key, kernel in found.items()}

    before = gated_program(rng)
    fused = fuse_steps(before, FIGURES, products=True)
    (step,) = fused.steps
    assert step.signature == "packed_matmul+packed_matmul+swish+mul"
    chosen = choose_steps(fused, TUNING, Timers(lambda graphs, rivals_us: {}, kernels_us))
    after = apply_choices(before, chosen, FIGURES)
    together = together_us < 2 * apart_us
    assert [len(s.nodes) for s in after.steps] == ([4] if together else [1, 3])
    assert all(s.kind is Kind.KERNEL for s in after.steps)


@pytest.mark.parametrize(
    ("kernel_us", "signatures"),
    [
        (5.0, ["rms_norm+packed_matmul+packed_matmul+swish+mul"]),
        (9.0, ["rms_norm", "packed_matmul+packed_matmul+swish+mul"]),
    ],
)
def test_a_norm_is_computed_with_its_products_where_that_is_faster(
    kernel_us: float, signatures: list[str], rng: np.random.Generator
) -> None:
    def graphs_us(graphs: Mapping[str, CudnnGraph], rivals_us: RivalTimes) -> dict[str, float]:
        return {key: 1.0 if "rms" in str(graph) else 99.0 for key, graph in graphs.items()}

    def kernels_us(found: Mapping[str, Kernel]) -> dict[str, float]:
        return {key: kernel_us if kernel.name.startswith("rms_norm+") else 5.0 for key, kernel in found.items()}

    before = gated_program(rng, normed=True)
    fused = fuse_steps(before, FIGURES, products=True)
    (step,) = fused.steps
    assert step.signature == "rms_norm+packed_matmul+packed_matmul+swish+mul"
    chosen = choose_steps(fused, TUNING, Timers(graphs_us, kernels_us))
    assert [s.signature for s in apply_choices(before, chosen, FIGURES).steps] == signatures
