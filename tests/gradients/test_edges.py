"""Test gradients at edges that random graphs seldom reach: ties, rows without keys, long pads, transposed weights."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_close

from fusec.gradients import grad
from fusec.reference import evaluate
from fusec.testing.case import Case
from fusec.testing.properties.finite_differences import gradients as gradients_agree
from fusec.text import parse

BY_DIFFERENCES = {
    "an uneven pad": """graph "g" (%x: f64[2,3,5,6], %w: f64[4,3,3,2]) {
  %y = conv(%x, %w) {strides=[2,1], pads=[1,0,0,2], dilations=[1,2]}
  return %y
}""",
    "output padding of more than a stride": """graph "g" (%x: f64[2,3,4,3], %w: f64[3,2,3,3]) {
  %y = conv_transpose(%x, %w) {strides=[2,1], pads=[1,0,1,1], dilations=[1,1], output_padding=[3,2]}
  return %y
}""",
    "a weight read transposed": """graph "g" (%x: f64[3,4,5], %w: f64[5,5]) {
  %t = transpose(%w) {perm=[1,0]}
  %y = matmul(%x, %t)
  return %y
}""",
    "a batch of weights read transposed": """graph "g" (%x: f64[3,4,5], %w: f64[3,5,5]) {
  %t = transpose(%w) {perm=[0,2,1]}
  %y = matmul(%x, %t)
  return %y
}""",
    "an even number of neighbours": """graph "g" (%x: f64[2,7,3]) {
  %y = lrn(%x) {size=4, alpha=0.5, beta=0.75, bias=1.0}
  return %y
}""",
    "heads that share keys": """graph "g" (%x: f64[2,4,3,4], %k: f64[2,2,5,4], %v: f64[2,2,5,3], %d: f64[2,4,3,3]) {
  %y, %s = attention_train(%x, %k, %v) {scale=0.5}
  %p, %q, %r = attention_backward(%d, %x, %k, %v, %y, %s) {scale=0.5}
  return %y, %q, %r
}""",
    "groups of offsets that share filters": """graph "g" (%x: f64[2,6,5,4], %w: f64[4,3,3,2],
    %o: f64[2,36,3,5], %m: f64[2,18,3,5]) {
  %y = deform_conv(%x, %w, %o, %m) {strides=[2,1], pads=[1,0,1,2], dilations=[1,1], groups=2, offset_groups=3}
  return %y
}""",
    "a loop of states, sequences and weights": """graph "g" (%h: f32[2,3], %c: f32[2,3], %x: f32[4,2,3], %w: f32[3,3]) {
  %y, %d, %r = scan(%h, %c, %x, %w) {body=graph "body" (%h: f32[2,3], %c: f32[2,3], %x: f32[2,3], %w: f32[3,3]) {
    %half = constant [0.5] : f32[1]
    %p = matmul(%h, %w)
    %s = add(%p, %x)
    %t = tanh(%s)
    %m = mul(%c, %half)
    %n = add(%m, %t)
    return %t, %n, %s
  }, steps=4, states=2, sequences=1}
  return %y, %d, %r
}""",
    "a loop whose steps choose by an integer state": """graph "g" (%x: f64[3], %i: i64[], %a: f64[3]) {
  %y, %j, %r = scan(%x, %i, %a) {body=graph "body" (%x: f64[3], %i: i64[], %a: f64[3]) {
    %one = constant [1] : i64[]
    %j = add(%i, %one)
    %odd = bitwise_and(%j, %one)
    %c = cast(%odd) {to=bool}
    %f = floor(%x)
    %p = mul(%x, %a)
    %q = sub(%x, %f)
    %y = where(%c, %p, %q)
    return %y, %j, %x
  }, steps=5, states=2}
  return %y, %r
}""",
    "a loop of one step": """graph "g" (%x: f64[1,3], %s: f64[3]) {
  %y, %r = scan(%s, %x) {body=graph "body" (%s: f64[3], %x: f64[3]) {
    %y = mul(%s, %x)
    return %y, %y as "row"
  }, steps=1, states=1, sequences=1}
  return %y, %r
}""",
    "statistics of a norm": """graph "g" (%x: f64[4,3,2], %s: f64[3], %b: f64[3]) {
  %y, %m, %i = batch_norm_train(%x, %s, %b)
  return %y, %m, %i
}""",
}


@pytest.mark.parametrize("name", BY_DIFFERENCES)
def test_edge_cases_agree_with_finite_differences(name: str) -> None:
    graph = parse(BY_DIFFERENCES[name])
    for seed in range(2):
        gradients_agree(graph, Case(seed, "normal"))


def test_equal_maxima_share_the_gradient() -> None:
    graph = parse("""graph "g" (%x: f32[2,4]) {
  %y = reduce(%x) {kind="max", axes=[1], keepdims=false}
  return %y
}""")
    at = np.array([[1, 3, 3, 0], [2, 2, 2, 2]], np.float32)
    found = evaluate(grad(graph, "y", ["x"], seed=True), {"x": at, "y.seed": np.array([6, 8], np.float32)})["x.grad"]
    np.testing.assert_array_equal(found, [[0, 3, 3, 0], [2, 2, 2, 2]])


def test_the_first_of_equal_maxima_gets_the_gradient() -> None:
    """The same holds for the gradient of that gradient."""
    graph = parse("""graph "g" (%d: f32[1,1,2], %x: f32[1,1,4]) {
  %y = max_pool_backward(%d, %x) {window=[2], strides=[2], pads=[0,0], dilations=[1]}
  return %y
}""")
    feeds = {"x": np.array([[[5, 5, 1, 7]]], np.float32), "d": np.ones((1, 1, 2), np.float32)}
    seed = np.array([[[10, 20, 30, 40]]], np.float32)
    found = evaluate(grad(graph, "y", ["d"], seed=True), {**feeds, "y.seed": seed})
    np.testing.assert_array_equal(found["d.grad"], [[[10, 40]]])


ATTENTION = """graph "g" (%q: DTYPE[2,2,3,8], %k: DTYPE[2,2,5,8], %v: DTYPE[2,2,5,8], %b: DTYPE[2,1,3,5]) {{
  %y = attention(%q, %k, %v, %b) {{{}}}
  return %y
}}"""


@pytest.mark.parametrize("what", ["scale=0.5", "scale=0.5, guarded=true", "scale=0.5, hides=true, guarded=true"])
@pytest.mark.parametrize("wrt", [["q", "k", "v"], ["q", "b"]])
def test_attention_in_16_bits_agrees_with_fp32(what: str, wrt: list[str], rng: np.random.Generator) -> None:
    """In 16 bits attention_backward is used, except where rows may see no key or the bias has a gradient."""
    wide, half = (parse(ATTENTION.format(what).replace("DTYPE", dtype)) for dtype in ("f32", "f16"))
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float16) for v in half.inputs}
    if "guarded" in what:
        feeds["b"][0, 0, 1] = -np.inf
    seeds = rng.standard_normal((2, 2, 3, 8)).astype(np.float16)
    found = evaluate(grad(half, "y", wrt, seed=True), {**feeds, "y.seed": seeds})
    given = {name: array.astype(np.float32) for name, array in (feeds | {"y.seed": seeds}).items()}
    right = evaluate(grad(wide, "y", wrt, seed=True), given)
    for name in wrt:
        assert np.abs(right[f"{name}.grad"]).max() > 0
        assert_close(found[f"{name}.grad"], right[f"{name}.grad"], 5e-3)
