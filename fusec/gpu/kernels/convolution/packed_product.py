"""Generate products of at most 16 rows with weights of 4 or 8 bits, which stay packed in memory.

The time is that of reading the weights. A warp multiplies 16 columns by the rows: the weights are the first operand of
`mma.sync`, and the rows are its columns. A thread loads 16 bytes of weights, which hold its own numbers only, because
the constant is stored in that order. An integer becomes a float by its bits: code | 0x6400 is 1024 + code in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate, split_index
from fusec.gpu.kernels.convolution.packed_codes import PackedCodes
from fusec.ir import Node, TensorType, Value
from fusec.ops import PackedMatMul
from fusec.ops.matmul import MAX_ROWS, fits_kernel

OCTET = 8  # rows of one product
PACK = 8  # numbers of a row that one copy to shared memory moves
BUSY_WARPS = 16  # of a multiprocessor: with fewer the sum is split among blocks
MAX_PARTS = 8
# warps of a block, tiles of 16 columns of a warp, chunks that a thread requests before it multiplies
TILINGS = ((8, 1, 4), (8, 1, 2), (4, 1, 4), (4, 1, 8), (8, 1, 8), (16, 1, 4), (8, 2, 2), (4, 2, 4))
MAX_WORDS = 128  # that a thread requests before it multiplies, because they are in registers
# The same with the rows in shared memory: warps, tiles, the most chunks ahead, and blocks of a multiprocessor.
SHARED_TILINGS = ((4, 1, 4, 7), (4, 1, 8, 7), (8, 1, 8, 2), (8, 1, 4, 4), (16, 1, 4, 2))
SHARED_BYTES = 40 << 10  # of rows: static shared memory has room for the sums of warps, too
_CUDA = cuda_template(__package__, "packed_product.cuh")


def packed_product(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of such a product and the pointwise ops after it; None for other steps."""
    product, epilogue = nodes[0], nodes[1:]
    if not isinstance(product.op, PackedMatMul) or not all(map(can_generate, epilogue)):
        return None
    y = product.result.type
    if any(v.type.shape != y.shape for node in epilogue for v in node.results) or not _is_supported(product):
        return None
    name = "+".join(node.op.name for node in nodes)
    if y.size == 0:
        return Kernel(name, ())
    tilings = (*_tilings(product, figures), *_shared_tilings(product, figures))
    sources = [PackedSource(product, epilogue, outputs, *tiling) for tiling in tilings]
    kernels = [Kernel(name, (source.launch(),), source.scratch_bytes) for source in sources if source.fits]
    return with_variants({kernel.key: kernel for kernel in kernels}.values())


