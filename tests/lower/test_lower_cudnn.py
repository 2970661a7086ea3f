"""Lowering: every op has a place, lowered graphs mean what their bodies mean, refusals give a reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import assert_close
from lower.bodies import BODIES, NHWC, load

from fusec.errors import LoweringError
from fusec.ir import DType, Graph, TensorType
from fusec.lower_cudnn import LOWER, WITHOUT, Lowered, lower
from fusec.ops import ALL, CLASSES, Pointwise
from fusec.reference import evaluate
from fusec.simulate import extent, simulate
from fusec.storage import pack, unpack

EXPECTED = Path(__file__).parent / "expected.txt"


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    if dtype is DType.BOOL:
        return rng.random(shape) < 0.5
    if dtype.is_int:
        return rng.integers(-9, 9, shape).astype(dtype.numpy)
    return rng.standard_normal(shape).astype(dtype.numpy)


def run(body: Graph, lowered: Lowered, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Simulate over packed buffers; outputs start poisoned."""
    types = {v.name: v.type for v in body.inputs}
    results = dict(zip(body.output_names, body.outputs, strict=True))
    buffers = {uid: pack(np, feeds[name], types[name]) for uid, name in lowered.inputs}
    buffers |= {c.uid: pack(np, c.literal.array, c.type) for c in lowered.constants}
    for uid, name in lowered.outputs:
        poison = np.nan if results[name].type.dtype.is_float else 1
        buffers[uid] = np.full(results[name].type.size, poison, results[name].type.dtype.numpy)
    simulate(lowered.graph, buffers)
    return {name: unpack(buffers[uid], results[name].type) for uid, name in lowered.outputs}


def check(body: Graph, rng: np.random.Generator, rtol: float) -> None:
    feeds = {v.name: random_array(rng, v.type.shape, v.type.dtype) for v in body.inputs}
    got = run(body, lower(body), feeds)
    want = evaluate(body, feeds, precision=DType.F64)
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert_close(got[name], array, rtol)


@pytest.mark.parametrize("title", BODIES)
def test_a_lowered_body_means_what_the_body_means(title: str, rng: np.random.Generator) -> None:
    body = load(BODIES[title])
    half = any(v.type.dtype.itemsize == 2 for v in body.values())
    check(body, rng, 2e-3 if half else 2e-6)


def test_lowered_text_is_as_recorded(request: pytest.FixtureRequest) -> None:
    """What goes to cuDNN, to the letter; `pytest --accept` records it anew."""
    text = "\n".join(f"== {title}\n{lower(load(source)).graph}\n" for title, source in BODIES.items())
    if request.config.getoption("--accept", default=False):
        EXPECTED.write_text(text)
    assert text == EXPECTED.read_text()


def test_every_op_is_lowered_or_listed_with_a_reason() -> None:
    names = {op.name for op in ALL}
    assert names == set(LOWER) | set(WITHOUT)
    assert not set(LOWER) & set(WITHOUT)


ALTERNATIVES = {"elu": [{"alpha": 0.5}], "clip": [{"min": -0.5}, {"max": 0.5}, {"min": -0.5, "max": 0.5}, {"min": 0.0}]}


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        (name, a)
        for name, op in CLASSES.items()
        if name in LOWER and op.row.rule not in ("compare", "bool", "select")  # booleans are not stored
        for a in ({}, *ALTERNATIVES.get(name, []))
    ],
)
def test_every_pointwise_op_lowers_to_its_meaning(
    name: str, attributes: dict[str, float], rng: np.random.Generator
) -> None:
    op: Pointwise = CLASSES[name](**attributes)
    graph = Graph(name)
    operands = [graph.add_input(f"x{i}", TensorType((5, 33), DType.F32)) for i in range(op.row.arity)]
    graph.set_outputs([graph.add(op, *operands, name="y")])
    feeds = {v.name: random_array(rng, v.type.shape, v.type.dtype) for v in graph.inputs}
    if name in ("log", "sqrt", "rsqrt", "pow"):
        feeds["x0"] = np.abs(feeds["x0"]) + 0.1
    (want,) = evaluate(graph, feeds, precision=DType.F64).values()
    (got,) = run(graph, lower(graph), feeds).values()
    assert_close(got, want, 5e-6)


