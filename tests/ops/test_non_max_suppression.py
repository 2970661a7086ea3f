"""Test non-maximum suppression against onnxruntime, on thousands of random cases."""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from fusec.errors import VerifyError
from fusec.ir import DType, TensorType
from fusec.ops import NonMaxSuppression

F32 = DType.F32


def session(centred: bool, thresholds: int) -> onnxruntime.InferenceSession:
    """Make a model of one node. thresholds: how many of the two it takes."""
    operands = ["boxes", "scores", "most", *("iou", "least")[:thresholds]]
    node = helper.make_node("NonMaxSuppression", operands, ["rows"], center_point_box=int(centred))
    types = {"most": TensorProto.INT64}
    inputs = [
        helper.make_tensor_value_info(name, types.get(name, TensorProto.FLOAT), shape)
        for name, shape in zip(operands, ([None, None, 4], [None, None, None], [1], [1], [1]), strict=False)
    ]
    graph = helper.make_graph(
        [node], "g", inputs, [helper.make_tensor_value_info("rows", TensorProto.INT64, [None, 3])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    onnx.checker.check_model(model)
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def drawn(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw boxes on a grid or between its points, in any order of corners, and scores of which some are equal."""
    images, classes, count = (int(rng.integers(1, high)) for high in (4, 12, 40))
    whole = rng.integers(-6, 7, (images, count, 4)).astype(np.float32)
    boxes = whole if rng.integers(2) else (whole * rng.uniform(0.01, 3, whole.shape)).astype(np.float32)
    scores = rng.uniform(-1, 1, (images, classes, count)).astype(np.float32)
    if rng.integers(2):
        scores = rng.choice(np.array([0.0, -0.0, 0.25, 0.5, 1.0], np.float32), scores.shape)
    return boxes, scores


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("thresholds", [0, 1, 2])
def test_rows_are_those_of_onnxruntime(rng: np.random.Generator, centred: bool, thresholds: int) -> None:
    """Of ties, empty results, thresholds that equal an overlap or a score, and boxes without area."""
    ort = session(centred, thresholds)
    counts: set[int] = set()
    for _ in range(700):
        boxes, scores = drawn(rng)
        most = int(rng.choice([0, 1, 3, 1000]))
        iou = float(np.float32(rng.choice([0.0, 1 / 3, 0.5, 0.7, 1.0])))
        least = float(np.float32(rng.choice([-2.0, 0.0, 0.25, 0.5, 2.0])))
        feeds = {"boxes": boxes, "scores": scores, "most": np.array([most])}
        feeds |= {"iou": np.array([iou], np.float32)} if thresholds > 0 else {}
        feeds |= {"least": np.array([least], np.float32)} if thresholds > 1 else {}
        (result,) = ort.run(None, feeds)
        want = np.asarray(result)
        op = NonMaxSuppression(most, iou if thresholds > 0 else 0.0, least if thresholds > 1 else -math.inf, centred)
        rows, count = op.reference(np, boxes, scores)
        np.testing.assert_array_equal(rows[: int(count)], want)
        assert not rows[int(count) :].any()
        assert rows.shape == op.infer(TensorType(boxes.shape, F32), TensorType(scores.shape, F32))[0].shape
        counts.add(len(want))
    assert 0 in counts
    assert len(counts) > 10


def test_nan_is_the_worst_score_and_overlaps_nothing() -> None:
    boxes = np.array([[[0, 0, 2, 2], [0, 0, 2, 2], [np.nan, 0, 2, 2], [0, 0, 2, 2]]], np.float32)
    scores = np.array([[[np.nan, 0.1, 0.5, -np.inf]]], np.float32)
    rows, count = NonMaxSuppression(9, 0.5).reference(np, boxes, scores)
    assert rows[: int(count), 2].tolist() == [2, 1]
    rows, count = NonMaxSuppression(9, 0.5, -1.0).reference(np, boxes, scores)
    assert rows[: int(count), 2].tolist() == [2, 1]


def test_operands_that_do_not_fit() -> None:
    with pytest.raises(VerifyError, match=r"takes \[N, boxes, 4\]"):
        NonMaxSuppression(1).infer(TensorType((1, 5, 4), F32), TensorType((1, 2, 6), F32))
    with pytest.raises(VerifyError, match="keeps -1 boxes"):
        NonMaxSuppression(-1).infer(TensorType((1, 5, 4), F32), TensorType((1, 2, 5), F32))
