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
from fusec import Executable, frontends
from fusec.exporters.onnx import to_onnx
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.kernels import GpuFigures
from fusec.ir import Constant, print_graph
from fusec.ops import Conv, DeformConv
from fusec.ops.convolution import windows_along
from fusec.reference import evaluate
from fusec.schedule.program import Kind
from fusec.targets.target import load
from fusec.text import parse


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


def deformed(
    image: tuple[int, int, int, int], filters: int, masked: bool = False, biased: bool = False, **how: Any
) -> onnx.ModelProto:
    """A DeformConv whose filters are an initializer."""
    window, groups, offset_groups = how["kernel_shape"], how.get("group", 1), how.get("offset_group", 1)
    pads, strides, dilations = how.get("pads", [0] * 4), how.get("strides", [1, 1]), how.get("dilations", [1, 1])
    out = windows_along(image[2:], window, strides, pads, dilations)
    moved = offset_groups * window[0] * window[1]
    rng = np.random.default_rng()
    constants = {"w": rng.standard_normal((filters, image[1] // groups, *window)).astype(np.float32)}
    if biased:
        constants["b"] = rng.standard_normal(filters).astype(np.float32)
    inputs = [info("x", list(image)), info("o", [image[0], 2 * moved, *out])]
    if masked:
        inputs.append(info("m", [image[0], moved, *out]))
    names = ["x", "w", "o", "b" if biased else "", "m" if masked else ""]
    return model([helper.make_node("DeformConv", names, ["y"], **how)], inputs, ["y"], constants, opset=19)


def feeds_of(proto: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Offsets of a few pixels, so that some places are outside of the image."""
    rng = np.random.default_rng()
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in proto.graph.input}
    return {name: (1.5 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


DEFORMED: dict[str, tuple[tuple[int, int, int, int], int, dict[str, Any]]] = {
    "plain": ((1, 4, 8, 8), 4, {"kernel_shape": [3, 3]}),
    "a mask and a batch": ((3, 4, 7, 5), 5, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "masked": True}),
    "a bias": ((1, 3, 6, 9), 8, {"kernel_shape": [2, 3], "biased": True}),
    "uneven pads": ((2, 2, 5, 7), 3, {"kernel_shape": [3, 2], "pads": [2, 0, 1, 3], "masked": True, "biased": True}),
    "strides": ((1, 4, 9, 11), 4, {"kernel_shape": [3, 3], "strides": [2, 3], "pads": [1, 1, 1, 1]}),
    "dilations": ((1, 4, 9, 11), 4, {"kernel_shape": [3, 3], "dilations": [2, 3], "pads": [1, 2, 1, 2]}),
    "groups": ((2, 6, 7, 7), 9, {"kernel_shape": [3, 3], "group": 3, "masked": True}),
    "offset groups": ((2, 6, 7, 7), 4, {"kernel_shape": [3, 3], "offset_group": 2, "masked": True, "biased": True}),
    "groups of both": ((1, 6, 5, 6), 4, {"kernel_shape": [2, 2], "group": 2, "offset_group": 3, "masked": True}),
    "one pixel": ((1, 2, 3, 3), 1, {"kernel_shape": [3, 3]}),
}


@pytest.mark.cudnn
@pytest.mark.parametrize("name", DEFORMED)
def test_deform_conv_is_one_step(name: str) -> None:
    image, filters, how = DEFORMED[name]
    proto = deformed(image, filters, **how)
    executable = compiled(proto)
    (step,) = fuse_steps(executable.compiled.program, GpuFigures.of(load("h200"))).steps  # as on a GPU
    assert (
        step.kind is Kind.KERNEL
        and [n.op.name for n in step.nodes] == ["deform_conv", "add"][: 1 + how.get("biased", 0)]
    )
    if not how.get("biased"):
        assert is_one_step(executable, "deform_conv")
    assert [n.op.name for n in executable.compiled.source.nodes].count("deform_conv") == 1
    feeds = feeds_of(proto)
    (want,) = ReferenceEvaluator(proto).run(None, feeds)
    np.testing.assert_allclose(executable.run(None, feeds)[0], np.asarray(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", DEFORMED)
def test_deform_conv_is_exported_as_itself(name: str) -> None:
    image, filters, how = DEFORMED[name]
    proto = deformed(image, filters, **how)
    graph = frontends.load(proto)
    again = to_onnx(graph)
    (node,) = [node for node in again.graph.node if node.op_type == "DeformConv"]
    assert len(node.input) == (5 if how.get("masked") else 3)
    back = frontends.load(again)
    assert [n.op for n in back.nodes if n.op.name == "deform_conv"] == [
        n.op for n in graph.nodes if n.op.name == "deform_conv"
    ]
    feeds = feeds_of(proto)
    (want,) = ReferenceEvaluator(proto).run(None, feeds)
    weights = {node.op.literal.label: node.op.literal for node in graph.nodes if isinstance(node.op, Constant)}
    for same in (back, parse(print_graph(graph), weights)):
        (got,) = evaluate(same, feeds).values()
        np.testing.assert_allclose(got, np.asarray(want), rtol=1e-4, atol=1e-4)


def test_a_builder_applies_a_deform_conv() -> None:
    b = fusec.Builder()
    x, w, offset = b.input("x", (2, 4, 6, 5)), b.input("w", (3, 4, 3, 3)), b.input("o", (2, 18, 6, 5))
    y = b.apply(DeformConv((1, 1), (1,) * 4, (1, 1)), x, w, offset)
    assert y.shape == (2, 3, 6, 5)
    zeros = {"o": np.zeros(offset.shape, np.float32)}
    rng = np.random.default_rng()
    feeds = {name: rng.standard_normal(v.shape).astype(np.float32) for name, v in (("x", x), ("w", w))}
    b.output(y=y)
    (got,) = evaluate(b.graph(), feeds | zeros).values()
    (want,) = Conv((1, 1), (1,) * 4, (1, 1)).reference(np, feeds["x"], feeds["w"])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


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
