"""Generate convolution of an image of up to four channels with a max pool of its result, by products of warpgroups.

Filters are the first operand of a product, and stay in registers. A thread then has results of two neighbouring filters
for whole rows of pixels, and finds the largest of a window with one exchange. Ops between the convolution and the pool
that never decrease are computed after the pool, for a quarter of the elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.byte_code import ByteCode
from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, by_value, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import Space, split_index
from fusec.gpu.kernels.convolution.few_channels.image_tile import (
    OCTET,
    PAIR,
    RESERVED,
    THREADS,
    ImageTile,
    TilePlace,
    can_share_windows,
)
from fusec.gpu.kernels.convolution.few_channels.step import FewChannels
from fusec.ir import DType, Node
from fusec.ops import Cast, MaxPool, Relayout

FILTERS = 64  # rows of a product
PARTS = 2  # of a tile, one above the other
ROWS = PARTS * OCTET // 2 - 1  # of the pool's results, which a tile has; a window has three rows
RESIDENT = 3  # blocks of a multiprocessor, because a thread needs about 168 registers
TURNS = 3  # pairs of pixels that a thread loads before it stores them, at most
LOWEST = {DType.F16: 0xFC00FC00, DType.BF16: 0xFF80FF80}  # two infinities
_CUDA = cuda_template(__package__, "pooled_products.cuh")


@dataclass(frozen=True)
class _PooledProducts:
    """The tile of results of the convolution that a block computes, and the pool.

    after: the nodes after the pool.
    """

    tile: ImageTile
    pool: Node
    after: Sequence[Node]

    @property
    def op(self) -> MaxPool:
        assert isinstance(self.pool.op, MaxPool)
        return self.pool.op

    @property
    def columns(self) -> int:
        """Columns of the pool's results, which a tile has."""
        return self.tile.columns * OCTET // 2 - 1

    def kernel(self) -> Kernel:
        """Return the kernel."""
        tile, step, arguments = self.tile, self.tile.step, Arguments()
        count, _, high, across = self.pool.result.type.shape
        down, right = ceil_div(high, ROWS), ceil_div(across, self.columns)
        grid = min(count * down * right, step.figures.processors * RESIDENT)
        dims = [("c0", count), ("down", down), ("right", right)]
        top = f"(int)down * {2 * ROWS} - {self.op.pads[0]}"
        left = f"(int)right * {2 * self.columns} - {self.op.pads[1]}"
        kind = C_TYPES[step.conv.operands[0].type.dtype]
        cuda = _CUDA.bind(TYPE=kind, OCTETS=tile.columns)
        place = TilePlace(split_index("block", dims), top, left)
        loads = [tile.load(arguments, place, section) for section in tile.sections(TURNS)]
        *first, (request, deliver), (request_last, deliver_last) = loads if len(loads) > 1 else [*loads, ([], [])]
        steps = {"STEPS": tile.count // 2, "ROW_PAIRS": tile.pairs, "WINDOW_COLUMNS": step.window[1]}
        load_filters = step.load_filters(cuda.bind(**steps), arguments)
        pool = cuda(
            "pool",
            OWN_COORDINATES=split_index("now", dims),
            TOP=top,
            LEFT=left,
            HIGH=step.conv.result.type.shape[2],
            ACROSS=step.conv.result.type.shape[3],
            LOWEST=LOWEST[step.conv.operands[0].type.dtype],
            POOL_TILE_COLUMNS=self.columns,
            POOL_ROWS=high,
            POOL_COLUMNS=across,
            EPILOGUE=self._epilogue(arguments),
        )
        lines = cuda(
            "kernel",
            TILES=by_value(count * down * right),
            BLOCKS=by_value(grid),
            IMAGE_BYTES=tile.nbytes,
            RAW=step.raw[0],
            TURNS=max(map(len, tile.sections(TURNS))),
            RAW_COUNT=step.raw[1],
            LOAD_FIRST=[line for each in first for part in each for line in part],
            REQUEST=request,
            DELIVER=deliver,
            REQUEST_LAST=request_last,
            DELIVER_LAST=deliver_last,
            LOAD_FILTERS=load_filters,
            PRODUCTS=list(self._products()),
            POOL=pool,
        )
        functions = wgmma.product(kind, OCTET * OCTET)
        launch = arguments.launch("few_channels", lines, grid, THREADS, preamble=functions, resident=RESIDENT)
        launch = replace(launch, resident_bytes=2 * tile.nbytes, architecture=wgmma.ARCHITECTURE)
        name = "+".join((step.name, *(node.op.name for node in (self.pool, *self.after))))
        return Kernel(name, (launch,))

    def _products(self) -> Iterator[str]:
        """Generate the products of a part, two pairs of taps at a time."""
        for pair in range(0, self.tile.count, 2):
            first, second = self.tile.place(pair), self.tile.place(pair + 1)
            for octet in range(self.tile.columns):
                place = f"part * {OCTET * self.tile.stride}u + {first + octet * OCTET * PAIR}u"
                lead = f"{second - first}u, {self.tile.stride}u, {int(pair > 0)}"
                yield f"ENTRY_{OCTET * OCTET}(acc[{octet}], taps[{pair // 2}], own, {place}, {lead});"

    def _epilogue(self, arguments: Arguments) -> list[str]:
        """Return the code of two neighbouring results: what is between the convolution and the pool, then the rest."""
        step, shape = self.tile.step, self.pool.result.type.shape
        code = ByteCode(Space(shape, ("c0", "c1", "c2", "c3"), 1, 2), arguments, rounds=True)
        code.define(step.conv.result, "pooled[j]", rounds=False)
        code.compute(step.rest)
        code.define(self.pool.result, code.get(self.pool.operands[0]), rounds=False)
        code.compute(self.after, step.outputs)
        return code.lines()


def never_decreases(node: Node) -> bool:
    """Tell if a node's result never decreases as its first operand grows, and is the same function for all pixels."""
    if isinstance(node.op, Cast):
        return node.operands[0].type.dtype.is_float and node.result.type.dtype is not DType.BOOL
    if isinstance(node.op, Relayout) or node.op.name in ("relu", "clip", "round"):
        return True
    if node.op.name not in ("add", "mul"):
        return False
    constants = [v for v in node.operands if v.literal is not None]
    if len(constants) != 1 or any(size != 1 for d, size in enumerate(constants[0].type.shape[::-1]) if d != 2):
        return False
    (constant,) = constants
    return node.op.name == "add" or (constant.literal is not None and bool((constant.literal.array > 0).all()))


def pooled_products(step: FewChannels, pool: Node, after: Sequence[Node]) -> Kernel | None:
    """Return the kernel of a step whose result is pooled; None where none is generated.

    after: the nodes after the pool.
    """
    op = pool.op
    assert isinstance(op, MaxPool)
    if not step.figures.has(wgmma.ARCHITECTURE) or not can_share_windows(step) or step.filters != FILTERS:
        return None
    if (op.window, op.strides, op.dilations) != ((3, 3), (2, 2), (1, 1)) or max(op.pads[:2]) > 1:
        return None
    if not all(never_decreases(node) for node in step.rest) or not step.stores(2, after) or not pool.result.type.size:
        return None
    source = _PooledProducts(ImageTile(step, 2, PARTS), pool, after)
    room = (step.figures.shared_bytes + RESERVED) // RESIDENT - RESERVED
    return source.kernel() if 2 * source.tile.nbytes <= room else None
