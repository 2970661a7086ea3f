"""Test `grad` and `backward`: interface, accumulation, and what they refuse."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
from helpers import assert_close

import fusec
from fusec import gradients
from fusec.builder import Builder
from fusec.errors import ModelError, VerifyError
from fusec.gradients import backward, grad
from fusec.ir import DType, Graph
from fusec.ops import TopK
from fusec.reference import evaluate
from fusec.testing.case import Case
from fusec.testing.properties.finite_differences import gradients as gradients_agree
from fusec.text import parse

TWO_LAYERS = """
graph "g" (%x: f32[4,3], %w: f32[3,5], %b: f32[5], %unused: f32[2]) {
  %h = matmul(%x, %w)
  %a = add(%h, %b)
  %r = relu(%a)
  %l = reduce(%r) {kind="sum_square", axes=[0,1], keepdims=false}
  return %l as "loss", %r
}"""


def test_the_gradients_are_further_outputs(rng: np.random.Generator) -> None:
    graph = parse(TWO_LAYERS)
    both = grad(graph, "loss", ["w", "b", "unused"])
    assert both.output_names == ("loss", "r", "w.grad", "b.grad", "unused.grad")
    assert graph.output_names == ("loss", "r")
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs}
    got = evaluate(both, feeds)
    loss = 2 * np.maximum(feeds["x"] @ feeds["w"] + feeds["b"], 0)
    assert_close(got["w.grad"], feeds["x"].T @ loss, 1e-6)
    assert_close(got["b.grad"], loss.sum(0), 1e-6)
    assert not got["unused.grad"].any()


def test_fusec_exports_it() -> None:
    assert fusec.grad is grad
    assert fusec.backward is backward


def test_a_value_used_twice_gets_both_gradients(rng: np.random.Generator) -> None:
    b = Builder()
    x = b.input("x", (4,))
    (found,) = backward((x * x + x.exp() * x).sum(), [x])
    b.output(dx=found)
    at = rng.standard_normal(4).astype(np.float32)
    assert_close(evaluate(b.graph(), {"x": at})["dx"], 2 * at + np.exp(at) * (1 + at), 1e-6)


def test_gradients_by_values_inside_the_graph(rng: np.random.Generator) -> None:
    b = Builder()
    x = b.input("x", (4,))
    middle = x * 3.0
    dmiddle, dx = backward((middle * middle).sum(), [middle, x])
    b.output(dmiddle=dmiddle, dx=dx)
    at = rng.standard_normal(4).astype(np.float32)
    got = evaluate(b.graph(), {"x": at})
    assert_close(got["dmiddle"], 6 * at, 1e-6)
    assert_close(got["dx"], 18 * at, 1e-6)


def test_gradients_of_gradients(rng: np.random.Generator) -> None:
    """The second derivative of tanh, by its rule's own rule."""
    b = Builder("f64")
    x = b.input("x", (5,))
    (first,) = backward(x.tanh().sum(), [x])
    (second,) = backward(first.sum(), [x])
    b.output(second=second)
    at = rng.standard_normal(5)
    t = np.tanh(at)
    assert_close(evaluate(b.graph(), {"x": at})["second"], -2 * t * (1 - t * t), 1e-9)


def test_a_seed_weights_the_elements(rng: np.random.Generator) -> None:
    graph = grad(parse(TWO_LAYERS), "r", ["x"], seed=True)
    assert graph.inputs[-1].name == "r.seed"
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs}
    got = evaluate(graph, feeds)["x.grad"]
    alive = feeds["x"] @ feeds["w"] + feeds["b"] > 0
    assert_close(got, (feeds["r.seed"] * alive) @ feeds["w"].T, 1e-6)


def test_half_precision_statistics_are_summed_in_fp32(rng: np.random.Generator) -> None:
    """300 squares of about 25 overflow f16; the gradient of a norm does not."""
    b = Builder("f16")
    x, scale = b.input("x", (2, 3000)), b.input("scale", (3000,))
    found = backward(b.rms_norm(x, scale).sum(), [x])
    b.output(dx=found[0])
    feeds = {"x": (rng.standard_normal((2, 3000)) * 5).astype(np.float16), "scale": np.ones(3000, np.float16)}
    graph = b.graph()
    got = evaluate(graph, feeds)["dx"]
    assert got.dtype == np.float16
    assert_close(got.astype(np.float64), evaluate(graph, feeds, precision=DType.F64)["dx"], 2e-2)


def test_top_k_sends_gradients_back_to_where_the_values_were(rng: np.random.Generator) -> None:
    """Use distinct numbers, because the maximum of two equal numbers has no derivative."""
    for axis, largest in ((0, True), (1, False), (-1, True)):
        b = Builder("f64")
        x = b.input("x", (4, 6, 3))
        values, _ = b.results(TopK(2, axis, largest), x)
        b.output(y=values)
        gradients_agree(b.graph(), Case(int(rng.integers(1000))))


@pytest.mark.parametrize(
    ("of", "wrt", "message"),
    [
        ("nothing", ["x"], "no output %nothing; outputs are %loss, %r"),
        ("loss", ["h"], "no input %h; inputs are %x, %w, %b, %unused"),
    ],
)
def test_unknown_names_are_refused(of: str, wrt: list[str], message: str) -> None:
    with pytest.raises(VerifyError, match=message):
        grad(parse(TWO_LAYERS), of, wrt)


def test_several_elements_need_a_seed() -> None:
    with pytest.raises(ModelError, match=r"it has 20 elements, give a seed of its shape"):
        grad(parse(TWO_LAYERS), "r", ["x"])


def test_integers_have_no_gradient() -> None:
    b = Builder()
    x, n = b.input("x", (3,)), b.input("n", (3,), "i64")
    with pytest.raises(ModelError, match=r"test_grad.py:\d+: a gradient by .*not a floating-point tensor"):
        backward(x.sum(), [n])
    with pytest.raises(ModelError, match=r"a gradient by array.*not a floating-point tensor"):
        fusec.backward(x.sum(), [np.zeros(2)])  # pyright: ignore[reportArgumentType]  # a mistake of users
    with pytest.raises(ModelError, match="one tensor where several are wanted"):
        fusec.backward(x.sum(), x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="which is not a floating-point tensor"):
        backward(n.sum(), [x])


def test_an_op_without_a_rule_is_named() -> None:
    b = Builder()
    x = b.input("x", (3,))
    y = x.exp().sum()
    with (
        patch.object(gradients, "RULES", {k: v for k, v in gradients.RULES.items() if k != "exp"}),
        pytest.raises(VerifyError, match="exp has no gradient rule"),
    ):
        backward(y, [x])


def test_ops_with_zero_derivative_pass_no_gradient() -> None:
    b = Builder()
    x = b.input("x", (3,))
    (found,) = backward((x.pointwise("floor") + x.pointwise("sign")).sum(), [x])
    b.output(dx=found)
    assert not evaluate(b.graph(), {"x": np.ones(3, np.float32)})["dx"].any()


def test_gradient_nodes_have_the_origin_of_their_node() -> None:
    graph = parse(
        'graph "g" (%x: f32[2]) {\n %y = tanh(%x) loc("act1")\n %s = reduce(%y) {kind="sum", axes=[0]}\n return %s\n}'
    )
    both = grad(graph, "s", ["x"])
    assert [n.origin for n in both.nodes if n.op.name == "tanh_backward"] == [("act1",)]


def test_a_graph_without_the_builder_stays_as_it_was() -> None:
    graph = Graph("g")
    assert graph.last is None and graph.since(None) == []
