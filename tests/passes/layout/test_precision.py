"""Test precision beyond the text cases: laziness, sharing, warnings, and error by storage type."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import pytest
from helpers import assert_close, relative_l2
from passes.cases import inputs_of, read_graph

import fusec
from fusec.ir import Constant, DType, Graph, Literal, TensorType
from fusec.lowering.scan_plan import scan_plan
from fusec.ops import Cast, Scan, pw
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.cleanup.cse import Cse
from fusec.passes.layout.precision import Precision
from fusec.reference import evaluate
from fusec.text import parse

TEXT = """graph "g" (%x: f32[2,3,6,6], %i: i32[4,1,1], %m: bool[2,4,6,6]) {
  %w = constant weight("w") : f32[4,3,3,3]
  %b = constant weight("b") : f32[4,1,1]
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}
  %d = add(%c, %b)
  %f = cast(%i) {to=f32}
  %e = mul(%d, %f)
  %l = cmp_lt(%e, %b)
  %k = logical_or(%l, %m)
  %r = where(%k, %e, %d)
  %s = swish(%r)
  return %s, %l, %r
}"""


def storage(graph: Graph, precision: str) -> Graph:
    return run((Precision(),), graph, Options(precision))


def times(values: Any, label: str = "k") -> Graph:
    """x * k, with k in fp32 under a label."""
    graph = Graph("g")
    x = graph.add_input("x", TensorType((len(values),), DType.F32))
    k = graph.add(Constant(Literal.of(np.array(values, np.float32), label)), name="k")
    graph.set_outputs([graph.add(pw("mul"), x, k, name="y")])
    return graph


@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 1e-6), ("tf32", 1e-6), ("fp16", 3e-3), ("bf16", 3e-2)])
def test_results_differ_by_the_rounding_of_the_storage_type_only(
    precision: str, rtol: float, rng: np.random.Generator
) -> None:
    before = read_graph(TEXT)
    feeds = inputs_of(before, rng)
    after = storage(before.clone(), precision)
    # a comparison next to its threshold may fall on the other side: s and r differ there, so s and r of
    # the same side are compared through the mask the graph itself gives
    got, want = evaluate(after, feeds), evaluate(before, feeds, precision=DType.F64)
    same = got["l"] == want["l"]
    assert same.mean() > 0.95
    for name in ("s", "r"):
        assert got[name].dtype == np.float32
        assert_close(got[name][same], want[name][same], rtol)
    if precision in ("fp16", "bf16"):
        assert relative_l2(got["s"][same], want["s"][same]) > 1e-5, "nothing was rounded"
    exact = evaluate(after, feeds, precision=DType.F64)
    assert_close(exact["r"][same], want["r"][same], rtol)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_casts_are_only_at_inputs_and_outputs(precision: str) -> None:
    graph = run(PIPELINE, read_graph(TEXT), Options(precision, disable=frozenset({"assign_layout"})))
    for node in graph.nodes:
        if isinstance(node.op, Cast) and node.operands[0].type.dtype.is_float:
            assert node.operands[0] in graph.inputs or graph.return_node in node.result.users, node
    inside = {v.type.dtype for v in graph.values() if v.type.dtype.is_float and not isinstance(_op(v), Cast)}
    assert inside == {DType.F32, Options(precision).storage}
    assert [v.type.dtype for v in graph.inputs] == [DType.F32, DType.I32, DType.BOOL]
    assert [v.type.dtype for v in graph.outputs] == [DType.F32, DType.BOOL, DType.F32]


def _op(value: Any) -> Any:
    return value.node.op if value.node is not None else None


def test_constants_are_converted_when_read_and_once() -> None:
    reads: list[str] = []

    def load() -> Any:
        reads.append("k")
        return np.ones(100, np.float32)

    graph = Graph("g")
    x = graph.add_input("x", TensorType((100,), DType.F32))
    literal = Literal(TensorType((100,), DType.F32), load, "k")
    a = graph.add(pw("mul"), x, graph.add(Constant(literal)))
    b = graph.add(pw("add"), a, graph.add(Constant(literal)))
    graph.set_outputs([b])
    storage(graph, "fp16")
    assert reads == []
    literals = {n.op.literal for n in graph.nodes if isinstance(n.op, Constant)}
    assert len(literals) == 1, "two nodes that share a literal share the narrow one"
    (narrow,) = literals
    assert (narrow.array.dtype, narrow.label) == (np.float16, "k")
    assert narrow.array is narrow.array
    assert reads == ["k"]


def test_equal_casts_merge_and_unequal_ones_do_not() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((3,), DType.F32))
    half = graph.add(pw("relu"), graph.add(Cast(DType.F16), x))  # the model's own cast, as Precision's
    wide = graph.add(pw("neg"), graph.add(Cast(DType.F32), half))
    graph.set_outputs([graph.add(pw("add"), wide, graph.add(pw("abs"), x)), graph.add(Cast(DType.BF16), x)])
    run((Precision(), Cse()), graph, Options("fp16"))
    from_x = [n.op.to for n in graph.nodes if isinstance(n.op, Cast) and n.operands[0] is x]
    assert sorted(d.value for d in from_x) == ["bf16", "f16"]


@pytest.mark.parametrize(("label", "value"), [("big", 1e6), ("", -7e4)])
def test_out_of_range_constants_are_named(label: str, value: float) -> None:
    graph = storage(times([1.0, value, value], label), "fp16")
    wanted = rf"constant '{label or 'k'}': 2 of 3 elements are out of f16's range .* use precision bf16 or fp32"
    with pytest.warns(UserWarning, match=wanted):
        got = evaluate(graph, {"x": np.ones(3, np.float32)})["y"]
    np.testing.assert_array_equal(got, [1.0, *[np.copysign(65504.0, value)] * 2])


@pytest.mark.parametrize("beyond", [7e4, -7e4])
def test_numbers_out_of_range_are_found_among_nans(beyond: float) -> None:
    graph = storage(times([np.nan, beyond, -np.nan, 1.0]), "fp16")
    with pytest.warns(UserWarning, match="1 of 4 elements are out of f16's range"):
        got = evaluate(graph, {"x": np.ones(4, np.float32)})["y"]
    np.testing.assert_array_equal(got, [np.nan, np.copysign(65504.0, beyond), np.nan, 1.0])


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_mask_hides_as_much_whatever_it_is_stored_in(precision: str) -> None:
    """Rows in which all is hidden are as likely everywhere, not NaN."""
    least = float(np.finfo(np.float32).min)
    text = f"""graph "g" (%x: f32[2,3], %m: bool[2,3]) {{
      %c = constant [{least}] : f32[1]
      %w = where(%m, %x, %c) : f32[2,3]
      %y = softmax(%w) {{axis=1}} : f32[2,3]
      return %y
    }}"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graph = storage(parse(text), precision)
        feeds = {"x": np.zeros((2, 3), np.float32), "m": np.array([[True, False, False], [False] * 3])}
        got = evaluate(graph, feeds)["y"]
    np.testing.assert_allclose(got, [[1.0, 0.0, 0.0], [1 / 3] * 3], rtol=1e-2)


