"""Compare the optimisers of ai.onnx.preview.training with their formulas in f64, each compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model
from helpers import assert_close
from onnx import helper
from onnx.reference import ReferenceEvaluator

import fusec
from fusec.errors import ModelError
from fusec.frontends import load
from fusec.frontends.onnx import training_steps
from fusec.reference import evaluate

Given = dict[str, Any]
Formula = Callable[..., tuple[Any, ...]]
EPSILON = float(np.float32(1e-6))
DOMAIN = "ai.onnx.preview.training"
SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 5))


def adagrad(a: Given, r: Any, t: int, x: Any, g: Any, h: Any) -> tuple[Any, ...]:
    g = a.get("norm_coefficient", 0.0) * x + g
    h = h + g * g
    r = r / (1 + t * a.get("decay_factor", 0.0))
    return x - r * g / (np.sqrt(h) + a.get("epsilon", EPSILON)), h


def adam(a: Given, r: Any, t: int, x: Any, g: Any, v: Any, h: Any) -> tuple[Any, ...]:
    alpha, beta = (float(np.float32(a.get(name, default))) for name, default in (("alpha", 0.9), ("beta", 0.999)))
    g = a.get("norm_coefficient", 0.0) * x + g
    v = alpha * v + (1 - alpha) * g
    h = beta * h + (1 - beta) * g * g
    r = r * np.sqrt(1 - beta**t) / (1 - alpha**t) if t > 0 else r
    x = x - r * v / (np.sqrt(h) + a.get("epsilon", EPSILON))
    return (1 - a.get("norm_coefficient_post", 0.0)) * x, v, h


def momentum(a: Given, r: Any, t: int, x: Any, g: Any, v: Any) -> tuple[Any, ...]:
    g = a["norm_coefficient"] * x + g
    v = a["alpha"] * v + (a["beta"] if t > 0 else 1) * g
    return x - r * (g + a["alpha"] * v if a["mode"] == "nesterov" else v), v


PLAIN: Given = {"alpha": 0.875, "beta": 0.75, "mode": "standard", "norm_coefficient": 0.0}
CASES: dict[str, tuple[str, Given]] = {
    "adagrad": ("Adagrad", {}),
    "adagrad, regularised": ("Adagrad", {"norm_coefficient": 0.125}),
    "adagrad, decaying": ("Adagrad", {"decay_factor": 0.25, "epsilon": 0.5}),
    "adam": ("Adam", {}),
    "adam, regularised": ("Adam", {"norm_coefficient": 0.125, "norm_coefficient_post": 0.25}),
    "adam, other coefficients": ("Adam", {"alpha": 0.5, "beta": 0.75, "epsilon": 0.5}),
    "adam, without means": ("Adam", {"alpha": 0.0, "beta": 0.0}),
    "adam, alternating": ("Adam", {"alpha": -0.5}),
    "momentum": ("Momentum", PLAIN),
    "momentum, regularised": ("Momentum", {**PLAIN, "norm_coefficient": 0.125}),
    "momentum, whole gradients": ("Momentum", {**PLAIN, "beta": 1.0}),
    "nesterov": ("Momentum", {**PLAIN, "mode": "nesterov"}),
    "nesterov, regularised": ("Momentum", {**PLAIN, "mode": "nesterov", "norm_coefficient": 0.125}),
}
FORMULAS: dict[str, tuple[Formula, int]] = {"Adagrad": (adagrad, 3), "Adam": (adam, 4), "Momentum": (momentum, 3)}


def tensors(rng: np.random.Generator, op: str, shapes: Sequence[tuple[int, ...]], dtype: Any) -> list[np.ndarray]:
    """Make parameters, gradients and state of both signs. No difference of two of them loses digits."""
    signs = [rng.choice([-1, 1], shape) for shape in shapes]

    def made(low: float, high: float, of: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(rng.uniform(low, high, sign.shape) * sign, dtype) for sign in of]

    parameters = made(2, 3, [rng.choice([-1, 1], shape) for shape in shapes])
    means = [] if op == "Adagrad" else made(0.1, 0.5, signs)
    squares = [] if op == "Momentum" else made(0.01, 2, [abs(sign) for sign in signs])
    return [*parameters, *made(0.75, 1.5, signs), *means, *squares]


def step_model(
    op: str, arrays: Sequence[np.ndarray], attributes: Given, fixed: dict[str, np.ndarray] | None = None
) -> onnx.ModelProto:
    """Make a model of one node. arrays: R, T and the tensors. fixed: those of R and T that are initializers."""
    fixed = fixed or {}
    names = ["r", "t", *(f"x{i}" for i in range(len(arrays) - 2))]
    results = [f"y{i}" for i in range((len(names) - 2) * (FORMULAS[op][1] - 1) // FORMULAS[op][1])]
    node = helper.make_node(op, names, results, name="n", domain=DOMAIN, **attributes)
    given = [
        info(name, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype))
        for name, a in zip(names, arrays, strict=True)
        if name not in fixed
    ]
    proto = model([node], given, results, fixed)
    proto.opset_import.add(domain=DOMAIN, version=1)
    return proto


def stepped(op: str, attributes: Given, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Compute the results by the formula, in f64."""
    formula, lists = FORMULAS[op]
    rate, count, *rest = arrays
    number = len(rest) // lists
    groups = [[v.astype(np.float64) for v in rest[first::number]] for first in range(number)]
    made = [formula(attributes, rate.astype(np.float64).item(), count.item(), *group) for group in groups]
    return [new for column in zip(*made, strict=True) for new in column]


