"""Generate products of 2 to 32 rows with constant weights of 16 bits: a decoder's, for a batch of tokens.

The time is that of reading the weights once. One warp of a block requests them some stages ahead, and the rows at the
same depth. Weights are stored in the order in which they are multiplied. The other warps multiply 16 columns at a time
on tensor cores. The launch is dependent: its first weights, which are constant, are requested while the launch before
it still runs. Where columns are few, the blocks of a cluster share the depth. An RMS norm of the rows saves a launch:
sums are divided by the roots of mean squares at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import CLUSTERS, Kernel, ceil_div, variants_of, with_variants
from fusec.gpu.kernels.product.few_rows.few_rows import RowsStep, few_rows, match_rows
from fusec.gpu.kernels.product.few_rows.stream_source import STEP, TILE, WARPS, StreamSource, bytes_of_stage
from fusec.gpu.kernels.product.row_norm import MAX_STREAMED
from fusec.ir import Node, Value
from fusec.ops.matmul import STREAMED_ROWS, can_stream

MIN_ROWS = 2  # one row has a kernel that multiplies without tensor cores
PARTS = (1, 2, 4, 8)  # blocks of a cluster, which every GPU with clusters can start
MAX_TILES = 16  # of a block
# Of a block: all of a multiprocessor's. Where two launches shared it, decode steps took longer on an H200.
BLOCK_BYTES = 216 << 10
BARRIER_BYTES = 512  # and sums of squares, at most
MAX_STAGE_DEPTH, MAX_STAGE_BYTES = 128, 33 << 10
MAX_STAGES = 12
MAX_TILINGS = 3


def streamed_weights(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of one or two such products of the same rows; None for other steps.

    An RMS norm of the rows may be before them, and pointwise ops after them. Slices of columns may be last. Where
    `few_rows` has a kernel, too, its variants compete with these.
    """
    step = match_rows(nodes, outputs, STREAMED_ROWS) if figures.has(CLUSTERS) else None
    if step is None or not _fits(step):
        return None
    name = "+".join(node.op.name for node in nodes)
    few = few_rows(nodes, outputs, figures)
    streams = [Kernel(name, (StreamSource(step, *tiling).launch(),)) for tiling in _tilings(step, figures)]
    return with_variants([*(() if few is None else variants_of(few)), *streams])


def _fits(step: RowsStep) -> bool:
    """Tell if there are enough rows, whole tiles of weights, and a norm whose scale can be copied with the rows."""
    if not can_stream(step.products[0].operands[1].type) or step.rows < MIN_ROWS:
        return False
    return step.norm is None or (step.rows <= MAX_STREAMED and step.norm.operands[1].literal is not None)


def _tilings(step: RowsStep, figures: GpuFigures) -> Iterator[tuple[int, int, int, int]]:
    """Yield tiles of a block, blocks that share the depth, depth of a stage, and stages; those to try first come first.

    With most of them all blocks run together, and most multiprocessors have one.
    """
    depth, columns = step.products[0].operands[1].type.shape[-2:]
    rows, tiles, count = step.rows, columns // TILE, len(step.products)
    found: list[tuple[float, int, int]] = []
    for parts in PARTS:
        for each in range(1, MAX_TILES // count + 1):
            blocks = tiles // each * parts
            turns = ceil_div(blocks, figures.processors)
            shares = parts == 1 or rows * TILE * each % (4 * parts) == 0
            is_whole = tiles % each == 0 and depth % (parts * STEP) == 0 and shares
            if is_whole and (turns == 1 or (parts == 1 and each * count >= WARPS)):
                found.append((blocks / (turns * figures.processors), each, parts))
    # a block reads all rows, so few tiles read rows too often, and many parts have many sums
    found.sort(key=lambda sizes: (-sizes[0], abs(sizes[1] * count - WARPS)))
    for _, each, parts in found[:MAX_TILINGS]:
        sums_bytes = 4 * rows * TILE * each * count if parts > 1 else 0
        ring_bytes = min(BLOCK_BYTES, figures.dynamic_bytes) - sums_bytes - BARRIER_BYTES
        tiling = _stages(each * count, depth // parts, rows + 1, ring_bytes)
        if tiling is not None:
            yield each, parts, *tiling


def _stages(tiles: int, depth: int, rows: int, ring_bytes: int) -> tuple[int, int] | None:
    """Return the depth of a stage, and how many stages have room; None if too few have.

    rows: that a stage has, with the scale of a norm.
    """
    stage_depth = STEP
    while (
        depth % (2 * stage_depth) == 0
        and stage_depth < MAX_STAGE_DEPTH
        and 2 * stage_depth * 2 * TILE * tiles <= MAX_STAGE_BYTES
    ):
        stage_depth *= 2
    turns = depth // stage_depth
    stages = min(MAX_STAGES, ring_bytes // bytes_of_stage(tiles, stage_depth, rows), turns)
    return (stage_depth, stages) if stages >= min(2, turns) else None