@pytest.mark.parametrize("values", [[65504.0, -1.0], [np.inf, 1.0], [np.nan, 1.0], [1e-30, 1.0]])
def test_constants_in_range_give_no_warning(values: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = evaluate(storage(times(values), "fp16"), {"x": np.ones(2, np.float32)})["y"]
    np.testing.assert_array_equal(got, np.array(values, np.float16))


def test_large_integers_keep_their_cast_from_a_wide_input() -> None:
    """4097 is no number of fp16: an index computed from an input must not pass through it."""
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2,), DType.F32))
    graph.set_outputs([graph.add(Cast(DType.I32), x), graph.add(pw("relu"), x)], ["i", "r"])
    got = evaluate(storage(graph, "fp16"), {"x": np.array([4097.0, 3.0], np.float32)})
    assert got["i"].tolist() == [4097, 3]
    assert got["r"].tolist() == [4096.0, 3.0]


def test_ten_thousand_nodes_in_three_seconds() -> None:
    """One input and one constant used by all, casts there and back, and every tenth value an output."""
    graph = Graph("g")
    value = x = graph.add_input("x", TensorType((4,), DType.F32))
    k = graph.constant(np.ones(4, np.float32))
    outputs: list[Any] = []
    for _ in range(2500):
        value = graph.add(pw("mul"), graph.add(pw("add"), value, x), k)
        value = graph.add(Cast(DType.F32), graph.add(Cast(DType.F64), value))
        outputs.append(value)
    graph.set_outputs(outputs[::10])
    assert len(list(graph.nodes)) > 10_000
    start = time.process_time()  # not a busy machine's time
    storage(graph, "fp16")
    assert time.process_time() - start < 3
    assert sum(isinstance(n.op, Cast) and n.op.to is DType.F32 for n in graph.nodes) == 250, "one per output"


