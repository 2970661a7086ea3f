"""Test constants made of constants: when they are computed, how they are rounded, how much memory they may take."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_close

from fusec.ir import Constant, DType, Graph, Literal, TensorType, Value
from fusec.ops import BatchNorm, Concat, Conv, MatMul, Transpose, pw
from fusec.passes.base import Options, run
from fusec.passes.cleanup.fold_constants import FoldConstants
from fusec.passes.folding.fold_batchnorm import FoldBatchNorm
from fusec.passes.folding.fold_scales import FoldScales
from fusec.passes.rewriting.derived_constants import product
from fusec.passes.rewriting.value_facts import never_negative
from fusec.text import parse


class Reads:
    """A loader of a literal that counts its calls."""

    def __init__(self, array: np.ndarray[Any, Any]):
        self.array = array
        self.count = 0

    def __call__(self) -> np.ndarray[Any, Any]:
        self.count += 1
        return self.array


def lazy(graph: Graph, reads: Reads, label: str) -> Value:
    literal = Literal(TensorType(reads.array.shape, DType.of(reads.array.dtype)), reads, label)
    return graph.insert(Constant(literal), names=(label,)).result


def folded_conv(dtype: Any, channels: int, rng: np.random.Generator) -> tuple[Graph, Reads, np.ndarray[Any, Any]]:
    """conv + BatchNorm; the graph, its weight's loader, and the factor of each channel."""
    graph = Graph("g")
    reads = Reads(rng.standard_normal((channels, channels, 3, 3)).astype(dtype))
    x = graph.add_input("x", TensorType((1, channels, 4, 4), DType.of(dtype)))
    y = graph.add(Conv((1, 1), (1, 1, 1, 1), (1, 1)), x, lazy(graph, reads, "w"))
    scale, mean, var = (rng.uniform(0.5, 1.5, channels).astype(dtype) for _ in range(3))
    y = graph.add(BatchNorm(1e-3), y, *(graph.constant(a) for a in (scale, mean, mean, var)))
    graph.set_outputs([y], ["y"])
    run([FoldBatchNorm()], graph)
    return graph, reads, scale.astype(np.float64) / np.sqrt(var.astype(np.float64) + 1e-3)


def folded_weight(graph: Graph) -> Literal:
    (conv,) = [n for n in graph.nodes if isinstance(n.op, Conv)]
    literal = conv.operands[1].literal
    assert literal is not None
    return literal


def test_large_weights_are_read_when_they_are_needed_and_once(rng: np.random.Generator) -> None:
    graph, reads, _ = folded_conv(np.float32, 64, rng)
    assert reads.count == 0
    literal = folded_weight(graph)
    assert literal.array is literal.array
    assert reads.count == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_are_folded_in_float64_and_rounded_once(dtype: Any, rng: np.random.Generator) -> None:
    graph, reads, factor = folded_conv(dtype, 8, rng)
    want = (reads.array.astype(np.float64) * factor.reshape(-1, 1, 1, 1)).astype(dtype)
    np.testing.assert_array_equal(folded_weight(graph).array, want)


def test_a_product_makes_no_float64_copy_of_the_weight(rng: np.random.Generator) -> None:
    weight, factor = rng.standard_normal((4, 5)).astype(np.float32), rng.standard_normal((4, 1))
    result = product(weight, factor)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, (weight.astype(np.float64) * factor).astype(np.float32))


def test_repeated_doubling_is_not_folded() -> None:
    graph = Graph("g")
    value = graph.constant(np.ones(1 << 20, np.float32), "w")
    for _ in range(13):
        value = graph.add(Concat(0), value, value)
    graph.set_outputs([value], ["y"])
    run([FoldConstants()], graph)
    largest = max(n.result.type.nbytes for n in graph.nodes if isinstance(n.op, Constant))
    assert largest <= (1 << 24) + 4 * (1 << 22)
    assert any(isinstance(n.op, Concat) for n in graph.nodes)


def test_freed_memory_counts_as_available() -> None:
    """A long chain of transposes holds two copies of the weight at a time, so all of it folds."""
    graph = Graph("g")
    value = graph.constant(np.arange(1 << 20, dtype=np.float32).reshape(1 << 10, 1 << 10), "w")
    for _ in range(31):
        value = graph.add(Transpose((1, 0)), value)
    graph.set_outputs([value], ["y"])
    run([FoldConstants()], graph)
    (node,) = graph.nodes
    assert isinstance(node.op, Constant)
    np.testing.assert_array_equal(node.op.literal.array, np.arange(1 << 20).reshape(1 << 10, 1 << 10).T)


