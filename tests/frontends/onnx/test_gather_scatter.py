"""Test which nodes the import of gathers and scatters adds."""

from __future__ import annotations

import numpy as np
import pytest
from frontends.onnx.models import info, model
from onnx import TensorProto, helper

from fusec.frontends import load


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