def test_the_sums_of_attention_stay_f32_and_others_read_them_narrowed() -> None:
    graph = parse("""graph "g" (%q: f32[1,2,4,8], %k: f32[1,2,4,8], %d: f32[1,2,4,8]) {
  %y, %s = attention_train(%q, %k, %k)
  %dq, %dk, %dv = attention_backward(%d, %q, %k, %k, %y, %s)
  %e = exp(%s)
  return %dq, %e
}""")
    narrowed = run((Precision(),), graph, Options("fp16"))
    (train,) = (n for n in narrowed.nodes if n.op.name == "attention_train")
    sums = train.results[1]
    assert [v.type.dtype.value for v in train.results] == ["f16", "f32"]
    assert {n.op.name for n, _ in sums.uses} == {"attention_backward", "cast"}


def test_rows_of_zeros_are_normalised_to_zeros_in_fp16() -> None:
    """Swin v2 divides by norms that are at least 1e-12, and padded windows have rows of zeros."""
    b = fusec.Builder("f32")
    x = b.input("x", (4, 8))
    b.output(y=x / x.reduce("l2", 1, keepdims=True).clip(1e-12))
    rows = np.zeros((4, 8), np.float32)
    rows[0] = 1.0
    (got,) = fusec.compile(b.graph(), target="cpu", precision="fp16").run(None, {"x": rows})
    np.testing.assert_allclose(got[0], np.full(8, 8**-0.5), rtol=1e-3)
    assert not got[1:].any()


def test_a_loop_whose_kernel_takes_no_casts_has_them_around_it() -> None:
    """A cast that a product reads is stored in shared memory, which is full in this loop."""
    text = """graph "g" (%h: f32[8,SIZE], %x: f32[9,SIZE,SIZE], %z: f32[9,SIZE,SIZE]) {
  %e = exp(%x)
  %f = exp(%z)
  %y = scan(%h, %e, %f) {body=graph "body" (%h: f32[8,SIZE], %x: f32[SIZE,SIZE], %z: f32[SIZE,SIZE]) {
    %m = matmul(%h, %x)
    %y = matmul(%m, %z)
    return %y
  }, steps=9, states=1, sequences=2}
  return %y
}"""
    for size, dtype in ((16, "f16"), (64, "f32")):
        graph = run((Precision(),), parse(text.replace("SIZE", str(size))), Options("fp16"))
        (loop,) = (n for n in graph.nodes if isinstance(n.op, Scan))
        assert isinstance(loop.op, Scan) and scan_plan(loop.op) is not None
        assert loop.operands[1].type.dtype.value == dtype


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_errors_of_a_loop_do_not_grow_with_its_steps(precision: str, rng: np.random.Generator) -> None:
    """A state in 16 bits would soon be too large for what a step adds."""
    graph = parse("""graph "g" (%h: f32[4], %x: f32[3000,4]) {
  %a = sigmoid(%x)
  %y = scan(%h, %a) {body=graph "body" (%h: f32[4], %x: f32[4]) {
    %y = add(%h, %x)
    return %y
  }, steps=3000, states=1, sequences=1}
  %n = neg(%y)
  return %n
}""")
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs}
    (got,) = fusec.compile(graph, target="cpu", precision=precision).run(None, feeds)
    assert_close(got, evaluate(graph, feeds)["n"], 2e-3 if precision == "fp16" else 1e-2)