def _is_supported(product: Node) -> bool:
    x, codes, *_ = product.operands
    assert isinstance(product.op, PackedMatMul)
    constant = all(v.literal is not None for v in product.operands[1:])
    rows = x.type.size // max(1, x.type.shape[-1])
    fits = x.type.dtype in HALVES and rows <= MAX_ROWS and fits_kernel(codes.type, product.op.block)
    return constant and fits and max(codes.type.size // 512, x.type.span, product.result.type.span) < 1 << 31


def _tilings(product: Node, figures: GpuFigures) -> Iterator[tuple[int, int, int, int]]:
    """Yield warps, tiles, chunks ahead, and parts of the sum, those to try first."""
    codes = product.operands[1].type
    columns, chunks = codes.shape[0] // 16, codes.shape[1] // PackedCodes.of(product).depth
    octets = ceil_div(product.result.type.size, codes.shape[0] * OCTET)
    for warps, tiles, ahead in TILINGS:
        if ahead * 8 * (tiles + octets) > MAX_WORDS:  # of weights and scales, and of rows
            continue
        blocks = ceil_div(columns, tiles)
        parts = max(1, min(MAX_PARTS, figures.processors * BUSY_WARPS // (blocks * warps), chunks // warps))
        for some in dict.fromkeys((parts, 1) if (warps, tiles, ahead) == TILINGS[0] else (parts,)):
            yield warps, tiles, max(1, min(ahead, chunks // (warps * some))), some


def _shared_tilings(product: Node, figures: GpuFigures) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield such figures, and blocks of a multiprocessor, where warps share the chunks evenly."""
    codes = product.operands[1].type
    columns, chunks = codes.shape[0] // 16, codes.shape[1] // PackedCodes.of(product).depth
    for warps, tiles, ahead, resident in SHARED_TILINGS:
        most = max(1, min(MAX_PARTS, figures.processors * resident // columns))
        parts = next((n for n in range(most, 0, -1) if chunks % (warps * n) == 0), 0)
        if parts:
            share = chunks // (warps * parts)
            yield warps, tiles, max(n for n in range(1, ahead + 1) if share % n == 0), parts, resident


@dataclass(frozen=True, eq=False)
class PackedSource:
    """The launch of a product.

    warps: of a block; they share the depth.
    tiles: of 16 columns, for each warp.
    ahead: chunks of the depth that a thread requests before it multiplies.
    parts: blocks that share the depth.
    resident: blocks of a multiprocessor whose rows are in shared memory; 0: rows are in registers.
    """

    product: Node
    epilogue: Sequence[Node]
    outputs: Sequence[Value]
    warps: int
    tiles: int
    ahead: int
    parts: int
    resident: int = 0

    @property
    def fits(self) -> bool:
        """Tell if rows have room in shared memory, if they are there, and are copied by 16 bytes."""
        *outer, inner = self.x.strides
        aligned = inner == 1 and not any(s % PACK for s, n in zip(outer, self.x.shape, strict=False) if n > 1)
        return not self.resident or (aligned and self.rows * (self.x.shape[-1] + PACK) * 2 <= SHARED_BYTES)

    @property
    def x(self) -> TensorType:
        return self.product.operands[0].type

    @property
    def rows(self) -> int:
        return self.x.size // self.x.shape[-1]

    @property
    def octets(self) -> int:
        return ceil_div(self.rows, OCTET)

    @property
    def groups_of_tiles(self) -> int:
        return ceil_div(self.product.operands[1].type.shape[0], 16 * self.tiles)

    @property
    def size(self) -> int:
        """The results of a block."""
        return self.rows * 16 * self.tiles

    @property
    def scratch_bytes(self) -> int:
        return self.groups_of_tiles * self.parts * self.size * 4 if self.parts > 1 else 0

    @property
    def _packs(self) -> bool:
        """Tell if one load moves the neighbours of a row that a thread multiplies."""
        *outer, inner = self.x.strides
        moved = [stride for stride, size in zip(outer, self.x.shape, strict=False) if size > 1]
        count = PackedCodes.of(self.product).count
        return inner == 1 and all(stride % count == 0 for stride in moved)

    def launch(self) -> Launch:
        arguments, packed = Arguments(), PackedCodes.of(self.product)
        (columns, depth), threads = packed.type.shape, 32 * self.warps
        chunks, step = depth // packed.depth, self.warps * self.parts
        is_partial = columns % (16 * self.tiles) != 0
        cuda = packed.bind(_CUDA, arguments).bind(
            TYPE=C_TYPES[self.x.dtype],
            WARPS=self.warps,
            THREADS=threads,
            TILES=self.tiles,
            PARTS=self.parts,
            STEP=step,
            CHUNKS=chunks,
            ROWS=self.rows,
            OCTETS=self.octets,
            COLUMNS=columns,
            WIDTH=16 * self.tiles,
            SIZE=self.size,
            IS_PARTIAL=c_bool(is_partial),
        )
        tile = "first + t"
        if is_partial:  # its results are not stored
            tile = f"({tile} < {columns // 16}u ? {tile} : {columns // 16 - 1}u)"
        rows = [line for octet in range(self.octets) for line in self._load_row(cuda, octet, packed, arguments)]
        add_warps = cuda("add_warps")
        if self.parts > 1:
            doors = arguments.doors(self.groups_of_tiles)
            cuda = cuda.bind(SCRATCH=arguments.scratch(), DOORS=doors)
        loops = [self.ahead] if chunks % (step * self.ahead) == 0 else [self.ahead, 1]
        store, copied = self._store(arguments), self._copied(arguments) if self.resident else {}
        body = {"LOAD": cuda("load", TILE=tile), "LOAD_ROWS": rows, "MULTIPLY": cuda("multiply")}
        body["BEGIN"] = arguments.begin()  # all pointers are named now
        if self.resident:
            ahead = cuda("loop_ahead", AHEAD=self.ahead, **copied, **body)
        else:
            ahead = [line for n in dict.fromkeys(loops) for line in cuda("loop", AHEAD=n, **body)]
        coordinates = [line for octet in range(self.octets) for line in self._coordinates(octet)]
        lines = cuda(
            "kernel",
            ROW_COORDINATES=coordinates,
            LOOPS=ahead,
            SHARE=cuda("share", ADD_WARPS=add_warps) if self.parts > 1 else [],
            ADD_UP=cuda("add_parts") if self.parts > 1 else add_warps,
            RESULT_COORDINATES=split_index("at", [(f"y{d}", self.x.shape[d]) for d in range(self.x.rank - 1)]),
            EPILOGUE=store,
        )
        blocks = self.groups_of_tiles * self.parts
        launch = arguments.launch("packed_product", lines, blocks, threads, resident=self.resident)
        return replace(launch, early=True)

    def _coordinates(self, octet: int) -> list[str]:
        row = f"row{octet}"
        last = f"const u32 {row} = {octet * OCTET}u + g < {self.rows}u ? {octet * OCTET}u + g : {self.rows - 1}u;"
        return [last, *split_index(row, [(f"r{octet}_{d}", self.x.shape[d]) for d in range(self.x.rank - 1)])]

    def _copied(self, arguments: Arguments) -> dict[str, Filling]:
        """Return where a row begins that is copied to shared memory. Rows there are in different banks."""
        names = (*(f"c{d}" for d in range(self.x.rank - 1)), "k")
        return {
            "PACKS": self.x.shape[-1] // PACK,
            "ROW_PACKS": self.x.shape[-1] // PACK + 1,
            "COPIED_COORDINATES": split_index("row", [(f"c{d}", self.x.shape[d]) for d in range(self.x.rank - 1)]),
            "POINTER": arguments.read(self.product.operands[0]),
            "COPIED_AT": Space(self.x.shape, names).offset(self.x),
        }

    def _load_row(self, cuda: CudaTemplate, octet: int, packed: PackedCodes, arguments: Arguments) -> list[str]:
        """Load the neighbours of a row that a thread multiplies, one by one where they are not contiguous."""
        space = Space(self.x.shape, (*(f"r{octet}_{d}" for d in range(self.x.rank - 1)), "k"))
        cuda = cuda.bind(
            OCTET=octet,
            POINTER=arguments.read(self.product.operands[0]),
            AT=space.offset(self.x),
            STRIDE=self.x.strides[-1],
        )
        if self.resident:
            shared = cuda("load_shared", ROW=f"row{octet}", ROW_PACKS=self.x.shape[-1] // PACK + 1)
            return cuda("load_row", LOAD_NEIGHBOURS=shared)
        return cuda("load_row", LOAD_NEIGHBOURS=cuda("load_pack" if self._packs else "load_elements"))

    def _store(self, arguments: Arguments) -> list[str]:
        """Apply the epilogue to a result, and store it."""
        y = self.product.result
        names = (*(f"y{d}" for d in range(y.type.rank - 1)), "column")
        code = PointwiseCode(Space(y.type.shape, names), arguments)
        code.define(y, "sum")
        code.compute(self.epilogue, self.outputs)
        return code.lines()
