"""Ask cuDNN, without a GPU, for convolutions whose filters are computed in each call and reversed by cuDNN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import one_program

import fusec
from fusec.builder import Builder
from fusec.driver import Executable
from fusec.ir import DType, Graph
from fusec.ops import FlippedConv
from fusec.reference import evaluate
from fusec.schedule.program import Kind

pytestmark = pytest.mark.cudnn


def model(
    dtype: str, spatial: tuple[int, ...], activation: str = "relu", groups: int = 1, filters: int = 32, **options: Any
) -> Graph:
    """A convolution of reversed filters, with a residual and an activation."""
    b = Builder()
    x = b.input("x", (2, 32, *spatial), dtype)
    w = b.input("w", (filters, 32 // groups, *(3,) * len(spatial)), dtype)
    y = b.conv(x, w, padding=1, groups=groups, flipped=True, **options)
    b.output(y=b.pointwise(activation, y + b.input("z", y.shape, dtype)))
    return b.graph()


def compiled(graph: Graph, **options: Any) -> Executable:
    return one_program(fusec.compile(graph, target="h200", **options))


def signatures(executable: Executable) -> list[str]:
    return [step.signature for step in executable.compiled.program.steps if "conv" in step.signature]


def check_simulated(graph: Graph, executable: Executable, rng: np.random.Generator, rtol: float) -> None:
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in graph.inputs}
    (want,) = evaluate(graph, feeds, precision=DType.F64).values()
    got = np.asarray(executable(**feeds), np.float64)
    assert np.linalg.norm(got - want) <= rtol * np.linalg.norm(want)


@pytest.mark.parametrize("spatial", [(50,), (12, 11), (5, 6, 7)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "precision", "rtol"), [("f16", "fp32", 1e-3), ("f32", "fp32", 1e-5), ("f32", "tf32", 1e-3)]
)
def test_an_epilogue_of_precompiled_engines_is_one_step(
    spatial: tuple[int, ...], dtype: str, precision: str, rtol: float, rng: np.random.Generator
) -> None:
    graph = model(dtype, spatial)
    executable = compiled(graph, precision=precision)
    (step,) = [s for s in executable.compiled.program.steps if s.kind is Kind.CUDNN and s.signature.startswith("conv")]
    assert step.signature == "conv_flipped+add+relu" and step.verdict is not None and step.verdict.precompiled
    check_simulated(graph, executable, rng, rtol)


@pytest.mark.parametrize("activation", ["gelu", "softplus"])
def test_filters_are_reversed_by_a_kernel_for_other_epilogues(activation: str, rng: np.random.Generator) -> None:
    """The engines that are compiled for an epilogue refuse to reverse filters."""
    graph = model("f16", (28, 26), activation)
    executable = compiled(graph)
    assert signatures(executable) == [f"conv+add+{activation}"]
    assert not any(isinstance(node.op, FlippedConv) for node in executable.compiled.program.graph.nodes)
    check_simulated(graph, executable, rng, 1e-3)


def test_grouped_filters_with_strides_and_dilation(rng: np.random.Generator) -> None:
    graph = model("f16", (13, 12), groups=4, stride=(2, 1), dilation=(1, 2))
    executable = compiled(graph)
    assert signatures(executable)[0].startswith("conv_flipped")
    check_simulated(graph, executable, rng, 1e-3)


@pytest.mark.parametrize("dtype", ["f64", "i8"])
def test_types_that_cudnn_does_not_convolve_so_are_expanded(dtype: str) -> None:
    b = Builder()
    x, w = b.input("x", (2, 32, 9, 9), dtype), b.input("w", (32, 32, 3, 3), dtype)
    b.output(y=b.conv(x, w, padding=1, flipped=True))
    executable = compiled(b.graph())
    assert signatures(executable) == ["conv"]


def test_engines_that_are_left_out_leave_no_flipped_convolution() -> None:
    graph = model("f16", (12, 11))
    everything = compiled(graph).compiled.program
    engines = {p.engine for step in everything.steps if step.verdict is not None for p in step.verdict.plans}
    alone = {p.engine for p in _plans_alone()}
    executable = compiled(graph, engines=[f"-{engine}" for engine in sorted(engines | alone)])
    assert not any(isinstance(node.op, FlippedConv) for node in executable.compiled.program.graph.nodes)


def _plans_alone() -> tuple[Any, ...]:
    b = Builder()
    x, w = b.input("x", (2, 32, 12, 11), "f16"), b.input("w", (32, 32, 3, 3), "f16")
    b.output(y=b.conv(x, w, padding=1, flipped=True))
    steps = compiled(b.graph()).compiled.program.steps
    return next(step.verdict.plans for step in steps if step.verdict is not None)


def test_constant_filters_are_reversed_before_cudnn_is_asked(rng: np.random.Generator) -> None:
    b = Builder()
    w = rng.standard_normal((16, 8, 3, 3)).astype(np.float32)
    y = b.conv(b.input("x", (2, 8, 9, 9)), b.constant(w), padding=1, flipped=True)
    b.output(y=b.pointwise("relu", y))
    executable = compiled(b.graph(), precision="fp16")
    assert not any(isinstance(node.op, FlippedConv) for node in executable.compiled.program.graph.nodes)
    check_simulated(b.graph(), executable, rng, 3e-3)
