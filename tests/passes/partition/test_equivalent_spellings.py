"""Test that every spelling keeps inputs, outputs and meaning, fires where it should and stays silent where not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from helpers import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from passes.partition.test_cases import read_graph
from scipy.special import ndtr

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Cast, Conv, MatMul, pw
from fusec.passes.partition.equivalent_spellings import REWRITES, faster_spellings, respell, spellings
from fusec.passes.partition.tanh_spelling import LIMIT
from fusec.reference import evaluate
from fusec.text import parse

CONV = Conv((1, 1), (1, 1, 1, 1), (1, 1))


def check(body: Graph, rtol: float = 1e-12) -> list[tuple[str, ...]]:
    """Compare every spelling of a body with the body in float64; return their names."""
    rng = np.random.default_rng(3)
    feeds = {v.name: rng.standard_normal(v.type.shape) for v in body.inputs}
    want = evaluate(body, feeds, precision=DType.F64)
    before = str(body)
    found = spellings(body)
    assert found[-1] == ((), body)
    for names, spelled in found:
        spelled.verify()
        assert [(v.name, v.type) for v in spelled.inputs] == [(v.name, v.type) for v in body.inputs]
        assert spelled.output_names == body.output_names
        assert [v.type for v in spelled.outputs] == [v.type for v in body.outputs]
        got = evaluate(spelled, feeds, precision=DType.F64)
        for name, array in want.items():
            assert_close(got[name], array, rtol)
        assert str(respell(body, names)) == str(spelled)
    assert str(body) == before
    return [names for names, _ in found]


@st.composite
def convolution_bodies(draw: st.DrawFn) -> Graph:
    """A convolution, then sums with a bias or a residual and activations in any order, operands swapped
    or not, now and then with an inner value among the outputs."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    graph = Graph("body")
    type = TensorType((2, 6, 5, 5), DType.F32, draw(st.sampled_from([(), (0, 2, 3, 1)])))
    weight = graph.constant(rng.standard_normal((6, 6, 3, 3)).astype(np.float32))
    v: Value = graph.add(CONV, graph.add_input("x", type), weight)
    made = [v]
    for i in range(draw(st.integers(0, 4))):
        match draw(st.sampled_from(["bias", "residual", "relu", "tanh", "gelu"])):
            case "bias":
                shape = draw(st.sampled_from([(1, 6, 1, 1), (6, 1, 1)]))
                other = graph.constant(rng.standard_normal(shape).astype(np.float32))
            case "residual":
                other = graph.add_input(f"z{i}", type)
            case name:
                other = None
                v = graph.add(pw(name), v)
        if other is not None:
            v = graph.add(pw("add"), *((other, v) if draw(st.booleans()) else (v, other)))
        made.append(v)
    outputs = [v] if draw(st.integers(0, 3)) else [draw(st.sampled_from(made)), v]
    outputs = list(dict.fromkeys(outputs))
    graph.set_outputs(outputs, [f"out{i}" for i in range(len(outputs))])
    return graph


@given(convolution_bodies())
@settings(deadline=None)
def test_convolutions_keep_their_meaning(body: Graph) -> None:
    check(body)