REFUSED = {
    "a reshape that needs a copy": (
        f"""graph "b" (%x: f32[1,4,3,3]{NHWC}) {{
  %y = reshape(%x) {{shape=[1,36]}}
  %z = exp(%y)
  return %z
}}""",
        "needs a copy",
    ),
    "four dims that do not merge": (
        """graph "b" (%x: f32[2,3,4,5], %y: f32[2,1,4,1]) {
  %z = add(%x, %y)
  return %z
}""",
        "needs 4 dims",
    ),
    "integer arithmetic": (
        """graph "b" (%x: i32[5], %y: i32[5]) {
  %z = add(%x, %y)
  return %z
}""",
        "fp32",
    ),
    "64-bit integers": (
        """graph "b" (%x: i64[5]) {
  %z = cast(%x) {to=f32}
  return %z
}""",
        "i64",
    ),
    "a cast that rounds": (
        """graph "b" (%x: f32[5]) {
  %z = cast(%x) {to=i32}
  return %z
}""",
        "rounding",
    ),
    "double precision": (
        """graph "b" (%x: f64[5]) {
  %z = exp(%x)
  return %z
}""",
        "f64",
    ),
    "a reduction that feeds another op": (
        """graph "b" (%x: f32[5,6]) {
  %s = reduce(%x) {kind="sum", axes=[1]}
  %z = exp(%s)
  return %z
}""",
        "may not feed",
    ),
    "a reduced dim in the middle": (
        """graph "b" (%x: f32[5,6,7]) {
  %s = reduce(%x) {kind="sum", axes=[1]}
  return %s
}""",
        "outermost nor the innermost",
    ),
    "a gate in a convolution's epilogue": (
        f"""graph "b" (%x: f32[2,4,6,6]{NHWC}, %g: f32[2,4,1,1]) {{
  %w = constant weight("w") : f32[4,4,3,3]{NHWC}
  %c = conv(%x, %w) {{strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}} : f32[2,4,6,6]{NHWC}
  %d = mul(%c, %g) : f32[2,4,6,6]{NHWC}
  return %d
}}""",
        "only full, per-channel",
    ),
    "a computed operand broadcast along two dims": (
        """graph "b" (%x: f32[2,3,4], %g: f32[1,3,1]) {
  %c = mul(%x, %g)
  return %c
}""",
        "two dims",
    ),
    "booleans in memory": (
        """graph "b" (%x: f32[8], %y: f32[8]) {
  %c = cmp_gt(%x, %y)
  return %c
}""",
        "boolean tensor in memory",
    ),
    "a view only": (
        """graph "b" (%x: f32[5,6]) {
  %s = reshape(%x) {shape=[30]}
  return %s
}""",
        "view of an input",
    ),
    "an op cuDNN lacks": (
        """graph "b" (%x: f32[5,6]) {
  %s = sign(%x)
  return %s
}""",
        "no pointwise mode",
    ),
}


@pytest.mark.parametrize("title", REFUSED)
def test_what_cannot_be_lowered_says_why(title: str) -> None:
    text, reason = REFUSED[title]
    with pytest.raises(LoweringError, match=reason):
        lower(load(text))


def test_equal_work_has_equal_graphs_whatever_the_names() -> None:
    text = BODIES["linear over rank 3 folds the batch into the rows"]
    renamed = text.replace("%x", "%other").replace("%f", "%result").replace('"w"', '"v"')
    assert lower(load(text)).graph == lower(load(renamed)).graph
    assert lower(load(text)).graph.key != lower(load(text.replace("gelu", "relu"))).graph.key


def test_json_round_trip() -> None:
    for source in BODIES.values():
        graph = lower(load(source)).graph
        assert type(graph).from_json(graph.to_json()) == graph


def test_extent_counts_the_span_of_strides() -> None:
    graph = lower(load(BODIES["conv1d is lifted to two dims"])).graph
    assert [extent(t) for t in graph.inputs] == [2 * 6 * 50, 9 * 6 * 3]


def test_true_fp32_is_part_of_the_graph() -> None:
    body = load(BODIES["conv3d"])
    assert lower(body, tensor_cores=False).graph.key != lower(body, tensor_cores=True).graph.key
