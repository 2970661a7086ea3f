"""Generate depthwise convolution with an epilogue.

A thread computes a strip of results along the last dim for some neighbouring channels. So each column of the image is
read once for all windows of the strip. With rolling sums, each row is read once, too: see `rolling_sums.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, Arguments, Kernel, by_value, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    split_index,
    stride_along,
    widest_vector,
)
from fusec.gpu.kernels.convolution.depthwise_bytes import depthwise_bytes
from fusec.gpu.kernels.convolution.depthwise_source import CUDA, DepthwiseSource, DepthwiseTile, DepthwiseWindow
from fusec.gpu.kernels.convolution.rolling_sums import RollingSums, can_roll
from fusec.ir import Node, Value
from fusec.ops import Conv, Reduce
from fusec.schedule.program import inputs_of

STRIP = 4  # results of a thread at most, divided by the stride
MAX_TAPS = 128  # because the taps of a row are unrolled
HELD_FILTERS = 128  # numbers of filters that a thread keeps in registers, at most
WAVES = 8  # blocks for each multiprocessor, if threads have several turns
MANY = 1 << 30  # blocks, so that each thread has one turn
ROLLING_COLUMNS = (7, 4)  # of a thread, which has one channel
ROLLING_BLOCK = 128  # threads, which have many registers
ROLLING_THREADS = 256  # of a multiprocessor, at least, if bands can be short enough
UNROLLED_TAPS = 16  # of a window whose rows are unrolled; code of more exceeds the instruction cache


def depthwise(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a depthwise convolution and its epilogue; None for other steps."""
    conv, rest = nodes[0], nodes[1:]
    if any(isinstance(node.op, Reduce) for node in rest):
        sources = depthwise_with_mean(nodes, [v for v in outputs if v is not nodes[-1].results[0]], figures)
        return with_variants(Kernel(_name(rest), source.launches(), source.scratch_bytes) for source in sources)
    if not is_depthwise_step(nodes, outputs):
        return None
    y = conv.result
    assert isinstance(conv.op, Conv)
    if y.type.size == 0:
        return Kernel(_name(rest), ())
    vector = _vector(conv, rest, outputs)
    if of_bytes := depthwise_bytes(nodes, outputs, vector):
        return with_variants(Kernel(_name(rest), (launch,)) for launch in of_bytes)
    width, total = y.type.shape[-1], y.type.size // vector
    strip = max(1, STRIP // conv.op.strides[-1])
    # with too few threads to fill the GPU, strips are shorter
    while strip > 1 and (ceil_div(total, strip) < figures.enough_threads or width < strip):
        strip //= 2
    tiles = ((vector, strip), (vector, max(1, strip // 2)), (max(1, vector // 2), strip))
    strips = [_kernel(nodes, outputs, *tile) for tile in dict.fromkeys(tiles)]
    rolling = [_rolling_kernel(nodes, outputs, sums) for sums in rolling_sums(conv, figures)]
    return with_variants([*strips, *rolling])


def rolling_sums(conv: Node, figures: GpuFigures) -> list[RollingSums]:
    """Return the rolling sums to time: over all rows, or over bands so short that there are enough threads."""
    if not can_roll(conv):
        return []
    n, channels, height, width = conv.result.type.shape
    found: list[RollingSums] = []
    for strip in ROLLING_COLUMNS:
        sums = RollingSums(conv, strip, height)
        if strip <= width and sums.fits:
            threads = n * channels * ceil_div(width, strip)
            parts = ceil_div(figures.processors * ROLLING_THREADS, threads)
            found.append(replace(sums, band=max(ceil_div(height, parts), min(sums.open, height))))
    return found


def _rolling_kernel(nodes: Sequence[Node], outputs: Sequence[Value], sums: RollingSums) -> Kernel:
    """Return the kernel whose threads compute a band of rows with rolling sums."""
    conv, rest, arguments = nodes[0], nodes[1:], Arguments()
    y = conv.result.type
    counts = [("c0", y.shape[0]), ("band", ceil_div(y.shape[2], sums.band))]
    counts += [("strip", ceil_div(y.shape[3], sums.strip)), ("c1", y.shape[1])]
    threads = math.prod(count for _, count in counts)
    code = PointwiseCode(Space(y.shape, ("c0", "c1", "c2", "c3"), 1, 1), arguments, rounds=False)
    code.define(conv.result, sums.result)
    code.compute(rest, outputs)
    lines = CUDA(
        "bands",
        BLOCK=ROLLING_BLOCK,
        COUNT=by_value(threads),
        COORDINATES=split_index("i", counts),
        FILTERS=DepthwiseWindow(conv, DepthwiseTile(1, sums.strip, held=True), arguments).filters(),
        ROLLING=sums.lines(arguments, code.lines()),
    )
    blocks = ceil_div(threads, ROLLING_BLOCK)
    return Kernel(_name(rest), (arguments.launch("depthwise", lines, blocks, ROLLING_BLOCK),))


def is_depthwise_step(nodes: Sequence[Node], outputs: Sequence[Value]) -> bool:
    """Tell if the nodes are a depthwise convolution and pointwise ops after it."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(can_generate(node) for node in rest):
        return False
    (x, w), y = conv.operands, conv.result
    if conv.op.groups != x.type.shape[1] or w.type.shape[0] != x.type.shape[1]:
        return False
    if any(v.type.shape != y.type.shape for v in outputs) or w.type.size > MAX_TAPS * w.type.shape[0]:
        return False
    return max(x.type.size, y.type.size) < 1 << 31


def depthwise_with_mean(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> list[DepthwiseSource]:
    """Return the variants of a depthwise convolution whose result is also reduced over space.

    nodes: the convolution, its epilogue, and last the sum or mean over space.
    outputs: results of the epilogue that are stored.
    """
    conv, *rest, mean = nodes
    op, (summed, *_) = mean.op, mean.operands
    if not isinstance(conv.op, Conv) or not isinstance(op, Reduce) or not is_depthwise_step([conv, *rest], outputs):
        return []
    x, y = conv.operands[0].type, conv.result.type
    if op.kind not in ("sum", "mean") or op.axes != tuple(range(2, y.rank)) or not y.dtype.is_float or not y.size:
        return []
    if summed.node not in nodes or summed.type.shape != y.shape or y.strides[1] != 1 or x.strides[1] != 1:
        return []
    taps = conv.operands[1].type.size // y.shape[1]
    vector = _vector(conv, rest, outputs)
    width, strip = y.shape[-1], max(1, STRIP // conv.op.strides[-1])
    half, few = max(1, vector // 2), WAVES * figures.processors
    # Few tiles, because each is compiled and timed for each shape.
    rolling = rolling_sums(conv, figures)
    tiles = [
        DepthwiseTile(half, strip, blocks=MANY),
        DepthwiseTile(half, 2 * strip, blocks=MANY),
        DepthwiseTile(vector // 4, 7, held=True, blocks=few),
        *(DepthwiseTile(1, sums.strip, held=True, blocks=few, band=sums.band) for sums in rolling),
    ]
    fitting = [
        tile for tile in tiles if tile.vector and tile.strip <= width and tile.held * taps * tile.vector <= HELD_FILTERS
    ]
    tiles = fitting or [DepthwiseTile(vector, 1, blocks=few)]
    return [DepthwiseSource(conv, rest, outputs, mean, tile) for tile in dict.fromkeys(tiles)]


def _vector(conv: Node, rest: Sequence[Node], outputs: Sequence[Value]) -> int:
    """Return how many neighbouring channels a thread can handle."""
    x, y = conv.operands[0], conv.result
    read = [v.type for v in inputs_of(rest) if v.type.size != 1 and v is not y]
    rank = y.type.rank
    types = [*(v.type for v in outputs), x.type, *read]
    steps = [[stride_along(t, rank, 1), *(stride_along(t, rank, d) for d in range(rank) if d != 1)] for t in types]
    return widest_vector(y.type.shape[1], types, steps) if y.type.strides[1] == x.type.strides[1] == 1 else 1


def _kernel(nodes: Sequence[Node], outputs: Sequence[Value], vector: int, strip: int) -> Kernel:
    """Return the kernel whose threads compute `strip` results of `vector` channels."""
    conv, rest = nodes[0], nodes[1:]
    y, arguments = conv.result.type, Arguments()
    rank, width = y.rank, y.shape[-1]
    strips = ceil_div(width, strip)
    threads = y.size // vector // width * strips
    counts = {"c1": ("pack", y.shape[1] // vector), f"c{rank - 1}": ("strip", strips)}
    sizes = [counts.get(f"c{d}", (f"c{d}", y.shape[d])) for d in y.order or range(rank)]
    unroll = math.prod(conv.operands[1].type.shape[2:]) <= UNROLLED_TAPS
    window = DepthwiseWindow(conv, DepthwiseTile(vector, strip), arguments, unroll).sums()
    code = PointwiseCode(Space(y.shape, tuple(f"c{d}" for d in range(rank)), 1, vector), arguments, rounds=False)
    code.define(conv.result, "acc[s][j]")
    code.compute(rest, outputs)
    lines = CUDA(
        "strips",
        BLOCK=BLOCK,
        COUNT=by_value(threads),
        COORDINATES=split_index("i", sizes),
        VECTOR=vector,
        WINDOW=window,
        STRIP=strip,
        COLUMN=f"c{rank - 1}",
        WIDTH=width,
        EPILOGUE=code.lines(),
    )
    return Kernel(_name(rest), (arguments.launch("depthwise", lines, ceil_div(threads, BLOCK)),))


def _name(rest: Sequence[Node]) -> str:
    return "+".join(["depthwise", *(node.op.name for node in rest)])
