"""Generate convolution of an image of up to four channels with a max pool of its result, by products of warpgroups.

Filters are the first operand of a product, and stay in registers. A thread then has results of two neighbouring filters
for whole rows of pixels, and finds the largest of a window with one exchange. Ops between the convolution and the pool
that never decrease are computed after the pool, for a quarter of the elements. A block visits neighbouring tiles from
left to right, so that it has the column before a tile already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.byte_code import ByteCode
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, by_value, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import Space, split_index
from fusec.gpu.kernels.convolution.few_channels.few_channels_step import FewChannels
from fusec.gpu.kernels.convolution.few_channels.image_tile import (
    OCTET,
    PAIR,
    RESERVED,
    THREADS,
    ImageTile,
    TilePlace,
    can_share_windows,
)
from fusec.gpu.kernels.convolution.few_channels.staged_rows import StagedRows
from fusec.ir import DType, Node
from fusec.ops import Cast, MaxPool, Relayout
from fusec.system.dataclass import dataclass

FILTERS = 64  # rows of a product
PART_ROWS, SUMS = (8, 7), ("upper", "lower")  # rows of the upper and the lower half of a tile, and its sums
COLUMNS = 2  # of a tile, each of eight pixels
QUARTERS = len(PART_ROWS) * COLUMNS  # of a tile, from top to bottom and from left to right
ROWS = sum(PART_ROWS) // 2  # of the pool's results, which a tile has; a window has three rows
RESIDENT = 3  # blocks of a multiprocessor, because a thread needs about 168 registers
TURNS = 2  # pairs of pixels that a thread loads before it stores them, at most
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
    def walks(self) -> bool:
        """Tell if blocks have the column before a tile from the tile before. Else each tile begins two columns earlier.

        The first tile of a block may be computed only for its last column.
        """
        walking, apart = (self._tiles_of_a_block(columns) for columns in (0, 1))
        return self.op.pads[1] == 1 and walking <= apart

    @property
    def skipped(self) -> int:
        """Columns of the pool's results that a tile computes in part only."""
        return 0 if self.walks else 1

    @property
    def columns(self) -> int:
        """Columns of the pool's results, which a tile has."""
        return self.tile.columns * OCTET // 2 - self.skipped

    @property
    def dims(self) -> list[tuple[str, int]]:
        """Images, and tiles of one from top to bottom and from left to right."""
        count, _, high, across = self.pool.result.type.shape
        return [("c0", count), ("down", ceil_div(high, ROWS)), ("right", ceil_div(across, self.columns))]

    @property
    def place(self) -> TilePlace:
        """The place of tile `block`."""
        return TilePlace(split_index("block", self.dims), *self._corner)

    @property
    def _corner(self) -> tuple[str, str]:
        """The first row and column of the convolution's results in a tile, as C."""
        column = 2 * self.skipped + self.op.pads[1] - 1
        return f"(int)down * {2 * ROWS} - {self.op.pads[0]}", f"(int)right * {2 * self.columns} - {column}"

    @property
    def rows(self) -> StagedRows:
        return StagedRows(self.tile)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of two images, and, if copies bring their rows, of the rows of two more."""
        return 2 * (self.tile.nbytes + self.rows.nbytes * self.rows.is_possible)

    def _tiles_of_a_block(self, skipped: int) -> int:
        """Return the tiles that a block computes, one of which for its last column if it skips none."""
        count, _, high, across = self.pool.result.type.shape
        right = ceil_div(across, self.tile.columns * OCTET // 2 - skipped)
        tiles = count * ceil_div(high, ROWS) * right
        return ceil_div(tiles, self.tile.step.figures.processors * RESIDENT) + (1 - skipped)

    def kernel(self) -> Kernel:
        """Return the kernel."""
        tile, step, arguments = self.tile, self.tile.step, Arguments()
        tiles, right = math.prod(size for _, size in self.dims), self.dims[-1][1]
        each = ceil_div(tiles, step.figures.processors * RESIDENT)
        cuda = _CUDA.bind(
            TYPE=C_TYPES[step.conv.operands[0].type.dtype],
            LOWEST=LOWEST[step.conv.operands[0].type.dtype],
            IMAGE_BYTES=tile.nbytes,
            ROWS_BYTES=self.rows.nbytes,
        )
        load_filters = step.load_filters(
            cuda.bind(
                STEPS=tile.count // 2,
                ROW_PAIRS=tile.pairs,
                WINDOW_COLUMNS=step.window[1],
                NO_TAPS=f"{tile.no_taps}u",
            ),
            arguments,
        )
        lines = cuda(
            "kernel",
            TILES=by_value(tiles),
            EACH=by_value(each),
            RIGHT=right,
            WALKS=c_bool(self.walks),
            LOADED=[] if self.rows.is_possible else tile.loaded(TURNS),
            **(self._copies if self.rows.is_possible else self._loads)(cuda, arguments),
            LOAD_FILTERS=load_filters,
            **{f"MULTIPLY_{i}": cuda("multiply", PRODUCTS=list(self._products(i))) for i in range(QUARTERS)},
            **{f"ROUND_{i}": self._quarter(cuda, i)("round") for i in range(QUARTERS)},
            **{f"POOL_{i}": self._pool(cuda, arguments, i) for i in range(QUARTERS)},
        )
        kind = C_TYPES[step.conv.operands[0].type.dtype]
        functions = [line for rows in PART_ROWS for line in wgmma.product(kind, OCTET * rows)]
        grid = ceil_div(tiles, each)
        launch = arguments.launch("few_channels", lines, grid, THREADS, preamble=functions, resident=RESIDENT)
        launch = replace(launch, resident_bytes=self.shared_bytes, architecture=wgmma.ARCHITECTURE)
        name = "+".join((step.name, *(node.op.name for node in (self.pool, *self.after))))
        return Kernel(name, (launch,))

    def _loads(self, cuda: CudaTemplate, arguments: Arguments) -> dict[str, list[str]]:
        """Return the code that loads images, by the names of its holes."""
        loads = [self.tile.load(arguments, self.place, section) for section in self.tile.sections(TURNS)]
        whole = [line for section in loads for part in section for line in part]
        early, hidden = loads[: -QUARTERS + 1], loads[-QUARTERS + 1 :]
        begun = [line for section in early for part in section for line in part]
        steps = [[*begun, *hidden[0][0]], *([*a[1], *b[0]] for a, b in pairwise(hidden)), hidden[-1][1]]
        steps += [[]] * (QUARTERS - len(steps))
        loaded = {f"LOAD_{i}": cuda("load_next", LOAD=step) if step else [] for i, step in enumerate(steps)}
        return {"LOAD_FIRST": cuda("load_first", LOAD=whole), **loaded}

    def _copies(self, cuda: CudaTemplate, arguments: Arguments) -> dict[str, list[str]]:
        """Return the code that copies and unpacks images, by the names of its holes."""
        copy, turns = self.rows.copy(arguments, self.place), self.tile.turns
        parts = [self.rows.unpack(self.place, range(*part)) for part in ((0, turns // 2), (turns // 2, turns))]
        return {
            "LOAD_FIRST": cuda("copy_first", COPY=copy, UNPACK=[line for part in parts for line in part]),
            "LOAD_0": cuda("copy_next", COPY=copy),
            "LOAD_1": cuda("unpack_next", UNPACK=parts[0]),
            "LOAD_2": cuda("unpack_next", UNPACK=parts[1]),
            "LOAD_3": [],
        }

    def _products(self, quarter: int) -> Iterator[str]:
        """Generate the products of a quarter of a tile, two pairs of taps at a time."""
        octet, part = divmod(quarter, len(PART_ROWS))
        start = part * OCTET * self.tile.stride + octet * OCTET * PAIR
        for pair in range(0, self.tile.count, 2):
            first, second = self.tile.place(pair), self.tile.place(pair + 1)
            place = f"{start + first}u, {second - first}u, {self.tile.stride}u, {int(pair > 0)}"
            yield f"ENTRY_{OCTET * PART_ROWS[part]}({SUMS[part]}, taps[{pair // 2}], own, {place});"

    def _quarter(self, cuda: CudaTemplate, quarter: int) -> CudaTemplate:
        """Return the fragments for a quarter of tile `tile`."""
        octet, part = divmod(quarter, len(PART_ROWS))
        _, _, high, across = self.tile.step.conv.result.type.shape
        last = self.dims[-1][1] * 2 * self.columns
        return cuda.bind(
            OWN_COORDINATES=split_index("tile", self.dims),
            TOP=self._corner[0],
            LEFT=self._corner[1],
            OCTET=octet,
            PART=part,
            ROWS=PART_ROWS[part],
            SUMS=SUMS[part],
            WORDS="words" if quarter < QUARTERS - 1 else "last_words",
            HIGH=high,
            ACROSS=across,
            COLUMNS_FIT=c_bool(self.walks and last <= across),
        )

    def _pool(self, cuda: CudaTemplate, arguments: Arguments, quarter: int) -> list[str]:
        """Return the code that pools the results of a quarter of a tile, and stores them."""
        _, _, high, across = self.pool.result.type.shape
        return self._quarter(cuda, quarter)(
            "pool",
            POOL_ROWS=high,
            POOL_COLUMNS=across,
            POOL_ROWS_FIT=c_bool(high % ROWS == 0),
            POOL_COLUMNS_FIT=c_bool(across % self.columns == 0),
            POOL_TILE_COLUMNS=self.columns,
            SKIPPED=self.skipped,
            EPILOGUE=self._epilogue(arguments),
        )

    @property
    def _space(self) -> Space:
        return Space(self.pool.result.type.shape, ("c0", "c1", "c2", "c3"), 1, 2)

    def _epilogue(self, arguments: Arguments) -> list[str]:
        """Return the code of two neighbouring results: what is between the convolution and the pool, then the rest."""
        step, code = self.tile.step, ByteCode(self._space, arguments, rounds=True)
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
    source = _PooledProducts(ImageTile(step, COLUMNS, len(PART_ROWS)), pool, after)
    room = (step.figures.shared_bytes + RESERVED) // RESIDENT - RESERVED
    return source.kernel() if source.shared_bytes <= room else None