@st.composite
def product_bodies(draw: st.DrawFn) -> Graph:
    """x[…, K] @ W with a prologue or not, and an epilogue of vectors, columns, scalars, whole tensors."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    graph = Graph("body")
    lead = draw(st.sampled_from([(1,), (3,), (2, 3), (2, 1, 3)]))
    k, n = draw(st.sampled_from([(4, 5), (4, 4), (1, 1)]))
    x = graph.add_input("x", TensorType((*lead, k), DType.F32))
    w_shape = draw(st.sampled_from([(k, n), (1, k, n)])) if len(lead) > 1 else (k, n)
    w = graph.constant(rng.standard_normal(w_shape).astype(np.float32))
    if draw(st.booleans()):
        x = graph.add(pw("relu"), graph.add(pw("mul"), x, graph.constant(np.float32(0.5))))
    v = graph.add(MatMul(), x, w)
    shapes = [(n,), (1, n), (*lead, 1), (*lead, n), (), (1,) * (len(lead) + 1), (*lead[:-1], 1, n)]
    for i in range(draw(st.integers(0, 3))):
        shape = draw(st.sampled_from(shapes))
        computed = draw(st.booleans())
        other = graph.add_input(f"z{i}", TensorType(shape, DType.F32)) if computed else None
        other = other or graph.constant(rng.standard_normal(shape).astype(np.float32))
        v = graph.add(pw(draw(st.sampled_from(["add", "mul"]))), *((other, v) if draw(st.booleans()) else (v, other)))
        if draw(st.booleans()):
            v = graph.add(pw("tanh"), v)
    graph.set_outputs([v], ["out"])
    return graph


@given(product_bodies())
@settings(deadline=None)
def test_products_keep_their_meaning(body: Graph) -> None:
    check(body)


HEAD = """graph "b" (%x: f16[2,8,4,4], %z: f16[2,8,4,4], %g: f16[2,8,1,1]) {
  %w = constant weight("w") : f16[8,8,3,3]
  %b = constant [0.5, 1.0, -1.0, 2.0, 0.25, 3.0, -2.0, 1.5] : f16[1,8,1,1]
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=1} : f16[2,8,4,4]
"""
T = ": f16[2,8,4,4]"


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (f"%a = add(%c, %b) {T} %r = relu(%a) {T} return %r", ()),
        (f"%a = add(%b, %c) {T} %r = relu(%a) {T} return %r", ()),  # the bias may stand on either side
        ("return %c", ()),
        (f"%r = relu(%c) {T} return %r", ("zero_bias",)),
        (f"%r = clip(%c) {{min=0.0, max=6.0}} {T} return %r", ("zero_bias",)),
        (f"%r = gelu(%c) {T} return %r", ()),  # runtime-compiled either way
        (f"%r = relu(%c) {T} return %r, %c", ()),
        (f"%r = relu(%c) {T} %q = relu(%r) {T} return %q", ()),
        (f"%a = add(%c, %b) {T} %s = add(%a, %z) {T} %r = relu(%s) {T} return %r", ("residual_first",)),
        (f"%a = add(%c, %b) {T} %s = add(%z, %a) {T} return %s", ("residual_first",)),
        (f"%a = add(%c, %b) {T} %s = add(%a, %z) {T} %r = gelu(%s) {T} return %r", ()),
        (f"%a = add(%c, %b) {T} %s = add(%a, %z) {T} return %s, %a", ()),
        (f"%a = add(%c, %b) {T} %s = add(%a, %g) {T} return %s", ()),  # a residual has the whole shape
        (f"%a = add(%c, %b) {T} %s = sub(%a, %z) {T} return %s", ()),
        (f"%a = add(%c, %z) {T} %s = add(%a, %b) {T} return %s", ()),
        (f"%a = add(%z, %c) {T} %s = add(%a, %b) {T} return %s", ("conv_operand_first",)),
        (f"%a = add(%z, %c) {T} %s = relu(%a) {T} return %s", ("conv_operand_first", "zero_bias")),
        (f"%a = add(%c, %z) {T} return %a", ("zero_bias",)),
        (f"%a = add(%c, %c) {T} return %a", ()),
    ],
)
def test_which_spelling_applies_to_a_convolution(lines: str, names: tuple[str, ...]) -> None:
    body = read_graph(HEAD + lines + " }")
    assert check(body)[0] == names


def test_a_zero_bias_has_the_io_type_and_comes_after_the_residual() -> None:
    body = read_graph(HEAD + f"%a = add(%c, %z) {T} %r = relu(%a) {T} return %r }}")
    spelled = spellings(body)[0][1]
    assert [n.op.name for n in spelled.nodes if n.op.name != "constant"] == ["conv", "add", "add", "relu"]
    zeros = next(n for n in spelled.nodes if n.op.name == "constant" and "zero" in n.result.name)
    assert str(zeros.result.type) == "f16[1,8,1,1]"


def wide_bias(*, inner_output: bool = False, down: bool = True, tensor: bool = False) -> Graph:
    """conv in f16, cast to f32, bias in f32, relu, cast to f16."""
    graph = Graph("body")
    x = graph.add_input("x", TensorType((2, 6, 5, 5), DType.F16))
    conv = graph.add(CONV, x, graph.constant(np.full((6, 6, 3, 3), 0.125, np.float16)))
    bias = graph.constant(np.arange(6, dtype=np.float32).reshape(6, 1, 1))
    other = graph.add_input("z", TensorType((2, 6, 5, 5), DType.F32)) if tensor else bias
    added = graph.add(pw("add"), graph.add(Cast(DType.F32), conv), other)
    last = graph.add(pw("relu"), added)
    if down:
        last = graph.add(Cast(DType.F16), last)
    graph.set_outputs([last, added] if inner_output else [last], ["out", "inner"][: 1 + inner_output])
    return graph


def test_a_wide_bias_takes_the_io_type() -> None:
    body = wide_bias()
    assert check(body, rtol=2e-3)[0] == ("io_dtype",)  # the casts that go were roundings
    spelled = spellings(body)[0][1]
    assert [n.op.name for n in spelled.nodes if n.op.name != "constant"] == ["conv", "add", "relu"]
    assert all(v.type.dtype is DType.F16 for v in spelled.values())


def test_outputs_and_inputs_in_f32_stay_f32() -> None:
    for body in wide_bias(inner_output=True), wide_bias(down=False), wide_bias(tensor=True):
        assert check(body)[0] == ()


def product(dtype: str = "f32", w: str = '%w = constant weight("w") : f32[4,6]', lines: str = "return %m") -> Graph:
    head = f'graph "b" (%x: {dtype}[3,4], %y: {dtype}[4,6], %z: {dtype}[3,6], %t: {dtype}[2,3,6]) {{\n'
    w_name = "%w" if w else "%y"
    return read_graph(head + f"{w}\n%m = matmul(%x, {w_name}) : {dtype}[3,6]\n{lines}\n}}")


def test_a_linear_layer_becomes_a_convolution() -> None:
    body = product(lines="%s = add(%m, %z) : f32[3,6]\n%r = relu(%s) : f32[3,6]\nreturn %r")
    names = check(body)
    assert names[0] == ("as_convolution", "zero_bias")
    spelled = spellings(body)[0][1]
    conv = next(n for n in spelled.nodes if n.op.name == "conv")
    assert [str(v.type) for v in conv.operands] == ["f32[3,4,1,1]{0,2,3,1}", "f32[6,4,1,1]{0,2,3,1}"]
    assert str(spelled.outputs[0].type) == "f32[3,6]"


def test_products_that_are_no_linear_layer() -> None:
    assert check(product(w=""))[0] == ()  # both operands computed
    batched = read_graph(
        'graph "b" (%x: f32[2,3,4]) { %w = constant weight("w") : f32[2,4,6] '
        "%m = matmul(%x, %w) : f32[2,3,6] return %m }"
    )
    assert check(batched)[0] == ()
    mask = read_graph(  # a mask per image broadcasts along part of the rows
        'graph "b" (%x: f32[2,3,4], %k: f32[2,1,6]) { %w = constant weight("w") : f32[4,6] '
        "%m = matmul(%x, %w) : f32[2,3,6] %r = mul(%m, %k) : f32[2,3,6] return %r }"
    )
    assert check(mask)[0] == ()


def test_every_rewrite_is_exercised_here() -> None:
    engines = {"as_convolution", "io_dtype", "residual_first", "conv_operand_first", "zero_bias"}
    assert set(REWRITES) == {*engines, "gelu_by_tanh", "swish_by_tanh", "in_halves", "unpacked"}


def gelu_body(dtype: str, count: int = 1, more: str = "%r = gelu(%m)") -> Graph:
    return parse(
        f'graph "b" (%x: {dtype}[{count},1], %z: {dtype}[{count},1]) {{\n  %w = constant [1.0] : {dtype}[1,1]\n'
        f"  %m = matmul(%x, %w)\n  {more}\n  return %r\n}}"
    )


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_gelu_without_erf_is_gelu_up_to_rounding(dtype: DType) -> None:
    x = np.arange(1 << 16, dtype=np.uint16).view(dtype.numpy)
    x = x[np.isfinite(x.astype(np.float32))].reshape(-1, 1)
    ((names, spelled),) = faster_spellings(gelu_body(dtype.value, len(x)))
    assert names == ("gelu_by_tanh",)
    with np.errstate(over="ignore"):
        (got,) = evaluate(spelled, {"x": x, "z": x}).values()
    exact = x.astype(np.float64) * ndtr(x.astype(np.float64))
    units = 2.0 ** np.floor(np.log2(np.maximum(np.abs(exact), 1e-300))) * float(ml_dtypes.finfo(dtype.numpy).eps)
    off = np.abs(got.astype(np.float64) - exact)
    assert (off <= np.maximum(0.7 * units, 6e-7)).all()  # rounding alone: half a unit; the tail below -4: absolutely
    assert_close(got, exact, 2e-3 if dtype is DType.BF16 else 3e-4)


def test_gelu_without_erf_stays_within_what_exponentials_hold() -> None:
    """An engine may make tanh of exponentials, which overflow where NumPy's tanh is 1."""
    x = np.array([[-65504.0], [-40.0], [-1.0], [0.0], [1.0], [40.0], [65504.0]], np.float16)
    ((_, spelled),) = faster_spellings(gelu_body("f16", len(x)))
    (tanh,) = (node for node in spelled.nodes if node.op.name == "tanh")
    spelled.set_outputs(tanh.operands, ["z"])
    with np.errstate(over="ignore"):
        found = evaluate(spelled, {"x": x, "z": x})["z"]
    assert np.abs(found).max() <= LIMIT
    assert (np.sign(found) == np.sign(x)).all()


