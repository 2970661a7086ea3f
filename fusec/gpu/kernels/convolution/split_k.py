"""Choose and generate split-K: a convolution over few pixels whose channels are split among blocks.

Few pixels give few blocks, and each would visit all taps and channels one after the other. So channels are split until
each multiprocessor has a block. Then the sums of the parts are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.equal_steps import once_for_equal_steps
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import CLUSTERS, HALVES, Kernel, ceil_div, with_variants
from fusec.gpu.kernels.codegen.mma_tiles import can_follow
from fusec.gpu.kernels.convolution.split_k_source import SplitKSource
from fusec.gpu.kernels.convolution.split_k_tiling import COLUMNS, DEPTH, PACK, ROWS, SplitKTiling, along, is_flat
from fusec.gpu.kernels.product.thin_product import thin_product
from fusec.ir import Node, Value
from fusec.ops import Conv

MOST_PIXELS = 4096  # a bound of what is tried; the figures bound the blocks: see `_runs`
MOST_STEPS = 20  # of a warp, because all are unrolled
WAVES = 4  # blocks for each multiprocessor, at most; with more, cuDNN's engines fill the GPU, too
MOST_SPLITS = 8  # blocks of a cluster: CUDA promises no larger ones, whatever the GPU
# Pixels and filters of a block; warps that share its steps, and its filters.
VARIANTS = ((32, 32, 4, 1), (16, 32, 4, 1), (16, 64, 4, 2))
SHARED_BYTES = 200 << 10  # of a block, at most; the figures bound it on GPUs that have less


@once_for_equal_steps
def split_k(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a convolution over few pixels and its epilogue; None for other steps."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, Conv) or not all(map(can_follow, rest)) or not _fits(conv):
        return None
    y = conv.result
    if any(v.type.shape != y.type.shape for v in (*outputs, *(v for node in rest for v in node.results))):
        return None
    sources = [SplitKSource(conv, rest, outputs, variant) for variant in variants(conv, figures)]
    kernels = [source.kernel() for source in sources if _runs(source, figures)]
    thin = thin_product(nodes, outputs, figures) if kernels else None
    return with_variants([*kernels, *([] if thin is None else [replace(thin, others=()), *thin.others])])


def _runs(source: SplitKSource, figures: GpuFigures) -> bool:
    fits = source.resident_bytes <= min(SHARED_BYTES, figures.dynamic_bytes)
    return fits and source.own_steps <= MOST_STEPS and source.grid <= WAVES * figures.processors


def _fits(conv: Node) -> bool:
    """Tell if channels are read by octets, from an image of few pixels."""
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, Conv)
    if x.type.rank != 4 or op.groups != 1 or x.type.dtype not in HALVES or w.type.dtype is not x.type.dtype:
        return False
    n, filters, high, wide = y.type.shape
    if not y.type.size or n * high * wide > MOST_PIXELS or filters % ROWS or w.literal is None:
        return False
    if max(v.type.span for v in (x, w, y)) >= 1 << 31:
        return False
    others = (stride for dim, stride in enumerate(x.type.strides) if dim != 1)
    return x.type.shape[1] % DEPTH == 0 and x.type.strides[1] == 1 and not any(stride % PACK for stride in others)


def variants(conv: Node, figures: GpuFigures) -> list[SplitKTiling]:
    """Return the variants, of which the first needs no clusters; without clusters, scratch memory merges in all."""
    found = [_tiling(conv, *variant, figures.processors) for variant in VARIANTS]
    if not figures.has(CLUSTERS):
        return list(dict.fromkeys(found))
    return list(dict.fromkeys([found[0], *(replace(variant, clusters=variant.splits > 1) for variant in found)]))


def _tiling(conv: Node, pixels: int, filters: int, deep: int, across: int, processors: int) -> SplitKTiling:
    """Return a tiling with a block for each multiprocessor.

    pixels, filters: pixels and filters of a block.
    deep, across: warps that share the steps, and the filters.
    """
    high, wide = _tile(conv, pixels)
    (n, all, down, right), channels = conv.result.type.shape, conv.operands[1].type.shape[1]
    if is_flat(conv):
        n, down, right = 1, 1, n * down * right
    blocks = n * ceil_div(down, high) * ceil_div(right, wide) * ceil_div(all, filters)
    room = max(1, processors // blocks)
    splits = max(n for n in range(1, min(MOST_SPLITS, room) + 1) if channels // DEPTH % n == 0)
    return SplitKTiling(high, wide, filters, splits, deep, across, False)


def _tile(conv: Node, pixels: int) -> tuple[int, int]:
    """Return rows and columns of at most `pixels` pixels, so that few blocks read few pixels."""
    op, w, (n, _, high, wide) = conv.op, conv.operands[1], conv.result.type.shape
    assert isinstance(op, Conv)
    if is_flat(conv):
        return 1, min(pixels, ceil_div(n * high * wide, COLUMNS) * COLUMNS)
    window = w.type.shape[2:]

    def tiles() -> Iterator[tuple[int, int, int, int]]:
        for columns in range(COLUMNS, pixels + 1, COLUMNS):
            down, right = ceil_div(high, pixels // columns), ceil_div(wide, columns)
            rows = ceil_div(high, down)
            read = along(op, 0, window[0], rows).count * along(op, 1, window[1], columns).count
            yield down * right, read, rows, columns

    return min(tiles())[2:]