def test_a_derived_constant_is_never_labelled_like_its_source(rng: np.random.Generator) -> None:
    """The text form names large constants: one label must not stand for two arrays."""
    graph, _, _ = folded_conv(np.float32, 8, rng)
    assert folded_weight(graph).label == "w.folded"


@pytest.mark.parametrize("var", [[1.0, -2.0], [1.0, float("nan")]])
def test_a_negative_variance_is_not_folded(var: list[float]) -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((1, 2, 4), DType.F32))
    one = graph.constant(np.ones(2, np.float32))
    graph.set_outputs([graph.add(BatchNorm(), x, one, one, one, graph.constant(np.array(var, np.float32)))], ["y"])
    run([FoldBatchNorm()], graph)
    assert any(isinstance(n.op, BatchNorm) for n in graph.nodes)


def test_a_factor_that_is_not_finite_stays_outside_the_weights() -> None:
    text = """graph "g" (%x: f32[2,2]) {
      %w = constant [1, 2, 3, 4] : f32[2,2]
      %f = constant [1, inf] : f32[2]
      %c = matmul(%x, %w)
      %y = mul(%c, %f)
      return %y
    }"""
    graph = parse(text)
    run([FoldScales()], graph, Options())
    assert [n.op.name for n in graph.nodes if n.op.name != "constant"] == ["matmul", "mul"]


def test_constants_shared_by_many_uses_are_computed_once(rng: np.random.Generator) -> None:
    graph = Graph("g")
    reads = Reads(rng.standard_normal((256, 256)).astype(np.float32))
    turned = graph.add(Transpose((1, 0)), lazy(graph, reads, "w"))
    x = graph.add_input("x", TensorType((256, 256), DType.F32))
    graph.set_outputs([graph.add(pw("add"), x, turned), graph.add(pw("mul"), x, turned)], ["a", "b"])
    run([FoldConstants()], graph)
    (constant,) = [n for n in graph.nodes if isinstance(n.op, Constant)]
    assert_close(constant.op.literal.array, reads.array.T, 0)  # type: ignore[attr-defined]
    assert reads.count == 1


@pytest.mark.parametrize(("columns", "folded"), [(1 << 9, False), (1 << 12, True)])
def test_outer_differences_become_constants_in_proportion_to_the_model(columns: int, folded: bool) -> None:
    """The mask of windows is an outer difference of their numbers; its size is the square of theirs."""
    graph = Graph("g")
    x = graph.add_input("x", TensorType((1 << 12, 1 << 8), DType.F32))
    wide = graph.add_input("wide", TensorType((1 << 8, columns), DType.F32))
    row, column = (graph.constant(np.arange(1 << 8, dtype=np.float32).reshape(s)) for s in ((1, -1), (-1, 1)))
    mask = graph.add(pw("sub"), row, column)
    weight = graph.constant(np.ones((1 << 12, columns), np.float32))
    sums = graph.add(MatMul(), x, graph.add(pw("mul"), mask, mask))
    graph.set_outputs([sums, graph.add(pw("add"), graph.add(MatMul(), x, wide), weight)], ["a", "b"])
    run([FoldConstants()], graph)
    assert all(node.op.name != "sub" for node in graph.nodes) is folded


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("%y = relu(%x)", True),
        ("%y = mul(%x, %x)", True),
        ("%y = clip(%x) {min=0.5}", True),
        ("%a = exp(%x)\n %b = abs(%x)\n %y = add(%a, %b)", True),
        ("%a = relu(%x)\n %y = max(%x, %a)", True),
        ('%a = sigmoid(%x)\n %y = reduce(%a) {kind="mean", axes=[0]}', True),
        ("%c = constant [1, 0, 2, 3] : f32[4]\n %a = exp(%x)\n %y = mul(%a, %c)", True),
        ("%y = tanh(%x)", False),
        ("%y = clip(%x) {min=-0.5}", False),
        ("%a = exp(%x)\n %y = add(%a, %x)", False),
        ("%a = exp(%x)\n %y = min(%a, %x)", False),
        ('%a = exp(%x)\n %y = reduce(%a) {kind="log_sum", axes=[0]}', False),
        ("%c = constant [1, -1, 2, 3] : f32[4]\n %a = exp(%x)\n %y = mul(%a, %c)", False),
        ("%a = exp(%x)\n %y = sub(%a, %a)", False),
    ],
)
def test_never_negative(body: str, expected: bool) -> None:
    graph = parse(f'graph "g" (%x: f32[4]) {{ {body}\n return %y }}')
    assert never_negative(graph.outputs[0]) is expected
