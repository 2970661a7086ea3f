"""Test that ops that read images between their pixels keep their meaning: each is one op, one step and one launch."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import fusec
from fusec import Executable


def compiled(proto: onnx.ModelProto) -> Executable:
    executable = fusec.compile(proto, target="h200", simulate=True)
    assert isinstance(executable, Executable)
    return executable


def is_one_step(executable: Executable, op: str) -> bool:
    explanation = executable.explain()
    totals = explanation.totals
    return (totals["steps"], totals["launches"], op in str(explanation)) == (1, 1, True)


@pytest.mark.cudnn
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sample_is_one_step(mode: str, padding: str) -> None:
    node = helper.make_node("GridSample", ["x", "grid"], ["y"], mode=mode, padding_mode=padding)
    proto = model([node], [info("x", [1, 8, 16, 16]), info("grid", [1, 16, 16, 2])], ["y"], opset=20)
    executable = compiled(proto)
    assert is_one_step(executable, "grid_sample")
    feeds = {"x": np.ones((1, 8, 16, 16), np.float32), "grid": np.zeros((1, 16, 16, 2), np.float32)}
    assert np.allclose(executable.run(None, feeds)[0], 1)


@pytest.mark.cudnn
@pytest.mark.parametrize("how", [{}, {"mode": "max"}, {"sampling_ratio": 2}], ids=str)
def test_roi_align_is_one_step(how: dict[str, Any]) -> None:
    node = helper.make_node("RoiAlign", ["x", "rois", "images"], ["y"], output_height=3, output_width=3, **how)
    inputs = [info("x", [1, 8, 16, 16]), info("rois", [5, 4]), info("images", [5], TensorProto.INT64)]
    executable = compiled(model([node], inputs, ["y"], opset=16))
    assert is_one_step(executable, "roi_align")
    rois = np.tile(np.array([2, 2, 9, 9], np.float32), (5, 1))
    feeds = {"x": np.ones((1, 8, 16, 16), np.float32), "rois": rois, "images": np.zeros(5, np.int64)}
    (y,) = executable.run(None, feeds)
    assert np.allclose(y, 1) == (how.get("mode") != "max")  # a maximum is of each pixel times its weight


@pytest.mark.cudnn
def test_max_roi_pool_takes_whole_pixels() -> None:
    node = helper.make_node("MaxRoiPool", ["x", "rois"], ["y"], pooled_shape=[2, 2], spatial_scale=0.5)
    proto = model([node], [info("x", [1, 8, 16, 16]), info("rois", [1, 5])], ["y"], opset=16)
    executable = compiled(proto)
    assert "roi_pool" in str(executable.explain())
    x = np.arange(8 * 256, dtype=np.float32).reshape(1, 8, 16, 16)
    (y,) = executable.run(None, {"x": x, "rois": np.array([[0, 4, 6, 11, 13]], np.float32)})
    # 5.5 is rounded to 6 and 6.5 to 7: the bins of rows 3 to 7 and of columns 2 to 6 share the middle one
    assert np.array_equal(y[0, 0], [[5 * 16 + 4, 5 * 16 + 6], [7 * 16 + 4, 7 * 16 + 6]])


@pytest.mark.cudnn
def test_deform_conv_reads_all_pixels_in_one_step() -> None:
    node = helper.make_node("DeformConv", ["x", "w", "o"], ["y"], pads=[1, 1, 1, 1])
    inputs = [info("x", [1, 4, 8, 8]), info("w", [4, 4, 3, 3]), info("o", [1, 18, 8, 8])]
    ops = [node.op.name for node in compiled(model([node], inputs, ["y"], opset=19)).compiled.source.nodes]
    assert ops.count("grid_sample") == 1
    assert ops.count("gather") == 1  # of the two coordinates
    assert ops.count("matmul") == 1


@pytest.mark.parametrize("image", [(1, 4), (3, 1), (1, 1), (1, 2, 3), (2, 1, 1)])
def test_the_only_place_of_one_pixel_is_that_of_the_reference(image: tuple[int, ...]) -> None:
    """onnxruntime and torch give other places, so that onnx's own evaluator decides."""
    node = helper.make_node("AffineGrid", ["theta", "size"], ["y"], align_corners=1)
    n = len(image)
    size = {"size": np.array([2, 3, *image])}
    proto = model([node], [info("theta", [2, n, n + 1])], ["y"], size, opset=20)
    theta = np.random.default_rng().standard_normal((2, n, n + 1)).astype(np.float32)
    with np.errstate(divide="ignore"):
        (want,) = ReferenceEvaluator(proto).run(None, {"theta": theta})
    (got,) = compiled(proto).run(None, {"theta": theta})
    np.testing.assert_allclose(got, np.asarray(want), rtol=1e-5, atol=1e-5)


def test_a_grid_of_no_image_gives_none() -> None:
    node = helper.make_node("GridSample", ["x", "grid"], ["y"])
    proto = model([node], [info("x", [0, 3, 8, 8]), info("grid", [0, 5, 4, 2])], ["y"], opset=20)
    feeds = {"x": np.zeros((0, 3, 8, 8), np.float32), "grid": np.zeros((0, 5, 4, 2), np.float32)}
    assert fusec.compile(proto, target="cpu").run(None, feeds)[0].shape == (0, 3, 5, 4)
