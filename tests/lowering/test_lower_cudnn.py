"""Test lowering: every op is in a table, lowered graphs compute the same as their bodies, refusals give a reason."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import assert_close
from lowering.bodies import BODIES, NHWC, load

from fusec.errors import LoweringError
from fusec.ir import DType, Graph, TensorType
from fusec.lower_cudnn import LOWER, WITHOUT, Lowered, lower
from fusec.lowering.packing import pack, unpack
from fusec.lowering.simulator import extent, simulate
from fusec.ops import ALL, CLASSES, Conv, MatMul, Pointwise, pw
from fusec.passes.partition.equivalent_spellings import IN_HALVES, faster_spellings
from fusec.reference import evaluate
from fusec.text import parse

EXPECTED = Path(__file__).parent / "expected.txt"


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    if dtype is DType.BOOL:
        return rng.random(shape) < 0.5
    if dtype is DType.I8:
        return rng.integers(-128, 128, shape, np.int8)
    if dtype.is_int:
        return rng.integers(-9, 9, shape).astype(dtype.numpy)
    return rng.standard_normal(shape).astype(dtype.numpy)


def run(body: Graph, lowered: Lowered, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Simulate over packed buffers; outputs start poisoned."""
    types = {v.name: v.type for v in body.inputs}
    results = dict(zip(body.output_names, body.outputs, strict=True))
    buffers = {uid: lowered.part(uid, pack(np, feeds[name], types[name])) for uid, name in lowered.inputs}
    buffers |= {c.uid: pack(np, c.literal.array, c.type) for c in lowered.constants}
    for uid, name in lowered.outputs:
        poison = np.nan if results[name].type.dtype.is_float else 1
        buffers[uid] = np.full(results[name].type.size, poison, results[name].type.dtype.numpy)
    simulate(lowered.graph, buffers | lowered.spare_buffers(np))
    return {name: unpack(buffers[uid], results[name].type) for uid, name in lowered.outputs}


def check(body: Graph, rng: np.random.Generator, rtol: float) -> None:
    feeds = {v.name: random_array(rng, v.type.shape, v.type.dtype) for v in body.inputs}
    got = run(body, lower(body), feeds)
    want = evaluate(body, feeds, precision=DType.F64)
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert_close(got[name], array, rtol)


@pytest.mark.parametrize("title", [title for title in BODIES if title.startswith(("integer conv", "integer matmul"))])
def test_integers_multiplied_in_halves_give_the_same_integers(title: str, rng: np.random.Generator) -> None:
    """The sums are exact both ways, so that nothing is rounded otherwise."""
    body = load(BODIES[title])
    ((names, halves),) = faster_spellings(body)
    assert names == (IN_HALVES,)
    products = [node for node in halves.nodes if isinstance(node.op, (Conv, MatMul))]
    assert [v.type.dtype for node in products for v in node.operands] == [DType.F16, DType.F16]
    feeds = {v.name: random_array(rng, v.type.shape, v.type.dtype) for v in body.inputs}
    want, got = run(body, lower(body), feeds), run(halves, lower(halves), feeds)
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)


@pytest.mark.parametrize("title", [title for title in BODIES if title.startswith(("integer conv", "integer matmul"))])
def test_layers_that_differ_in_scales_share_their_graph_in_halves(title: str) -> None:
    """Else each layer of a quantised model would have plans of its own, which take long to build."""
    bodies = [load(source) for source in (BODIES[title], _with_other_numbers(BODIES[title]))]
    for whole in (bodies, [faster_spellings(body)[0][1] for body in bodies]):
        assert str(whole[0]) != str(whole[1])
        assert len({lower(body).graph.key for body in whole}) == 1


def _with_other_numbers(text: str) -> str:
    """Write one more digit after those of each scale."""
    return re.sub(r"(constant \[0\.\d+)(\] : f32\[\])", r"\g<1>1\2", text)


def test_sums_of_integers_that_are_stored_are_not_multiplied_in_halves() -> None:
    assert faster_spellings(load(BODIES["integer products as they are"])) == []


@pytest.mark.parametrize("title", BODIES)
def test_a_lowered_body_means_what_the_body_means(title: str, rng: np.random.Generator) -> None:
    body = load(BODIES[title])
    half = any(v.type.dtype.itemsize == 2 for v in body.values())
    check(body, rng, 2e-3 if half else 2e-6)


