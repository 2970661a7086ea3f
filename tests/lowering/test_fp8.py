"""Test products of fp8 as cuDNN graphs: what they mean, their spelling in fp16, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from lowering.test_lower_cudnn import run

from fusec.errors import LoweringError
from fusec.ir import DType, Graph
from fusec.lower_cudnn import lower
from fusec.ops import MatMul
from fusec.passes.partition.equivalent_spellings import IN_HALVES, faster_spellings
from fusec.reference import evaluate
from fusec.text import parse

PRODUCT = """graph "g" (%x: f8e4m3[3,8,64], %z: f16[3,8,32]) {
  %w = constant weight("w") : f8e4m3[64,32]{1,0}
  %s = constant [0.037] : f32[]
  %b = constant weight("b") : f16[32]
  %u = constant [40.0] : f32[]
  %m = matmul(%x, %w)
  %k = mul(%m, %s)
  %h = cast(%k) {to=f16}
  %a = add(%h, %b)
  %r = add(%z, %a)
  END
}"""
ENDS = {
    "stored in fp16": "return %r",
    "rounded to fp8": """%g = gelu(%r)
  %f = cast(%g) {to=f32}
  %d = mul(%f, %u)
  %c = clip(%d) {min=-448.0, max=448.0}
  %q = cast(%c) {to=f8e4m3}
  return %q""",
}


def graph(end: str, rng: np.random.Generator) -> Graph:
    weights = {"w": rng.standard_normal((64, 32)).astype(DType.F8E4M3.numpy)}
    weights["b"] = rng.standard_normal(32).astype(np.float16)
    return parse(PRODUCT.replace("END", end), weights)


def feeds(body: Graph, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {v.name: (3 * rng.standard_normal(v.type.shape)).astype(v.type.dtype.numpy) for v in body.inputs}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_a_lowered_product_of_fp8_means_what_the_graph_means(end: str, rng: np.random.Generator) -> None:
    body = graph(end, rng)
    given = feeds(body, rng)
    lowered = lower(body)
    assert [t.dtype for t in lowered.graph.tensors[:2]] == [DType.F8E4M3, DType.F8E4M3]
    for spelled in (body, *(other for _, other in faster_spellings(body))):
        (got,), (want,) = (
            run(spelled, lower(spelled), given).values(),
            evaluate(body, given, precision=DType.F64).values(),
        )
        got, want = got.astype(np.float64), want.astype(np.float64)
        assert np.isfinite(want).all()
        # 16 bits round, and a number next to the border of two codes may become either
        assert np.linalg.norm(got - want) <= (1e-3 if "%q" not in end else 1e-2) * np.linalg.norm(want)


def test_a_product_of_fp8_is_also_one_of_fp16(rng: np.random.Generator) -> None:
    ((names, halves),) = [
        each for each in faster_spellings(graph(ENDS["stored in fp16"], rng)) if each[0] == (IN_HALVES,)
    ]
    assert names == (IN_HALVES,)
    (product,) = (node for node in halves.nodes if isinstance(node.op, MatMul))
    assert [v.type.dtype for v in product.operands] == [DType.F16, DType.F16]


def test_fast_sums_are_asked_for_in_fp8_alone(rng: np.random.Generator) -> None:
    text = PRODUCT.replace("matmul(%x, %w)", "matmul(%x, %w) {fast_sums=true}").replace("END", "return %r")
    body = parse(text, {"w": np.ones((64, 32), DType.F8E4M3.numpy), "b": np.ones(32, np.float16)})
    found = [lower(each).graph.calls[0] for each in (body, graph("return %r", rng))]
    assert [call.attribute("fast_sums", False) for call in found] == [True, False]
    ((_, halves),) = [each for each in faster_spellings(body) if each[0] == (IN_HALVES,)]
    assert [node.op for node in halves.nodes if isinstance(node.op, MatMul)] == [MatMul()]


def test_sums_that_are_stored_stay_sums_of_fp8() -> None:
    body = parse('graph "g" (%x: f8e4m3[16,16], %w: f8e4m3[16,16]) {\n  %m = matmul(%x, %w)\n  return %m\n}')
    assert faster_spellings(body) == []
    assert lower(body).graph.outputs[0].dtype is DType.F32


@pytest.mark.parametrize(
    ("ops", "why"),
    [
        ("%q = cast(%x) {to=f8e4m3}", "cast f32 to f8e4m3: cuDNN's rounding is not the op's"),
        ("%c = clip(%x) {min=-500.0, max=448.0}\n  %q = cast(%c) {to=f8e4m3}", "cuDNN's rounding is not the op's"),
        ("%c = clip(%x) {min=-57344.0, max=57344.0}\n  %q = cast(%c) {to=f8e5m2}", "cuDNN's rounding is not the op's"),
        (
            "%c = clip(%x) {min=-448.0, max=448.0}\n  %k = cast(%c) {to=f8e4m3}\n  %q = cast(%k) {to=f32}",
            "cuDNN's rounding is not the op's",
        ),
    ],
    ids=["not limited", "limited too far", "another type", "rounded and not stored"],
)
def test_other_casts_to_8_bits_are_refused(ops: str, why: str) -> None:
    body = parse(f'graph "g" (%x: f32[4,16]) {{\n  {ops}\n  return %q\n}}')
    with pytest.raises(LoweringError, match=why):
        lower(body)


def test_a_kernel_reads_fp8_where_nothing_is_multiplied() -> None:
    body = parse('graph "g" (%x: f8e4m3[4,16]) {\n  %y = cast(%x) {to=f32}\n  return %y\n}')
    with pytest.raises(LoweringError, match="f8e4m3, which cuDNN graphs do not take here"):
        lower(body)
