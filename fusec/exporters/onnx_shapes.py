"""Export ops that move elements."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
from onnx import TensorProto

from fusec.errors import LoweringError
from fusec.exporters.onnx_element_types import ELEMENT_TYPES
from fusec.exporters.onnx_emit import Export, Exporter, cast_to, formula, operator
from fusec.ir import DType, Node, print_node
from fusec.ops import DeformConv, Dilate, GridSample, NonMaxSuppression, Resize, RoiAlign, RoiPool


def _slice(e: Exporter, node: Node, x: str) -> str:
    a = node.op.attributes
    ends = [start + size * step for start, size, step in zip(a["starts"], a["sizes"], a["steps"], strict=True)]
    starts = [start if size else 0 for start, size in zip(a["starts"], a["sizes"], strict=True)]
    # ONNX counts a negative end from the end of the dim, so a far smaller number stands for "before the first element"
    ends = [(end if end >= 0 else -(2**62)) if size else 0 for end, size in zip(ends, a["sizes"], strict=True)]
    steps = [step if size else 1 for step, size in zip(a["steps"], a["sizes"], strict=True)]
    return e.op("Slice", x, e.ints(starts), e.ints(ends), e.ints(range(len(starts))), e.ints(steps))


def _pad(e: Exporter, node: Node, x: str) -> str:
    a = node.op.attributes
    if not a["pads"]:
        return e.op("Identity", x)
    value = [e.number(a["value"], node)] if a["mode"] == "constant" else []
    return e.op("Pad", x, e.ints(a["pads"]), *value, mode=a["mode"])


def _dilate(e: Exporter, node: Node, x: str) -> str:
    """Export a dilate: pad a dim of one after each dim to its step, and then cut or pad the dims to size."""
    op, shape = cast(Dilate, node.op), node.operands[0].type.shape
    if not shape:
        return e.op("Identity", x)
    apart = [number for dim in shape for number in (dim, 1)]
    x = e.op("Reshape", x, e.ints(apart), allowzero=1)
    x = e.op("Pad", x, e.ints([0] * len(apart) + [more for step in op.steps for more in (0, step - 1)]))
    whole = [dim * step for dim, step in zip(shape, op.steps, strict=True)]
    x = e.op("Reshape", x, e.ints(whole), allowzero=1)
    missing = [max(0, size - dim) for size, dim in zip(op.sizes, whole, strict=True)]
    x = e.op("Pad", x, e.ints([0] * len(whole) + missing))
    return e.op("Slice", x, e.ints([0] * len(whole)), e.ints(op.sizes))


def _resize(e: Exporter, node: Node, x: str) -> str:
    """Export a resize as two ONNX Resizes: by sizes for dims whose scale is their ratio, by scales for the others."""
    op, shape = cast(Resize, node.op), node.operands[0].type.shape
    modes = {"mode": op.mode, "coordinate_transformation_mode": op.coordinates, "nearest_mode": op.rounding}
    fixed = op.coordinates == "align_corners"  # only sizes matter here; by scales, ONNX would use a fractional length
    ratio = [fixed or math.isclose(s, n / d, rel_tol=1e-7) for s, n, d in zip(op.scales, op.sizes, shape, strict=True)]
    scales = np.where(ratio, 1.0, op.scales).astype(np.float32)
    sizes = [n if same else d for same, n, d in zip(ratio, op.sizes, shape, strict=True)]
    if sizes != list(shape) or all(ratio):
        x = e.op("Resize", x, "", "", e.ints(sizes), **modes)
    if all(ratio):
        return x
    counted = [math.floor(d * float(s)) for d, s in zip(sizes, scales, strict=True)]
    if counted == list(op.sizes) and all(ratio | (scales == op.scales)):
        return e.op("Resize", x, "", e.initializer(scales, e.fresh("scales")), **modes)
    if op.mode == "linear":
        raise LoweringError(f"{print_node(node)}: ONNX has no Resize with these sizes and scales")
    for dim in (d for d, same in enumerate(ratio) if not same):
        x = e.op("Gather", x, e.ints(op.nearest(np, dim, shape[dim])), axis=dim)
    return x


def _grid_sample(e: Exporter, node: Node, x: str, grid: str) -> str:
    op, type = cast(GridSample, node.op), node.operands[1].type
    if op.coordinates == "pixels":  # ONNX counts from -1 to 1
        sizes = np.array(node.operands[0].type.shape[:1:-1])
        scale, shift = (2 / sizes).astype(type.dtype.numpy), (1 / sizes - 1).astype(type.dtype.numpy)
        grid = e.op("Mul", grid, e.initializer(scale, e.fresh("scale")))
        grid = e.op("Add", grid, e.initializer(shift, e.fresh("shift")))
    centres = int(op.coordinates == "centres")
    return e.op("GridSample", x, grid, mode=op.mode, padding_mode=op.padding, align_corners=centres)


def _deform_conv(e: Exporter, node: Node, *operands: str) -> str:
    op, (x, w, offset, *mask) = cast(DeformConv, node.op), operands
    return e.op(
        "DeformConv",
        *(x, w, offset, *(["", *mask] if mask else [])),
        strides=op.strides,
        pads=op.pads,
        dilations=op.dilations,
        group=op.groups,
        offset_group=op.offset_groups,
    )


def _roi_align(e: Exporter, node: Node, x: str, rois: str, batches: str) -> str:
    op = cast(RoiAlign, node.op)
    return e.op(
        "RoiAlign",
        x,
        rois,
        e.op("Cast", batches, to=TensorProto.INT64),
        mode=op.mode,
        output_height=op.bins[0],
        output_width=op.bins[1],
        sampling_ratio=op.samples,
        spatial_scale=op.scale,
        coordinate_transformation_mode="half_pixel" if op.half_pixel else "output_half_pixel",
    )


def _roi_pool(e: Exporter, node: Node, x: str, rois: str, batches: str) -> str:
    """Export roi_pool. MaxRoiPool has regions of the type of the images: fp32 where neither is fp64."""
    op = cast(RoiPool, node.op)
    own, regions, _ = (v.type.dtype for v in node.operands)
    common = DType.F64 if DType.F64 in (own, regions) else DType.F32
    numbers = e.op("Cast", e.op("Unsqueeze", batches, e.ints([1])), to=ELEMENT_TYPES[common])
    rows = e.op("Concat", numbers, cast_to(e, rois, regions, common), axis=1)
    x = cast_to(e, x, own, common)
    y = e.op("MaxRoiPool", x, rows, pooled_shape=list(op.bins), spatial_scale=op.scale)
    return cast_to(e, y, common, own)


def _top_k(e: Exporter, node: Node, x: list[str]) -> list[str]:
    a = node.op.attributes
    return e.several("TopK", [*x, e.ints([a["k"]])], 2, {"axis": a["axis"], "largest": int(a["largest"])})


def _non_max_suppression(e: Exporter, node: Node, operands: list[str]) -> list[str]:
    """Export non_max_suppression. ONNX has no rows after those of boxes, so that zeros are added."""
    op = cast(NonMaxSuppression, node.op)
    operands = [cast_to(e, x, v.type.dtype, DType.F32) for x, v in zip(operands, node.operands, strict=True)]
    most = node.results[0].type.shape[0]
    limits = [e.ints([op.most]), e.initializer(np.array([op.iou], np.float32), e.fresh("iou"))]
    if op.least > -math.inf:
        limits.append(e.initializer(np.array([op.least], np.float32), e.fresh("least")))
    rows = e.op("NonMaxSuppression", *operands, *limits, center_point_box=int(op.centred))
    count = e.op("Shape", rows, start=0, end=1)
    missing = e.op("Sub", e.ints([most]), count)
    padded = e.op("Pad", rows, e.op("Concat", e.ints([0, 0]), missing, e.ints([0]), axis=0))
    return [padded, e.op("Squeeze", count, e.ints([0]))]


def _scatter(e: Exporter, node: Node, x: str, indices: str, updates: str) -> str:
    column = e.op("Unsqueeze", e.op("Cast", indices, to=TensorProto.INT64), e.ints([1]))
    return e.op("ScatterND", x, column, updates, reduction=node.op.attributes["reduction"])


def _cumulate(e: Exporter, node: Node, x: str) -> str:
    """Export a running sum, or a running product by one Mul per element, since opset 21 has no CumProd."""
    axis, kind = node.op.attributes["axis"], node.op.attributes["kind"]
    if kind == "sum":
        return e.op("CumSum", x, e.initializer(np.array(axis, np.int64), e.fresh("axis")))
    size = node.result.type.shape[axis]
    if size < 2:
        return e.op("Identity", x)
    parts = e.several("Split", [x, e.ints([1] * size)], size, {"axis": axis})
    for i in range(1, size):
        parts[i] = e.op("Mul", parts[i - 1], parts[i])
    return e.op("Concat", *parts, axis=axis)


def _linear_scan(e: Exporter, node: Node, a: str, b: str) -> str:
    """Export a linear recurrence by one Mul and one Add for each step. The import finds it again."""
    axis = node.op.attributes["axis"] % node.result.type.rank
    size = node.result.type.shape[axis]
    if not size:
        return e.op("Identity", a)
    factors, terms = (e.several("Split", [v, e.ints([1] * size)], size, {"axis": axis}) for v in (a, b))
    state = e.op("Mul", factors[0], e.number(0.0, node))
    states: list[str] = []
    for t in range(size):
        state = e.op("Add", state if t == 0 else e.op("Mul", factors[t], state), terms[t])
        states.append(state)
    return e.op("Concat", *states, axis=axis)


def _split(e: Exporter, node: Node, x: list[str]) -> list[str]:
    sizes = node.op.attributes["sizes"]
    return e.several("Split", [*x, e.ints(sizes)], len(sizes), {"axis": node.op.attributes["axis"]})


def _transpose(e: Exporter, node: Node, x: str) -> str:
    perm = node.op.attributes["perm"]
    return e.op("Transpose", x, perm=perm) if perm else e.op("Identity", x)


SHAPES: Mapping[str, Export] = {
    "reshape": lambda e, node, x: [e.op("Reshape", *x, e.ints(node.op.attributes["shape"]), allowzero=1)],
    "relayout": operator("Identity"),
    "transpose": formula(_transpose),
    "expand": lambda e, node, x: [e.op("Expand", *x, e.ints(node.op.attributes["shape"]))],
    "concat": operator("Concat", "axis"),
    "split": _split,
    "slice": formula(_slice),
    "pad": formula(_pad),
    "gather": operator("Gather", "axis"),
    "dilate": formula(_dilate),
    "resize": formula(_resize),
    "grid_sample": formula(_grid_sample),
    "deform_conv": formula(_deform_conv),
    "roi_align": formula(_roi_align),
    "roi_pool": formula(_roi_pool),
    "top_k": _top_k,
    "non_max_suppression": _non_max_suppression,
    "scatter": formula(_scatter),
    "cumulate": formula(_cumulate),
    "linear_scan": formula(_linear_scan),
}