def test_lowered_text_is_as_recorded(request: pytest.FixtureRequest) -> None:
    """Compare the text of cuDNN graphs with the record; `pytest --accept` writes it anew."""
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
        # booleans are not stored; round is lowered only with the cast that follows it
        if name in LOWER and op.row.rule not in ("compare", "bool", "select") and name != "round"
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
    "attention in 32 bits": (
        """graph "b" (%q: f32[1,2,3,8], %k: f32[1,2,3,8]) {
  %y = attention(%q, %k, %k)
  return %y
}""",
        "only 16 bits",
    ),
    "attention, features apart in memory": (
        """graph "b" (%q: f16[1,2,3,8]{0,1,3,2}, %k: f16[1,2,3,8]) {
  %y = attention(%q, %k, %k)
  return %y
}""",
        "must be contiguous",
    ),
    "attention written with its features apart": (
        """graph "b" (%q: f16[1,2,3,8], %k: f16[1,2,3,8]) {
  %y = attention(%q, %k, %k) : f16[1,2,3,8]{0,1,3,2}
  return %y
}""",
        "an attention's result must be contiguous",
    ),
    "attention from the middle of 16 bytes": (
        """graph "b" (%x: f16[1,2,3,12], %k: f16[1,2,3,8]) {
  %q = slice(%x) {starts=[0,0,0,4], sizes=[1,2,3,8], steps=[1,1,1,1]}
  %y = attention(%q, %k, %k)
  return %y
}""",
        "its first element is not aligned to 16 bytes",
    ),
    "attention that feeds another op": (
        """graph "b" (%q: f16[1,2,3,8], %k: f16[1,2,3,8]) {
  %y = attention(%q, %k, %k)
  %z = relu(%y)
  return %z
}""",
        "may not feed another op",
    ),
    "a part of a result": (
        """graph "b" (%q: f16[4,8]) {
  %y = exp(%q)
  %z = slice(%y) {starts=[0,0], sizes=[2,8], steps=[1,1]}
  return %z
}""",
        "whose rest is not stored",
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
    "a round that is not stored in 8 bits": (
        """graph "b" (%x: f32[5]) {
  %y = round(%x)
  %z = relu(%y)
  return %z
}""",
        "only where it stores 8-bit integers",
    ),
    "a round whose limits are not those of 8 bits": (
        """graph "b" (%x: f32[5]) {
  %y = round(%x)
  %l = clip(%y) {min=-128.0, max=128.0}
  %z = cast(%l) {to=i8}
  return %z
}""",
        "only where it stores 8-bit integers",
    ),
    "a sum that is no whole number": (
        """graph "b" (%x: f32[5]) {
  %y = round(%x)
  %h = constant [0.5] : f32[]
  %s = add(%y, %h)
  %l = clip(%s) {min=-128.0, max=127.0}
  %z = cast(%l) {to=i8}
  return %z
}""",
        "only where it stores 8-bit integers",
    ),
    "whole numbers that are also stored": (
        """graph "b" (%x: f32[5]) {
  %y = round(%x)
  %l = clip(%y) {min=-128.0, max=127.0}
  %z = cast(%l) {to=i8}
  return %y, %z
}""",
        "only where it stores 8-bit integers",
    ),
    "integers that are read in the graph that rounds them": (
        """graph "b" (%x: f32[5]) {
  %y = round(%x)
  %l = clip(%y) {min=-128.0, max=127.0}
  %q = cast(%l) {to=i8}
  %f = cast(%q) {to=f32}
  return %q, %f
}""",
        "only where it is stored",
    ),
    "products of 32-bit integers": (
        """graph "b" (%x: i32[3,5], %y: i32[5,4]) {
  %z = matmul(%x, %y)
  return %z
}""",
        "matmul in i32",
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


def test_a_slope_above_one_is_not_left_to_cudnn(rng: np.random.Generator) -> None:
    """cuDNN takes the larger of x and slope * x."""
    for alpha, direct in ((0.1, True), (1.0, True), (1.5, False), (-0.5, False)):
        graph = parse(f'graph "g" (%x: f32[4,8]) {{\n %y = leaky_relu(%x) {{alpha={alpha}}}\n return %y\n}}')
        lowered = lower(graph)
        assert (lowered.graph.calls[0].mode == "leaky_relu") == direct
        feeds = {"x": random_array(rng, (4, 8), DType.F32)}
        assert_close(run(graph, lowered, feeds)["y"], evaluate(graph, feeds)["y"], 1e-6)


def test_numbers_that_products_read_are_in_memory(rng: np.random.Generator) -> None:
    """A number by value lives in host memory; engines read weights, and the bias of one filter, from the device."""
    text = """graph "g" (%x: f32[2,1,4,5]{0,2,3,1}) {
      %w = constant [2.5] : f32[1,1,1,1]
      %b = constant [0.5] : f32[]
      %c = conv(%x, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}
      %d = add(%c, %b)
      return %d
    }"""
    graph = parse(text)
    lowered = lower(graph)
    assert not [t for t in lowered.graph.tensors if t.value is not None]
    feeds = {"x": random_array(rng, (2, 1, 4, 5), DType.F32)}
    assert_close(run(graph, lowered, feeds)["d"], evaluate(graph, feeds)["d"], 1e-6)
    several = parse(text.replace("constant [2.5] : f32[1,1,1,1]", "constant [2.5, 1.0] : f32[2,1,1,1]"))
    assert [t.value for t in lower(several).graph.tensors if t.value is not None] == [0.5]


@pytest.mark.parametrize("computed", [False, True])
def test_scale_and_bias_are_two_tensors(computed: bool, rng: np.random.Generator) -> None:
    """Given one tensor as both, a layer norm's plan fails when it runs: it finds no bias."""
    given, held = (", %s: f32[3]", "") if computed else ("", "%s = constant [1.0, 2.0, 3.0] : f32[3]")
    body = parse(f'graph "g" (%x: f32[4,3]{given}) {{\n{held}\n %y = layer_norm(%x, %s, %s) {{axis=1}}\n return %y\n}}')
    lowered = lower(body)
    (call,) = lowered.graph.calls
    assert len(set(call.inputs)) == 4
    feeds = {v.name: random_array(rng, v.type.shape, DType.F32) for v in body.inputs}
    assert_close(run(body, lowered, feeds)["y"], evaluate(body, feeds)["y"], 1e-5)


def test_an_epilogue_reads_the_image_through_a_tensor_of_its_own(rng: np.random.Generator) -> None:
    """As one tensor, conv(x) + x was an illegal memory access in one plan and failed in another."""
    body = parse("""graph "g" (%x: f32[2,4,3,5]{0,2,3,1}, %w: f32[4,4,1,1]{0,2,3,1}) {
      %c = conv(%x, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}
      %d = add(%c, %x)
      %e = mul(%d, %x)
      return %e
    }""")
    lowered = lower(body)
    assert [name for _, name in lowered.inputs] == ["x", "w", "x"]
    conv, add, mul = lowered.graph.calls
    assert add.inputs[1] == mul.inputs[1] != conv.inputs[0]
    feeds = {v.name: random_array(rng, v.type.shape, DType.F32) for v in body.inputs}
    assert_close(run(body, lowered, feeds)["e"], evaluate(body, feeds)["e"], 1e-5)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("elu", {"alpha": 0.7}),
        ("selu", {}),
        ("celu", {"alpha": 1.7}),
        ("leaky_relu", {"alpha": 2.0}),
        ("leaky_relu", {"alpha": -0.5}),
    ],
)
def test_an_activation_of_nan_is_nan(name: str, attributes: dict[str, float]) -> None:
    """It is lowered to a select, because cuDNN's max and min turn NaN into a number."""
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2, 2), DType.F32))
    graph.set_outputs([graph.add(CLASSES[name](**attributes), x)])
    feeds = {"x": np.array([[np.nan, 200.0], [-3.0, np.inf]], np.float32)}
    want = evaluate(graph, feeds)
    for key, array in run(graph, lower(graph), feeds).items():
        np.testing.assert_allclose(array, want[key], rtol=1e-6)


def test_the_gradient_of_leaky_relu_is_a_choice() -> None:
    """cuDNN's mode gives 0 or NaN for an operand near the largest number."""
    graph = Graph("g")
    dy, x = (graph.add_input(key, TensorType((2, 2), DType.F32)) for key in ("dy", "x"))
    graph.set_outputs([graph.add(pw("leaky_relu_backward", alpha=0.5), dy, x)])
    made = lower(graph)
    assert [c.mode for c in made.graph.calls] == ["mul", "cmp_gt", "binary_select"]
    feeds = {"dy": np.full((2, 2), 4.0, np.float32), "x": np.array([[1.0, -1.0], [3e38, np.nan]], np.float32)}
    ((_, got),) = run(graph, made, feeds).items()
    np.testing.assert_array_equal(got, [[4.0, 2.0], [4.0, 2.0]])


@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_angles_are_left_to_kernels(name: str) -> None:
    graph = Graph("g")
    graph.set_outputs([graph.add(CLASSES[name](), graph.add_input("x", TensorType((2, 2), DType.F32)))])
    with pytest.raises(LoweringError, match="loses digits"):
        lower(graph)
