"""Test which nodes the import of gathers and scatters adds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from frontends.onnx.models import info, model
from onnx import TensorProto, helper

from fusec.frontends import load
from fusec.reference import evaluate


@pytest.mark.parametrize("op", ["GatherND", "ScatterND", "GatherElements", "ScatterElements"])
def test_rows_are_taken_by_the_indices_as_they_are(op: str) -> None:
    """A row has one index, and the ops of the IR count a negative one from the end, so nothing is computed before."""
    by_rows, scatters = op.endswith("ND"), op.startswith("Scatter")
    shape, indices, updates = ([20, 8], [50, 1], [50, 8]) if by_rows else ([20], [50], [50])
    inputs = [info("x", shape), info("i", indices, TensorProto.INT64)]
    inputs += [info("u", updates)] if scatters else []
    node = helper.make_node(op, [v.name for v in inputs], ["y"])
    graph = load(model([node], inputs, ["y"]))
    assert {n.op.name for n in graph.nodes} <= {"reshape", "gather", "scatter"}
    assert np.count_nonzero([n.op.name in ("gather", "scatter") for n in graph.nodes]) == 1


@pytest.mark.parametrize("op", ["GatherElements", "ScatterElements"])
@pytest.mark.parametrize(("axis", "places"), [(0, (5, 1, 1)), (1, (6, 1)), (1, (1, 7, 1)), (2, (9,)), (0, (1, 1, 1))])
def test_an_expanded_index_takes_whole_slices(
    op: str, axis: int, places: tuple[int, ...], rng: np.random.Generator
) -> None:
    """Exporters spell a gather of whole slices so. It needs one index for each slice, and not for each element."""
    shape = (4, 3, 2)
    count = max(places) if max(places) > 1 else 8
    full = (*shape[:axis], count, *shape[axis + 1 :])
    given, scatters = rng.integers(-shape[axis], shape[axis], places), op == "ScatterElements"
    inputs = [info("x", shape), info("i", places, TensorProto.INT64), *([info("u", full)] if scatters else [])]
    nodes = [
        helper.make_node("Constant", [], ["s"], value_ints=list(full)),
        helper.make_node("Expand", ["i", "s"], ["e"]),
    ]
    attributes = {"reduction": "add"} if scatters else {}
    nodes.append(helper.make_node(op, ["x", "e", *(["u"] if scatters else [])], ["y"], axis=axis, **attributes))
    graph = load(model(nodes, inputs, ["y"]))
    x, u = rng.standard_normal(shape).astype(np.float32), rng.standard_normal(full).astype(np.float32)
    feeds = {"x": x, "i": given, **({"u": u} if scatters else {})}
    index = np.broadcast_to(given.reshape(-1), (count,))
    if scatters:
        wanted = np.moveaxis(x.copy(), axis, 0)
        np.add.at(wanted, index, np.moveaxis(u, axis, 0))
        wanted = np.moveaxis(wanted, 0, axis)
    else:
        wanted = np.take(x, index % shape[axis], axis)
    np.testing.assert_allclose(evaluate(graph, feeds)["y"], wanted, rtol=1e-6)
    (taken,) = [n for n in graph.nodes if n.op.name in ("gather", "scatter")]
    is_last = axis == len(shape) - 1
    most = {"gather": count, "scatter": count * (math.prod(full) // count if is_last else math.prod(shape[:axis]))}
    assert taken.operands[1].type.size == most[taken.op.name]


def test_an_index_that_differs_within_a_slice_takes_elements() -> None:
    inputs = [info("x", (4, 3, 2)), info("i", (5, 3, 1), TensorProto.INT64)]
    nodes = [
        helper.make_node("Constant", [], ["s"], value_ints=[5, 3, 2]),
        helper.make_node("Expand", ["i", "s"], ["e"]),
        helper.make_node("GatherElements", ["x", "e"], ["y"]),
    ]
    (taken,) = [n for n in load(model(nodes, inputs, ["y"])).nodes if n.op.name == "gather"]
    assert taken.operands[1].type.size == 30
