"""Test scans in whole programs on a GPU: between other steps, with state, and in 16 bits."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.recurrent.test_scan import alignments, cell, drawn, scan_op
from helpers import assert_close

import fusec
from fusec.gradients import grad
from fusec.ir import DType, Graph, TensorType
from fusec.ops import MatMul, Reduce, pw
from fusec.reference import evaluate

BOUND = {DType.F32: 1e-5, DType.F16: 1e-2, DType.BF16: 6e-2}


def aligned(dtype: DType, batch: int, labels: int, steps: int) -> Graph:
    """Make a graph of a loss: scores from a product, a scan, and a sum of what it gives."""
    graph = Graph("aligned")
    x = graph.add_input("x", TensorType((steps, batch, 32), dtype))
    w = graph.add_input("w", TensorType((32, labels), dtype))
    first = graph.add_input("first", TensorType((batch, labels), dtype))
    skips = graph.add_input("skips", TensorType((batch, labels), DType.BOOL))
    types = [first.type, first.type, skips.type]
    op, _ = scan_op(steps, types, 1, 1, alignments)
    last, best = graph.insert(op, [first, graph.add(MatMul(), x, w), skips]).results
    loss = graph.add(pw("neg"), graph.add(Reduce("sum", (0, 2), False), best))
    graph.set_outputs([graph.add(pw("exp"), last), loss], ["last", "loss"])
    return graph


def unrolled_cell(dtype: DType, batch: int, size: int, steps: int) -> Graph:
    """Make a graph of an LSTM whose cell is written out."""
    graph = Graph("cells")
    h, c = (graph.add_input(name, TensorType((batch, size), dtype)) for name in "hc")
    x = graph.add_input("x", TensorType((steps, batch, 4 * size), dtype))
    w = graph.add_input("w", TensorType((size, 4 * size), dtype))
    op, _ = scan_op(steps, [h.type, c.type, TensorType((batch, 4 * size), dtype), w.type], 2, 1, cell)
    results = graph.insert(op, [h, c, x, w]).results
    graph.set_outputs([results[1], graph.add(pw("relu"), results[2])], ["c", "y"])
    return graph


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUND, ids=lambda d: d.value)
@pytest.mark.parametrize("name", ["a batch", "one of many labels", "many of a batch", "cells"])
def test_scans_agree_with_the_reference(name: str, dtype: DType, rng: np.random.Generator) -> None:
    graph = {
        "a batch": lambda: aligned(dtype, 4, 21, 50),
        "one of many labels": lambda: aligned(dtype, 1, 1601, 20),
        "many of a batch": lambda: aligned(dtype, 300, 9, 200),
        "cells": lambda: unrolled_cell(dtype, 8, 32, 60),
    }[name]()
    executable = fusec.compile(graph)
    assert isinstance(executable, fusec.Executable)
    assert "scan" in [step.signature for step in executable.compiled.program.steps]
    for _ in range(2):
        feeds = {v.name: drawn(rng, v.type) for v in graph.inputs}
        want = evaluate(graph, feeds, precision=DType.F64)
        got = executable(**feeds)
        for output, array in zip(want, got if isinstance(got, tuple) else (got,), strict=True):
            assert_close(np.asarray(array, np.float64), want[output], BOUND[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["alignments", "cells"])
def test_gradients_of_scans_agree_with_the_reference(name: str, rng: np.random.Generator) -> None:
    """The loops backward are scans, too."""
    made = aligned(DType.F32, 4, 21, 50) if name == "alignments" else unrolled_cell(DType.F32, 2, 12, 20)
    output = {"alignments": "loss", "cells": "y"}[name]
    graph = grad(made, output, [v.name for v in made.inputs if v.type.dtype.is_float], seed=True)
    executable = fusec.compile(graph)
    assert isinstance(executable, fusec.Executable)
    assert [step.signature for step in executable.compiled.program.steps].count("scan") == 3
    feeds = {v.name: drawn(rng, v.type) for v in graph.inputs}
    want = evaluate(graph, feeds, precision=DType.F64)
    for found, array in zip(want, executable(**feeds), strict=True):
        assert_close(np.asarray(array, np.float64), want[found], 1e-4)
