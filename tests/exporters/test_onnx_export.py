"""Every op as ONNX: the checker takes it, and the front end reads it back with the same meaning."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from ops.cases import CASES, Case

from fusec import frontends
from fusec.exporters.onnx import EXPORT, to_onnx
from fusec.ir import DType, Graph, TensorType
from fusec.ops import BY_NAME
from fusec.reference import evaluate

FLAT = [pytest.param(case, id=f"{name}-{i}") for name, cases in CASES.items() for i, case in enumerate(cases)]


def test_every_op_has_a_way_out() -> None:
    assert set(EXPORT) == set(BY_NAME)


@pytest.mark.parametrize("case", FLAT)
def test_an_op_comes_back(case: Case, rng: np.random.Generator) -> None:
    graph, feeds = Graph("g"), {}
    for i, array in enumerate(case.arrays(rng)):
        feeds[f"x{i}"] = array
        graph.add_input(f"x{i}", TensorType(array.shape, DType.of(array.dtype)))
    results = graph.insert(case.op, graph.inputs).results
    graph.set_outputs(results, [f"y{i}" for i in range(len(results))])
    model = to_onnx(graph)
    onnx.checker.check_model(model)
    indexed = case.op.name == "gather"
    back = frontends.load(model.SerializeToString())
    assert back.output_names == graph.output_names
    got, want = (evaluate(g, feeds, precision=DType.F64) for g in (back, graph))
    for name, array in want.items():
        assert got[name].dtype == array.dtype or indexed
        np.testing.assert_allclose(got[name], array, rtol=1e-6, atol=1e-6)


def test_names_that_meet_are_kept_apart() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2,), DType.F32))
    y = graph.add(BY_NAME["relu"](), x, name="out")
    z = graph.add(BY_NAME["neg"](), y, name="z")
    graph.set_outputs([z, x, y, y], ["out", "same", "z", "again"])
    back = frontends.load(to_onnx(graph).SerializeToString())
    feeds = {"x": np.array([1.0, -2.0], np.float32)}
    assert {k: v.tolist() for k, v in evaluate(back, feeds).items()} == {
        k: v.tolist() for k, v in evaluate(graph, feeds).items()
    }
