"""Import ops that read images at given places (GridSample, RoiAlign, MaxRoiPool, DeformConv), and Col2Im."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.frontends.onnx.model_file.limits import require_constant
from fusec.frontends.onnx.movement.window_attributes import per_dim, spatial_dims
from fusec.ir import DType, TensorType, Value
from fusec.ops import Cast, DeformConv, GridSample, RoiAlign, RoiPool, Scatter, Transpose, pw
from fusec.ops.spec import require


def grid_sample_16(
    g: Emitter,
    x: Value,
    grid: Value,
    /,
    *,
    align_corners: int = 0,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
) -> Value:
    modes = {"bilinear": "linear", "bicubic": "cubic", "nearest": "nearest"}
    require(mode in modes, f"knows no mode {mode!r}")
    return grid_sample(g, x, grid, align_corners=align_corners, mode=modes[mode], padding_mode=padding_mode)


def grid_sample(
    g: Emitter,
    x: Value,
    grid: Value,
    /,
    *,
    align_corners: int = 0,
    mode: str = "linear",
    padding_mode: str = "zeros",
) -> Value:
    """Import GridSample. The last dim of the grid has coordinates from -1 to 1, the last spatial dim first."""
    n = spatial_dims(x)
    batch = x.type.shape[0]
    require(mode in ("linear", "nearest", "cubic"), f"knows no mode {mode!r}")
    require(padding_mode in ("zeros", "border", "reflection"), f"knows no padding_mode {padding_mode!r}")
    require(grid.type.rank == n + 2 and grid.type.shape[-1] == n, f"grid {grid.type} for x {x.type}")
    require(grid.type.shape[0] == batch and 0 not in x.type.shape[2:], f"grid {grid.type} for x {x.type}")
    if not x.type.size:  # no image
        type = TensorType((*x.type.shape[:2], *grid.type.shape[1:-1]), x.type.dtype)
        return g.full(type, np.zeros((), type.dtype.numpy))
    return g(GridSample(mode, padding_mode, "centres" if align_corners else "edges"), x, grid)


def roi_align_10(
    g: Emitter,
    x: Value,
    rois: Value,
    batches: Value,
    /,
    *,
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Value:
    return g(RoiAlign((output_height, output_width), sampling_ratio, mode, spatial_scale, False), x, rois, batches)


def roi_align(
    g: Emitter,
    x: Value,
    rois: Value,
    batches: Value,
    /,
    *,
    coordinate_transformation_mode: str = "half_pixel",
    mode: str = "avg",
    output_height: int = 1,
    output_width: int = 1,
    sampling_ratio: int = 0,
    spatial_scale: float = 1.0,
) -> Value:
    known = coordinate_transformation_mode in ("half_pixel", "output_half_pixel")
    require(known, f"knows no coordinate_transformation_mode {coordinate_transformation_mode!r}")
    half_pixel = coordinate_transformation_mode == "half_pixel"
    return g(RoiAlign((output_height, output_width), sampling_ratio, mode, spatial_scale, half_pixel), x, rois, batches)


def max_roi_pool(
    g: Emitter,
    x: Value,
    rois: Value,
    /,
    *,
    pooled_shape: Sequence[int],
    spatial_scale: float = 1.0,
) -> Value:
    """Import MaxRoiPool. A row of `rois` is the number of an image, and the corners of a region."""
    require(len(pooled_shape) == 2, f"takes 2 spatial dims, pooled_shape is {list(pooled_shape)}")
    require(rois.type.rank == 2 and rois.type.shape[1] == 5, f"rois {rois.type}, not [regions, 5]")
    batches = g(Cast(DType.I64), g.reshape(g.window(rois, 1, 0, 1), rois.type.shape[:1]))
    bins = (pooled_shape[0], pooled_shape[1])
    return g(RoiPool(bins, spatial_scale), x, g.window(rois, 1, 1, 4), batches)


def deform_conv(
    g: Emitter,
    x: Value,
    w: Value,
    offset: Value,
    b: Value | None = None,
    mask: Value | None = None,
    /,
    *,
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    offset_group: int = 1,
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    """Import DeformConv, whose bias is an add."""
    require(x.type.rank == 4 and w.type.rank == 4, "takes 2 spatial dims")
    window = w.type.shape[2:]
    require(tuple(kernel_shape) in ((), window), f"kernel_shape {list(kernel_shape)}, the weight is {w.type}")
    require(group >= 1 and offset_group >= 1, f"group is {group} and offset_group {offset_group}")
    strides, dilations = per_dim("strides", strides, 2, 1), per_dim("dilations", dilations, 2, 1)
    op = DeformConv(strides, per_dim("pads", pads, 4, 0), dilations, group, offset_group)
    y = g(op, x, w, offset, *([] if mask is None else [mask]))
    return y if b is None else g(pw("add"), y, g.reshape(b, (1, w.type.shape[0], 1, 1)))


def col2im(
    g: Emitter,
    x: Value,
    image_shape: Value,
    block_shape: Value,
    /,
    *,
    dilations: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    """Import Col2Im: add each column's block to the image at the position of its window."""
    image, block = g.ints(image_shape, "image_shape"), g.ints(block_shape, "block_shape")
    n = len(image)
    require(len(block) == n and x.type.rank == 3, f"blocks {list(block)} of an image {list(image)}, x {x.type}")
    steps, spread = per_dim("strides", strides, n, 1), per_dim("dilations", dilations, n, 1)
    padding = per_dim("pads", pads, 2 * n, 0)
    taps = math.prod(block)
    require(all(v >= 1 for v in (*block, *image, *steps, *spread)), "sizes, strides and dilations must be positive")
    counts = [
        (i + padding[d] + padding[d + n] - spread[d] * (block[d] - 1) - 1) // steps[d] + 1 for d, i in enumerate(image)
    ]
    batch, rows, columns = x.type.shape
    require(rows % taps == 0 and columns == math.prod(counts), f"x {x.type} for blocks {list(block)} of {list(image)}")
    require_constant(TensorType((taps * columns,), DType.I64))
    place, inside = np.zeros((1,) * (2 * n), np.int64), np.ones((1,) * (2 * n), bool)
    for d in range(n):
        tap = (np.arange(block[d]) * spread[d]).reshape([-1 if i == d else 1 for i in range(2 * n)])
        start = (np.arange(counts[d]) * steps[d] - padding[d]).reshape([-1 if i == n + d else 1 for i in range(2 * n)])
        at = tap + start
        inside = inside & (at >= 0) & (at < image[d])
        place = place * image[d] + np.clip(at, 0, image[d] - 1)
    size = math.prod(image)
    targets = np.where(inside, place, size).reshape(-1)  # elements in the padding go to an extra row
    channels = rows // taps
    flat = g.reshape(x, (batch * channels, taps * columns))
    zeros = g.full(TensorType((size + 1, batch * channels), x.type.dtype), np.zeros((), x.type.dtype.numpy))
    added = g(Scatter("add"), zeros, g.constant(targets), g(Transpose((1, 0)), flat))
    return g.reshape(g(Transpose((1, 0)), g.window(added, 0, 0, size)), (batch, channels, *image))


TABLE: Table = {
    ("GridSample", 16): grid_sample_16,
    ("GridSample", 20): grid_sample,
    ("RoiAlign", 10): roi_align_10,
    ("RoiAlign", 16): roi_align,
    ("MaxRoiPool", 1): max_roi_pool,
    ("DeformConv", 19): deform_conv,
    ("Col2Im", 18): col2im,
}
