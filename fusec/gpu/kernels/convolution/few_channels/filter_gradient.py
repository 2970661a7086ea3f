"""Generate the gradient of the filters of a convolution of four channels, by products of warpgroups (Hopper).

It is a product of the loss and of the windows of the image, with pixels as its depth. Products read overlapping
windows from one copy of the image in shared memory: two pixels are 16 bytes, and windows begin two pixels apart.
A block sums over some rows, and a second launch adds the sums of all blocks in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, Launch, by_value, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import can_follow
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space
from fusec.gpu.kernels.convolution.few_channels.few_channels_step import CHANNELS
from fusec.gpu.kernels.convolution.few_channels.gradient_tile import FILTERS, GROUPS, PITCH, GradientTile
from fusec.gpu.kernels.convolution.few_channels.image_tile import OCTET, PAIR, STRIDE
from fusec.ir import Node, TensorType, Value
from fusec.ops import ConvWgrad, Slice
from fusec.system.dataclass import dataclass

TILES = (4, 3, 2)  # in shared memory
SUMS = 112  # of a thread, at most
MOST_DEPTHS = 8  # products of a row, because a thread has the operands of all of them in registers
SLICES = 8  # threads that share the sums of a tap
_CUDA = cuda_template(__package__, "filter_gradient.cuh")


@dataclass(frozen=True)
class _FilterGradient:
    """A gradient of filters, and what follows it."""

    tile: GradientTile
    rest: Sequence[Node]
    outputs: Sequence[Value]
    figures: GpuFigures

    @property
    def tiles(self) -> int:
        """Tiles of all images."""
        return self.tile.image.shape[0] * self.tile.down

    @property
    def each(self) -> int:
        """Tiles of a block."""
        return ceil_div(self.tiles, self.figures.processors)

    @property
    def blocks(self) -> int:
        return ceil_div(self.tiles, self.each)

    @property
    def taps(self) -> int:
        """Taps of all filters."""
        return self.tile.loss.shape[1] * math.prod(self.tile.op.window)

    def kernel(self) -> Kernel:
        """Return the kernel."""
        name = "+".join(node.op.name for node in (self.tile.node, *self.rest))
        return Kernel(name, (self._products(), self._sum()), 4 * CHANNELS * self.taps * self.blocks)

    @property
    def _cuda(self) -> CudaTemplate:
        rows, columns = self.tile.op.window
        return _CUDA.bind(
            SIZE=CHANNELS * self.taps,
            TAPS=self.taps,
            WINDOW_ROWS=rows,
            WINDOW_COLUMNS=columns,
            FILTERS=self.tile.loss.shape[1],
        )

    def _products(self) -> Launch:
        """Return the launch that sums over rows, for each block."""
        arguments, threads = Arguments(), 128 * GROUPS
        _, _, loss_rows, loss_columns = self.tile.loss.shape
        pixels, step = self.tile.depths * 2 * OCTET, self.tile.op.strides[0]
        cuda = self._cuda.bind(
            PAIRS=self.tile.pairs,
            THREADS=threads,
            GROUPS=GROUPS,
            AHEAD=self.tile.count - 1,
            TILE_BYTES=self.tile.nbytes,
            IMAGE_BYTES=self.tile.image_bytes,
            DOWN=self.tile.down,
            ROWS=GROUPS,
            LOSS_ROWS=loss_rows,
            PITCH=PITCH,
        )
        copy_tile = cuda(
            "copy_tile",
            IMAGE=arguments.read(self.tile.node.operands[0]),
            IMAGE_TURNS=ceil_div(self.tile.high * self.tile.places, threads),
            IMAGE_PLACES=self.tile.high * self.tile.places,
            PLACES=self.tile.places,
            USED=self.tile.used,
            IMAGE_STEP_ROWS=GROUPS * step,
            TOP=self.tile.op.pads[0],
            LEFT=self.tile.op.pads[1] + self.tile.no_taps,
            IMAGE_ROWS=self.tile.image.shape[2],
            IMAGE_COLUMNS=self.tile.image.shape[3],
            **_steps("IMAGE", self.tile.image),
            LOSS=arguments.read(self.tile.node.operands[1]),
            LOSS_TURNS=ceil_div(8 * pixels * GROUPS, threads),
            LOSS_PLACES=8 * pixels * GROUPS,
            PIXELS=pixels,
            LOSS_COLUMNS=loss_columns,
            **_steps("LOSS", self.tile.loss),
        )
        lines = cuda(
            "kernel",
            TILES=by_value(self.tiles),
            EACH=by_value(self.each),
            IMAGE_STEP=step * self.tile.places * PAIR,
            LOSS_STEP=self.tile.loss_bytes,
            COPY_TILE=copy_tile,
            MULTIPLY=self._multiply(cuda),
            STORE_SUMS=cuda("store_sums", PARTS=arguments.scratch(), NO_TAPS=self.tile.no_taps),
        )
        functions = wgmma.product(C_TYPES[self.tile.image.dtype], OCTET * self.tile.op.window[0], by_rows=True)
        launch = arguments.early_launch("filter_gradient", lines, self.blocks, threads, preamble=functions, resident=1)
        return replace(launch, resident_bytes=self.tile.resident_bytes, architecture=wgmma.ARCHITECTURE)

    def _multiply(self, cuda: CudaTemplate) -> list[str]:
        """Generate the products of a row."""
        products = [line for depth in range(self.tile.depths) for line in self._pairs(depth, f"words[{depth}]")]
        return cuda("multiply", DEPTHS=self.tile.depths, PRODUCTS=products)

    def _pairs(self, depth: int, words: str) -> Iterator[str]:
        """Generate the products of 16 pixels: of each pair of taps, for all rows of the window together.

        words: the operand of the loss, as C.
        """
        is_half = self.tile.is_odd and depth == self.tile.depths - 1
        lead = (OCTET + self.tile.pairs - 1 if is_half else OCTET) * PAIR
        stride, product = (
            self.tile.places * PAIR * self.tile.op.dilations[0],
            f"ENTRY_{OCTET * self.tile.op.window[0]}_by_rows",
        )
        for pair in range(self.tile.pairs):
            place = (depth * 2 * OCTET + pair) * PAIR
            yield f"{product}(sums[{pair}], {words}, image, {place}u, {lead}u, {stride}u, 1);"

    def _sum(self) -> Launch:
        """Return the launch that adds the sums of blocks, and stores the results."""
        arguments, shape = Arguments(), self.outputs[0].type.shape
        code = PointwiseCode(Space(shape, ("c0", "c1", "c2", "c3")), arguments)
        code.define(self.tile.node.result, "sum.v[c1]")
        for node in self.rest:
            if isinstance(node.op, Slice):  # of the first channels
                code.define(node.result, code.get(node.operands[0]), rounds=False)
            else:
                code.apply(node)
        for value in self.outputs:
            code.store(value)
        lines = self._cuda(
            "add_parts",
            PARTS=arguments.scratch(),
            COUNT=by_value(self.blocks),
            SLICES=SLICES,
            CHANNELS=shape[1],
            EPILOGUE=["{", *code.lines(), "}"],
        )
        return arguments.early_launch("filter_gradient_sum", lines, ceil_div(self.taps, 32), 32 * SLICES)


def filter_gradient(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of the gradient of filters over four channels and what follows it; None for other steps.

    The first channels may be sliced out of it, because images of three channels are padded to four.
    """
    node, rest = nodes[0], nodes[1:]
    if not isinstance(node.op, ConvWgrad) or not figures.has(wgmma.ARCHITECTURE) or not _fits(node.op, node):
        return None
    if any(v.type.shape != outputs[0].type.shape for v in outputs) or not all(map(_can_follow, rest)):
        return None
    tiles = (tile for tile in (GradientTile(node, count) for count in TILES) if tile.depths <= MOST_DEPTHS)
    fits = (tile for tile in tiles if tile.sums <= SUMS and tile.resident_bytes <= figures.dynamic_bytes)
    return next((_FilterGradient(tile, rest, outputs, figures).kernel() for tile in fits), None)