def feeds_of(arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    return dict(zip(["r", "t", *(f"x{i}" for i in range(len(arrays) - 2))], arrays, strict=True))


def agrees(op: str, attributes: Given, arrays: Sequence[np.ndarray], rtol: float, **options: Any) -> None:
    exe = fusec.compile(step_model(op, arrays, attributes), target="cpu", **options)
    got = exe.run(None, feeds_of(arrays))
    for new, want in zip(got, stepped(op, attributes, arrays), strict=True):
        assert new.dtype == arrays[2].dtype
        assert_close(new, want, rtol)


@pytest.mark.parametrize("count", [0, 1, 7, 3000])
@pytest.mark.parametrize("name", CASES)
def test_several_tensors(name: str, count: int, rng: np.random.Generator) -> None:
    op, attributes = CASES[name]
    arrays = [np.array(0.1, np.float32), np.array(count), *tensors(rng, op, SHAPES, np.float32)]
    agrees(op, attributes, arrays, 1e-6)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 2)], ids=str)
@pytest.mark.parametrize("name", ["adagrad, decaying", "adam, regularised", "nesterov, regularised"])
def test_one_tensor_as_onnx_evaluates_it(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    op, attributes = CASES[name]
    arrays = [np.array(0.1, np.float32), np.array(2), *tensors(rng, op, [shape], np.float32)]
    proto, feeds = step_model(op, arrays, attributes), feeds_of(arrays)
    wanted: Any = ReferenceEvaluator(proto).run(None, feeds)
    for got, want in zip(fusec.compile(proto, target="cpu").run(None, feeds), wanted, strict=True):
        assert_close(got, want, 1e-6)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("of_rate", "of_tensors"), [("f8", "f8"), ("f8", "f4"), ("f4", "f8")])
def test_doubles(of_rate: str, of_tensors: str, name: str, rng: np.random.Generator) -> None:
    """A rate in f32 is exact in f64, and so are the attributes, whose type is f32."""
    op, attributes = CASES[name]
    arrays = [np.array(0.1, of_rate), np.array(5), *tensors(rng, op, SHAPES, of_tensors)]
    agrees(op, attributes, arrays, 1e-14 if of_tensors == "f8" else 1e-6)


@pytest.mark.parametrize("fixed", [("t",), ("r", "t")], ids="".join)
@pytest.mark.parametrize("count", [0, 4])
@pytest.mark.parametrize("name", CASES)
def test_a_known_count_leaves_no_choice(name: str, count: int, fixed: Sequence[str], rng: np.random.Generator) -> None:
    op, attributes = CASES[name]
    arrays = [np.array(0.1, np.float32), np.array(count), *tensors(rng, op, SHAPES, np.float32)]
    feeds = feeds_of(arrays)
    graph = load(step_model(op, arrays, attributes, {key: feeds.pop(key) for key in fixed}))
    assert "pow" not in {node.op.name for node in graph.nodes}
    assert op == "Adam" or "where" not in {node.op.name for node in graph.nodes}
    got = evaluate(graph, feeds)
    for key, want in zip(graph.output_names, stepped(op, attributes, arrays), strict=True):
        assert_close(got[key], want, 1e-6)


@pytest.mark.parametrize("count", [0, 1, 200])
@pytest.mark.parametrize("name", ["adagrad, decaying", "adam", "adam, regularised", "nesterov, regularised"])
def test_half_precision(name: str, count: int, rng: np.random.Generator) -> None:
    """In fp16, 1 - 0.999 rounds by 2 %, so the correction of Adam must not be computed in that way."""
    op, attributes = CASES[name]
    arrays = [np.array(0.1, np.float32), np.array(count), *tensors(rng, op, SHAPES, np.float32)]
    agrees(op, attributes, arrays, 3e-3, precision="fp16")


