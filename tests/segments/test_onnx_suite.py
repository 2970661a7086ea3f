"""Test onnx's cases whose shapes depend on values of inputs: compiled without the values, they run with host steps."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from onnx_suite.suite import DISPUTED, passing

import fusec
from fusec.frontends import load
from fusec.frontends.onnx.importer import InputsNeededError
from fusec.segments.executable import SegmentedExecutable

# Ops with operands that decide shapes or branches, and ops whose results have shapes that depend on values.
OPS = frozenset(
    (
        "BitCast",
        "Compress",
        "ConstantOfShape",
        "CumSum",
        "DFT",
        "Expand",
        "Loop",
        "If",
        "ImageDecoder",
        "NonMaxSuppression",
        "NonZero",
        "OneHot",
        "Pad",
        "Range",
        "ReduceSum",
        "ReduceL1",
        "Reshape",
        "Resize",
        "Slice",
        "Split",
        "Squeeze",
        "STFT",
        "Tile",
        "TopK",
        "Trilu",
        "Unique",
        "Unsqueeze",
    )
)


def _needs_values(model: Any, shapes: Any) -> bool:
    try:
        load(model, shapes)
    except InputsNeededError:
        return True
    return False


def _arrays(items: Any) -> list[Any]:
    return [np.asarray(item) if isinstance(item, np.generic) else item for item in items]


@pytest.mark.slow
def test_cases_whose_inputs_decide_shapes() -> None:
    run, wrong = 0, list[str]()
    for case in passing():
        if OPS.isdisjoint(node.op_type for node in case.model.graph.node):
            continue
        inputs, outputs = map(_arrays, case.data_sets[0])
        if any(not isinstance(array, np.ndarray) for array in (*inputs, *outputs)) or case.name in DISPUTED:
            continue
        feeds = dict(zip([v.name for v in case.model.graph.input], inputs, strict=False))
        shapes = {name: array.shape for name, array in feeds.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not _needs_values(case.model, shapes):
                continue
            executable = fusec.compile(case.model, shapes=shapes, target="cpu")
        assert isinstance(executable, SegmentedExecutable)
        run += 1
        for got, want in zip(executable.run(None, feeds), outputs, strict=True):
            same_type = got.shape == want.shape and got.dtype == want.dtype
            close = same_type and np.allclose(got.astype(float), want.astype(float), 1e-3, 1e-5, equal_nan=True)
            if not close:
                wrong.append(case.name)
    assert not wrong
    assert run > 150
