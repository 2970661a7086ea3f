"""Test the evaluation of graphs: rounding to types, float64, memory, and errors that name the node."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

from fusec.errors import ExecutionError
from fusec.ir import DType, Graph, Op, TensorType
from fusec.ops import Cast, Reshape, Split, pw
from fusec.reference import evaluate, evaluate_node
from fusec.text import parse

Array = np.ndarray[Any, Any]


def graph_of(dtype: DType, *ops: Op) -> Graph:
    """Apply the ops to x, one after the other."""
    graph = Graph("g")
    value = graph.add_input("x", TensorType((64,), dtype))
    for op in ops:
        value = graph.add(op, value)
    graph.set_outputs([value], ["y"])
    return graph


def test_outputs_by_their_names(rng: np.random.Generator) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType((4,), DType.F32))
    low, high = graph.insert(Split(0, (1, 3)), [x]).results
    graph.set_outputs([high, x, high, low], ["high", "x", "again", "low"])
    array = rng.normal(size=4).astype(np.float32)
    got = evaluate(graph, {"x": array})
    assert list(got) == ["high", "x", "again", "low"]
    for name, want in {"high": array[1:], "x": array, "again": array[1:], "low": array[:1]}.items():
        np.testing.assert_array_equal(got[name], want)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_each_result_is_rounded_to_its_type(dtype: DType, rng: np.random.Generator) -> None:
    x = rng.normal(size=64).astype(dtype.numpy)
    got = evaluate(graph_of(dtype, pw("exp"), pw("tanh")), {"x": x})["y"]
    once = np.exp(x.astype(np.float32)).astype(dtype.numpy)
    np.testing.assert_array_equal(got, np.tanh(once.astype(np.float32)).astype(dtype.numpy))
    assert got.dtype == dtype.numpy


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_float64_throughout(dtype: DType, rng: np.random.Generator) -> None:
    """Constants and casts between floats do not round; integers and bools do not change."""
    graph = graph_of(dtype, pw("exp"), Cast(DType.F16), Cast(DType.F32), pw("tanh"))
    third = graph.constant(np.array(1 / 3, ml_dtypes.bfloat16))
    x = graph.inputs[0]
    whole = graph.add(Cast(DType.I32), x)
    back = graph.add(Cast(DType.F32), whole)
    above = graph.add(pw("cmp_gt"), x, graph.add(Cast(dtype), third))
    graph.set_outputs([*graph.outputs, whole, back, above, third], ["y", "whole", "back", "above", "third"])
    graph.verify()
    array = rng.normal(size=64) * 3
    got = evaluate(graph, {"x": array}, precision=DType.F64)
    np.testing.assert_allclose(got["y"], np.tanh(np.exp(array)), rtol=1e-14)
    np.testing.assert_array_equal(got["whole"], np.trunc(array))
    np.testing.assert_array_equal(got["back"], np.trunc(array))
    np.testing.assert_array_equal(got["above"], array > got["third"])
    assert {k: a.dtype.name for k, a in got.items()} == {
        "y": "float64",
        "whole": "int32",
        "back": "float64",
        "above": "bool",
        "third": "float64",
    }


def test_without_a_precision_casts_do_round() -> None:
    x = np.full(64, 1 / 3, np.float32)
    got = evaluate(graph_of(DType.F32, Cast(DType.F16), Cast(DType.F32)), {"x": x})["y"]
    assert got.dtype == np.float32
    assert got[0] == np.float32(np.float16(1 / 3)) != x[0]


class Tracked(np.ndarray[Any, Any]):
    """An array that can be watched through a weak reference."""


@dataclass(frozen=True)
class Watch(Op):
    """An op that notes how many of its past results are alive when it runs."""

    name: ClassVar[str] = "watch"
    results: ClassVar[list[weakref.ref[Any]]] = []
    alive: ClassVar[list[int]] = []

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        return (operands[0],)

    def reference(self, xp: Any, *operands: Array) -> tuple[Array, ...]:
        self.alive.append(sum(ref() is not None for ref in self.results))
        result = (np.asarray(operands[0]) + 1).view(Tracked)
        self.results.append(weakref.ref(result))
        return (result,)


def test_values_are_freed_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "results", [])
    monkeypatch.setattr(Watch, "alive", [])

    class Plain:
        """NumPy, except that arrays keep their class."""

        asarray = staticmethod(np.asanyarray)

    graph = graph_of(DType.F32, *[Watch()] * 6)
    third = list(graph.nodes)[2].result
    last = list(graph.nodes)[4].result
    graph.set_outputs([*graph.outputs, graph.add(Watch(), third, before=last.node)], ["y", "z"])
    got = evaluate(graph, {"x": np.zeros(64, np.float32)}, Plain)
    np.testing.assert_array_equal([got["y"][0], got["z"][0]], [6, 4])
    # each node sees its operand alive, and later also the output z, and for one node the operand z shares
    assert Watch.alive == [0, 1, 1, 1, 2, 2, 2]


def test_unused_results_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "results", [])
    monkeypatch.setattr(Watch, "alive", [])
    graph = graph_of(DType.F32, *[pw("relu")] * 4)
    for node in graph.nodes:
        graph.add(Watch(), node.operands[0], before=node)
    evaluate(graph, {"x": np.zeros(64, np.float32)})
    assert Watch.alive == [0, 0, 0, 0]


def test_unused_results_and_inputs_do_no_harm() -> None:
    graph = graph_of(DType.F32, pw("relu"))
    graph.add_input("unused", TensorType((1,), DType.F32))
    graph.add(pw("exp"), graph.inputs[0])
    got = evaluate(graph, {"x": -np.ones(64, np.float32), "unused": np.ones(1, np.float32), "more": np.ones(3)})
    assert not got["y"].any()


def test_a_missing_input_is_named() -> None:
    with pytest.raises(ExecutionError, match="no array for graph input %x"):
        evaluate(graph_of(DType.F32, pw("relu")), {"y": np.ones(64, np.float32)})


def test_an_input_of_another_shape_is_refused() -> None:
    with pytest.raises(ExecutionError, match=r"graph input %x: f32\[64\] was given an array of shape \[63\]"):
        evaluate(graph_of(DType.F32, pw("relu")), {"x": np.ones(63, np.float32)})


def test_an_input_of_another_dtype_is_refused() -> None:
    graph = graph_of(DType.F16, pw("relu"))
    with pytest.raises(ExecutionError, match=r"graph input %x: f16\[64\] was given an array of float32"):
        evaluate(graph, {"x": np.ones(64, np.float32)})
    with pytest.raises(ExecutionError, match=r"graph input %x: f16\[64\] was given an array of int32"):
        evaluate(graph, {"x": np.ones(64, np.int32)}, precision=DType.F64)
    assert evaluate(graph, {"x": np.ones(64, np.float32)}, precision=DType.F64)["y"].dtype == np.float64


def test_a_failure_names_the_node() -> None:
    graph = graph_of(DType.F32, pw("relu"), Reshape((8, 8)))
    *_, node = graph.nodes
    with pytest.raises(ExecutionError, match=r"%v1 = reshape\(%v0\) \{shape=\[8, 8\]\} : f32\[8,8\]: cannot reshape"):
        evaluate_node(node, [np.ones(63, np.float32)])


def test_all_floats_of_a_body_have_the_precision() -> None:
    """Casts do not round, also where no operand tells that floats are raised: one is an integer, one has 64 bits."""
    inner = 'graph "inner" (%h: f64[2]) { %n = cast(%h) {to=bf16} %w = cast(%n) {to=f64} return %w }'
    graph = parse(f"""graph "g" (%i: i64[], %x: f64[2]) {{
      %l, %m, %r = scan(%i, %x) {{body=graph "body" (%i: i64[], %x: f64[2]) {{
        %y = scan(%x) {{body={inner}, steps=1, states=1}}
        %f = cast(%i) {{to=f16}}
        return %i, %y, %f
      }}, steps=3, states=2}}
      return %l, %m, %r
    }}""")
    number, x = np.array(2**11 + 1), np.array([1 + 2.0**-30, -0.1])
    plain, raised = (evaluate(graph, {"i": number, "x": x}, precision=p) for p in (None, DType.F64))
    np.testing.assert_array_equal(plain["m"], [1.0, float(ml_dtypes.bfloat16(-0.1))])
    np.testing.assert_array_equal(plain["r"], np.full(3, 2048, np.float16))
    np.testing.assert_array_equal(raised["m"], x)
    np.testing.assert_array_equal(raised["r"], np.full(3, 2049.0))
    assert raised["r"].dtype == np.float64