def test_scalars_may_have_one_dim(rng: np.random.Generator) -> None:
    arrays = [np.array([0.1], np.float32), np.array([3]), *tensors(rng, "Adam", SHAPES, np.float32)]
    agrees("Adam", {}, arrays, 1e-6)


def test_tensors_may_differ_in_type(rng: np.random.Generator) -> None:
    """Each parameter, with its gradient and state, has its own type."""
    single, double = (tensors(rng, "Momentum", [(4,)], dtype) for dtype in (np.float32, np.float64))
    both = [v for pair in zip(single, double, strict=True) for v in pair]
    arrays = [np.array(0.1, np.float32), np.array(3), *both]
    got = fusec.compile(step_model("Momentum", arrays, PLAIN), target="cpu").run(None, feeds_of(arrays))
    for new, want, like in zip(got, stepped("Momentum", PLAIN, arrays), [*both[:2], *both[:2]], strict=True):
        assert new.dtype == like.dtype
        assert_close(new, want, 1e-6)


def test_a_step_follows_the_network_that_it_trains(rng: np.random.Generator) -> None:
    """The update count is computed by the model itself, and the gradient comes from other nodes."""
    nodes = [
        helper.make_node("Add", ["t", "one"], ["next"]),
        helper.make_node("Mul", ["x", "scale"], ["g"]),
        helper.make_node("Adam", ["r", "next", "x", "g", "v", "h"], ["x1", "v1", "h1"], domain=DOMAIN),
    ]
    arrays = [np.array(0.1, np.float32), np.array(0), *tensors(rng, "Adam", [(2, 3)], np.float32)]
    x, _, v, h = arrays[2:]
    given = [info("r", []), info("t", [], onnx.TensorProto.INT64), *(info(name, [2, 3]) for name in "xvh")]
    scale = rng.standard_normal((2, 3)).astype(np.float32)
    proto = model(nodes, given, ["x1", "v1", "h1", "next"], {"one": np.array(1), "scale": scale})
    proto.opset_import.add(domain=DOMAIN, version=1)
    exe = fusec.compile(proto, target="cpu")
    rate, count = arrays[:2]
    for step in range(1, 4):
        wanted = stepped("Adam", {}, [rate, np.array(step), x, x * scale, v, h])
        x, v, h, count = exe.run(None, {"r": rate, "t": count, "x": x, "v": v, "h": h})
        for got, want in zip((x, v, h), wanted, strict=True):
            assert_close(got, want, 1e-6)


def test_every_op_has_a_case() -> None:
    assert {op for op, _ in CASES.values()} == {*training_steps.TABLE}


@pytest.mark.parametrize(
    ("place", "array", "words"),
    [
        (0, np.ones(2, np.float32), "the learning rate is f32[2], not one float"),
        (0, np.array(1), "the learning rate is i64[], not one float"),
        (1, np.arange(2), "the update count is i64[2], not one integer"),
        (1, np.array(1.0, np.float32), "the update count is f32[], not one integer"),
        (5, None, "takes 3 tensors for each parameter, not 8 for all"),
        (6, np.ones(3), "parameter 2, its gradient and its state are f32[3], f64[3], f32[3]"),
        (8, np.ones(1, np.float32), "parameter 1, its gradient and its state are f32[], f32[], f32[1]"),
    ],
)
def test_faulty_operands_are_refused(
    place: int, array: np.ndarray | None, words: str, rng: np.random.Generator
) -> None:
    arrays = [np.array(0.1, np.float32), np.array(1), *tensors(rng, "Adagrad", SHAPES, np.float32)]
    if array is None:
        del arrays[place]
    else:
        arrays[place] = array
    with pytest.raises(ModelError, match="node 'n'") as caught:
        load(step_model("Adagrad", arrays, {}))
    assert words in str(caught.value)


def test_other_modes_are_refused(rng: np.random.Generator) -> None:
    arrays = [np.array(0.1, np.float32), np.array(1), *tensors(rng, "Momentum", SHAPES, np.float32)]
    with pytest.raises(ModelError, match=r"node 'n'.*mode 'heavy' is not known"):
        load(step_model("Momentum", arrays, {**PLAIN, "mode": "heavy"}))


def test_gradients_are_refused_with_advice() -> None:
    node = helper.make_node("Gradient", ["x"], ["y"], name="n", domain=DOMAIN, xs=["x"], y="x")
    proto = model([node], [info("x", [2])], ["y"])
    proto.opset_import.add(domain=DOMAIN, version=1)
    with pytest.raises(ModelError, match=r"node 'n' - not supported: .*call fusec.grad"):
        load(proto)