ROUNDED_GELU = """graph "b" (%x: i8[64,16]) {
  %w = constant weight("w") : i8[16,64]
  %s = constant [0.0004] : f32[]
  %u = constant [31.7] : f32[]
  %m = matmul(%x, %w)
  %f = cast(%m) {to=f32}
  %a = mul(%f, %s)
  %g = gelu(%a)
  %q = mul(%g, %u)
  %r = round(%q)
  %l = clip(%r) {min=-128.0, max=127.0}
  %y = cast(%l) {to=i8}
  return RESULTS
}"""


def test_gelu_without_erf_before_a_rounding_gives_almost_all_the_same_integers(rng: np.random.Generator) -> None:
    body = parse(ROUNDED_GELU.replace("RESULTS", "%y"), {"w": rng.integers(-128, 128, (16, 64), np.int8)})
    (spelled,) = (each for names, each in faster_spellings(body) if names == ("gelu_by_tanh",))
    spelled.verify()
    assert not any(node.op.name == "gelu" for node in spelled.nodes)
    feeds = {"x": rng.integers(-128, 128, (64, 16), np.int8)}
    want, got = (evaluate(each, feeds)["y"].astype(int) for each in (body, spelled))
    assert len(np.unique(want)) > 64
    assert np.abs(got - want).max() <= 1 and np.count_nonzero(got != want) <= want.size / 200


def test_gelu_that_is_stored_in_fp32_keeps_erf(rng: np.random.Generator) -> None:
    body = parse(ROUNDED_GELU.replace("RESULTS", "%y, %g"), {"w": rng.integers(-128, 128, (16, 64), np.int8)})
    assert ("gelu_by_tanh",) not in [names for names, _ in faster_spellings(body)]


def test_gelu_keeps_erf_where_that_costs_nothing_or_is_exact() -> None:
    assert faster_spellings(gelu_body("f32")) == []
    assert faster_spellings(gelu_body("f16", more="%r = gelu_tanh(%m)")) == []
    assert faster_spellings(gelu_body("f16", more="%g = gelu(%z)\n  %r = add(%g, %m)")) == []
    assert all(name != "gelu_by_tanh" for names, _ in spellings(gelu_body("f16")) for name in names)
    body = gelu_body("f16", more="%g = gelu(%m)\n  %r = add(%g, %z)")
    assert {names[-1] for names, _ in faster_spellings(body)} == {"gelu_by_tanh"}
    for names, spelled in faster_spellings(body):
        spelled.verify()
        assert str(respell(body, names)) == str(spelled)
        assert [v.type for v in spelled.outputs] == [v.type for v in body.outputs]
