"""Rows of ops that place elements otherwise: every edge value comes out as it went in, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from gpu.edges.numbers import edges
from gpu.edges.row import FLOATS, Row, added, row

from fusec.ir import Body, DType, channels_last
from fusec.ops import (
    Concat,
    Cumulate,
    DeformConv,
    Dilate,
    Expand,
    Gather,
    GridSample,
    LinearScan,
    NonMaxSuppression,
    Pad,
    RandomBits,
    Relayout,
    Reshape,
    Resize,
    RoiAlign,
    RoiPool,
    Scan,
    Scatter,
    Slice,
    Split,
    TopK,
    Transpose,
)
from fusec.text import parse

NHWC = channels_last(4)


def moves() -> Iterator[Row]:
    """Each move alone, and one before a sum."""
    for dtype in (*FLOATS, DType.I8, DType.BOOL):
        x = np.resize(edges(dtype), (2, 8, 3, 4))
        ops = [
            Reshape((16, 12)),
            Transpose((0, 2, 3, 1)),
            Relayout(NHWC),
            Split(1, (3, 5)),
            Slice((0, 6, 0, 1), (2, 3, 3, 2), (1, -2, 1, 2)),
            Dilate((1, 1, 2, 3), (2, 8, 6, 10)),
        ]
        for op in ops:
            yield row(f"{op.name} {dtype.value}", op.name, [x], added(op), exact=True)
        row_of = edges(dtype).reshape(16, 1)
        yield row(f"expand {dtype.value}", "expand", [row_of], added(Expand((3, 16, 5))), exact=True)
        yield row(f"concat {dtype.value}", "concat", [x, x[:, :3].copy()], added(Concat(1)), exact=True)
        at = np.array([0, -1, 7, 3, -8], np.int64)
        yield row(f"gather {dtype.value}", "gather", [x, at], added(Gather(1)), exact=True, labels=np.array(""))
        for mode in ("constant", "edge", "reflect", "wrap"):
            pads = (0, 0, 1, 2, 0, 0, 0, 1)
            if dtype is not DType.BOOL:
                yield row(f"pad {mode} {dtype.value}", "pad", [x], added(Pad(pads, mode)), exact=True)
        arrays = [x, at[:1], x[:1].copy()]
        yield row(f"scatter {dtype.value}", "scatter", arrays, added(Scatter()), exact=True, labels=np.array(""))
    for value in (np.inf, -np.inf):
        x = np.resize(edges(DType.F16), (2, 8, 3, 4))
        pads = (0, 0, 1, 2, 0, 0, 0, 1)
        yield row(f"pad with {value}", "pad", [x], added(Pad(pads, "constant", value)), exact=True)
    for dtype in FLOATS:
        yield from _resizes(dtype)
        yield from _between_pixels(dtype)
        yield from _sorted(dtype)
        yield from _loops(dtype)


def _loops(dtype: DType) -> Iterator[Row]:
    """Loops in which states are moved, and in which they are compared and added to edge values."""
    x = np.stack([np.roll(edges(dtype), i) for i in range(16)])
    given = f"(%h: {dtype.value}[16], %x: {dtype.value}[16])"
    moved = """{
      %a = slice(%h) {starts=[0], sizes=[15], steps=[1]}
      %b = pad(%a) {pads=[1, 0], mode="constant", value=1.0}
      return %x, %b
    }"""
    op = Scan(Body(parse(f'graph "body" {given} {moved}')), 16, 1, 1)
    yield row(f"scan of moves {dtype.value}", "scan", [x[3].copy(), x], added(op), exact=True, labels=np.array(""))
    compared = """{
      %h2 = reshape(%h) {shape=[1, 16]}
      %x2 = reshape(%x) {shape=[1, 16]}
      %both = concat(%h2, %x2) {axis=0}
      %most = reduce(%both) {kind="max", axes=[0], keepdims=false}
      %least = reduce(%both) {kind="min", axes=[0], keepdims=false}
      %sum = reduce(%both) {kind="log_sum_exp", axes=[0], keepdims=false}
      %y = add(%h, %x)
      return %x, %most, %least, %sum, %y
    }"""
    op = Scan(Body(parse(f'graph "body" {given} {compared}')), 16, 1, 1)
    yield row(f"scan of sums {dtype.value}", "scan", [x[3].copy(), x], added(op), labels=np.array(""))


def _resizes(dtype: DType) -> Iterator[Row]:
    x = np.ones((16, 8, 4, 4), dtype.numpy)
    x[:, :, 1, 2] = edges(dtype)[:, None]
    from gpu.edges.numbers import name

    labels = np.array([name(v, dtype) for v in edges(dtype)], object).reshape(-1, 1, 1, 1)
    sizes, scales = (16, 8, 8, 8), (1.0, 1.0, 2.0, 2.0)
    for mode in ("nearest", "linear", "cubic"):
        try:
            op = Resize(sizes, scales, mode)
            yield row(
                f"resize {mode} {dtype.value}",
                "resize",
                [x],
                added(op),
                labels=labels,
                orders={0: NHWC},
                exact=mode == "nearest",
            )
        except Exception:
            if mode != "cubic":
                raise


def _between_pixels(dtype: DType) -> Iterator[Row]:
    """Images of edge values at plain places, and plain images at places that are edge values."""
    x = np.resize(edges(dtype), (2, 8, 3, 4))
    plain = np.ones((1, 2, 3, 4), dtype.numpy)
    unknown = np.array("")
    grid = np.resize(np.array([-1.2, -0.4, 0.3, 0.7, 1.1], np.float32), (2, 3, 5, 2))
    at = np.resize(edges(dtype), (1, 4, 4, 2))
    for padding in ("zeros", "border", "reflection"):
        nearest, linear = GridSample("nearest", padding), GridSample("linear", padding)
        name = f"{padding} {dtype.value}"
        arrays = [x, grid]
        yield row(f"grid_sample {name}", "grid_sample", arrays, added(nearest), exact=True, labels=unknown)
        yield row(f"grid_sample at {name}", "grid_sample", [plain, at], added(linear), labels=unknown)
    offset = np.resize(grid.astype(dtype.numpy), (2, 8, 2, 3))
    w = np.full((4, 8, 2, 2), 1 / 32, dtype.numpy)  # a sum that overflows depends on its order
    op, edged = DeformConv((1, 1), (0,) * 4, (1, 1)), np.resize(edges(dtype), (1, 8, 2, 3))
    yield row(f"deform_conv {dtype.value}", "deform_conv", [x, w, offset], added(op), labels=unknown)
    yield row(
        f"deform_conv by {dtype.value}", "deform_conv", [plain, w[:, :2].copy(), edged], added(op), labels=unknown
    )
    rois = np.array([[0, 0, 3, 2], [-1, 0.5, 2, 5]], np.float32)
    edged = np.resize(edges(dtype), (4, 4))
    for mode in ("avg", "max"):
        op, name = RoiAlign((2, 2), 2, mode), f"{mode} {dtype.value}"
        arrays = [plain, rois, np.zeros(2, np.int64)]
        yield row(f"roi_align {name}", "roi_align", arrays, added(op), labels=unknown)
        arrays = [plain, edged, np.zeros(4, np.int64)]
        yield row(f"roi_align of {name}", "roi_align", arrays, added(op), labels=unknown)
    arrays = [x[:, :, :4, :4], rois, np.zeros(2, np.int64)]
    yield row(f"roi_pool {dtype.value}", "roi_pool", arrays, added(RoiPool((2, 2))), exact=True)
    arrays = [plain, edged, np.zeros(4, np.int64)]
    yield row(f"roi_pool of {dtype.value}", "roi_pool", arrays, added(RoiPool((2, 2))), labels=unknown)


def _sorted(dtype: DType) -> Iterator[Row]:
    x = np.stack([np.roll(edges(dtype), i) for i in range(16)])
    numbers = np.where(np.isnan(x), 0, x).astype(x.dtype)
    yield row(f"top_k {dtype.value}", "top_k", [numbers], added(TopK(5)), labels=np.array(""))
    boxes = np.tile(np.arange(64, dtype=np.float32).reshape(1, 16, 4) % 11, (16, 1, 1)).astype(dtype.numpy)
    suppression = added(NonMaxSuppression(9, 0.25))
    arrays = [boxes, x[:, None]]
    yield row(f"non_max_suppression {dtype.value}", "non_max_suppression", arrays, suppression, labels=np.array(""))
    for kind in ("sum", "prod"):
        yield row(f"cumulate {kind} {dtype.value}", "cumulate", [x], added(Cumulate(kind, 1)), labels=np.array(""))
    if dtype.is_float:
        factors = np.resize(x[::-1], x.shape).copy()
        yield row(f"linear_scan {dtype.value}", "linear_scan", [factors, x], added(LinearScan(1)), labels=np.array(""))
    at = np.array([0, 1, 2, 3, 0, 1], np.int64)
    updates = x[4:10].copy()
    for kind in ("add", "mul", "max", "min"):
        op = Scatter(kind)
        yield row(f"scatter {kind} {dtype.value}", "scatter", [x, at, updates], added(op), labels=np.array(""))


def random_bits() -> Iterator[Row]:
    most = np.iinfo(np.uint64).max
    runs = [[np.array(pair, np.uint64)] for pair in ((0, 0), (most, most), (0, most), (1 << 32, (1 << 32) - 1))]
    yield row(
        "random_bits",
        "random_bits",
        runs[0],
        added(RandomBits((5, 7), 3)),
        more=runs[1:],
        exact=True,
        labels=np.array(""),
    )
