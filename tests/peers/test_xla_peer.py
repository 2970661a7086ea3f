"""Test the XLA peer of the benchmarks. What runs JAX is skipped where JAX is not installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
from exported.packing import read
from helpers import assert_close
from onnx import ModelProto
from ops.cases import CASES, Case

from benchmarks.models.xla_peer import XlaError, XlaPeer
from fusec import frontends
from fusec.ir import DType, Graph, TensorType
from fusec.reference import evaluate

Array = np.ndarray[Any, Any]
# Ops that only training needs, whose definitions write into arrays. JAX has no integers of 64 bits by default.
LEFT_OUT = {"attention_backward", "conv_wgrad", "gelu_backward", "max_pool_backward", "scatter"}


@pytest.fixture
def jax(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return pytest.importorskip("jax")


def feeds_of(graph: Graph, rng: np.random.Generator) -> dict[str, Array]:
    def draw(t: TensorType) -> Array:
        if t.dtype.is_float:
            return rng.standard_normal(t.shape).astype(t.dtype.numpy)
        return rng.integers(0, 2, t.shape).astype(t.dtype.numpy)

    return {value.name: draw(value.type) for value in graph.inputs}


@pytest.mark.skipif(importlib.util.find_spec("jax") is not None, reason="JAX is installed")
def test_the_reason_of_a_process_that_ends_is_reported() -> None:
    with pytest.raises(XlaError, match="JAX ended with status 1: ModuleNotFoundError: No module named 'jax'"):
        XlaPeer(b"", [])


@pytest.mark.parametrize("model", ["resnet-script", "bert-script"])
def test_a_process_compiles_a_model_and_times_it(jax: Any, model: str, rng: np.random.Generator) -> None:
    proto: ModelProto = read(model)
    graph = frontends.load(proto, None)
    feeds = feeds_of(graph, rng)
    (want,) = evaluate(graph, feeds).values()
    with XlaPeer(proto.SerializeToString(), list(feeds.values()), "fp32") as peer:
        assert_close(peer.output, want, 1e-5)
        assert peer.span(3) > 0
    assert peer.about["form"] in peer.about["forms_ms"] and peer.about["jax"] == jax.__version__


def test_a_loop_computes_what_a_call_does(jax: Any, rng: np.random.Generator) -> None:
    """With convolutions in 16 bits, whose filters and images are stored with their channels last."""
    from benchmarks.models.jax_graph import function_of, images_first, images_last, prepared, weights
    from benchmarks.models.xla_child import looped

    graph = prepared(frontends.load(read("resnet-script"), None))
    feeds = feeds_of(graph, rng)
    (want,) = evaluate(graph, feeds).values()
    inputs = [array.transpose(images_last(array.ndim)) for array in feeds.values()]
    for function in (function_of(graph), looped(function_of(graph))):
        (got,) = jax.jit(function)(weights(graph), inputs)
        assert_close(np.asarray(got).transpose(images_first(got.ndim)), want, 5e-3)


def test_every_op_is_its_definition(jax: Any, rng: np.random.Generator) -> None:
    for name in CASES.keys() - LEFT_OUT:
        for case in CASES[name]:
            operands = case.arrays(rng)
            if name == "gather" or all(a.dtype.kind not in "iu" for a in operands):
                assert_defined(case, operands)


def assert_defined(case: Case, operands: list[Array]) -> None:
    from benchmarks.models.jax_graph import function_of, images_first, images_last

    graph = Graph()
    values = [graph.add_input(f"x{i}", TensorType(a.shape, DType.of(a.dtype))) for i, a in enumerate(operands)]
    graph.set_outputs(graph.insert(case.op, values).results)
    want = evaluate(graph, {f"x{i}": a for i, a in enumerate(operands)})
    inputs = [a.transpose(images_last(a.ndim)) for a in operands]
    for got, expected in zip(function_of(graph)({}, inputs), want.values(), strict=True):
        array = np.asarray(got).transpose(images_first(got.ndim)).astype(np.float64)
        assert array.shape == expected.shape, case
        np.testing.assert_allclose(array, expected.astype(np.float64), 1e-4, 1e-4, err_msg=str(case.op))