def _fits(op: ConvWgrad, node: Node) -> bool:
    """Tell if windows begin two pixels apart, and copies of 16 bytes move pairs of pixels and octets of the loss."""
    (x, dy), types = node.operands, {v.type.dtype for v in (*node.operands, node.result)}
    if x.type.rank != 4 or len(types) != 1 or x.type.dtype not in HALVES or op.groups != 1:
        return False
    if x.type.shape[1] != CHANNELS or op.strides[1] != STRIDE or op.dilations[1] != 1:
        return False
    (_, filters, _, columns), strides = dy.type.shape, (x.type.strides[1], x.type.strides[3], dy.type.strides[1])
    if filters % 16 or filters > FILTERS or columns % OCTET or x.type.shape[3] % 2 or not dy.type.size:
        return False
    others = (*x.type.strides[::2], dy.type.strides[0], *dy.type.strides[2:])
    return strides == (1, CHANNELS, 1) and not any(s % 8 for s in others) and max(x.type.span, dy.type.span) < 1 << 31


def _can_follow(node: Node) -> bool:
    """Tell if a node can be applied to each result before it is stored."""
    if isinstance(node.op, Slice):
        return not any(node.op.starts) and {*node.op.steps} == {1} and _keeps_but_channels(node)
    return can_follow(node)


def _keeps_but_channels(node: Node) -> bool:
    """Tell if a slice leaves out channels only."""
    before, after = node.operands[0].type.shape, node.result.type.shape
    return len(before) == 4 and (before[0], *before[2:]) == (after[0], *after[2:])


def _steps(name: str, type: TensorType) -> dict[str, int]:
    """Return the holes of a tensor's strides, in elements."""
    return {f"{name}_{letter}": type.strides[dim] for letter, dim in (("N", 0), ("H", 2), ("W", 3))}
