"""Generate products of at most 16 rows with weights of 4 or 8 bits, which stay packed in memory.

The time is that of reading the weights. A warp multiplies 16 columns by the rows: the weights are the first operand of
`mma.sync`, and the rows are its columns. A thread loads 16 bytes of weights, which hold its own numbers only, because
the constant is stored in that order. An integer becomes a float by its bits: code | 0x6400 is 1024 + code in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import HALVES, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.gpu.kernels.product.packed.packed_codes import PackedCodes
from fusec.gpu.kernels.product.packed.packed_ring import packed_rings
from fusec.gpu.kernels.product.packed.packed_source import OCTET, PackedSource
from fusec.gpu.kernels.product.row_norm import begins_few_rows
from fusec.ir import Node, Value
from fusec.ops import PackedMatMul, RmsNorm
from fusec.ops.matmul import MAX_ROWS, fits_kernel
from fusec.system.dataclass import dataclass

BUSY_WARPS = 16  # of a multiprocessor: with fewer the sum is split among blocks
MAX_PARTS = 8
# warps of a block, tiles of 16 columns of a warp, chunks that a thread requests before it multiplies
TILINGS = ((8, 1, 4), (8, 1, 2), (4, 1, 4), (4, 1, 8), (8, 1, 8), (16, 1, 4), (8, 2, 2), (4, 2, 4))
MAX_WORDS = 128  # that a thread requests before it multiplies, because they are in registers


def packed_product(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a packed product and the pointwise ops after it; None for other steps.

    Two products of the same rows, such as those of a gated layer, may be one launch. An RMS norm of up to four rows may
    be before them.
    """
    norm = nodes[0] if isinstance(nodes[0].op, RmsNorm) else None
    products = [node for node in nodes if isinstance(node.op, PackedMatMul)]
    epilogue = [node for node in nodes if node not in products and node is not norm]
    if not products or products[0] is not nodes[norm is not None] or not all(map(can_generate, epilogue)):
        return None
    if norm is not None and (not begins_few_rows(nodes) or norm.result in outputs):
        return None
    product, y = products[0], products[0].result.type
    if any(v.type.shape != y.shape for node in epilogue for v in node.results) or not _is_supported(product):
        return None
    if len(products) > 1 and not _may_join(products):
        return None
    name = "+".join(node.op.name for node in nodes)
    if y.size == 0:
        return Kernel(name, ())
    rings = list(packed_rings(products, epilogue, outputs, figures, norm))
    if len(products) > 1 or norm is not None:
        return with_variants(Kernel(name, (ring.launch(),)) for ring in rings)
    sources = [PackedChunks(product, epilogue, outputs, *tiling) for tiling in _tilings(product, figures)]
    kernels = [Kernel(name, (source.launch(),), source.scratch_bytes) for source in sources]
    fast = [ring for ring in rings if 2 * ring.groups_of_tiles > figures.processors]  # blocks of most multiprocessors
    first, last = ([Kernel(name, (r.launch(),)) for r in rings if (r in fast) == wanted] for wanted in (True, False))
    kernels = [*first, *kernels, *last]
    return with_variants({kernel.key: kernel for kernel in kernels}.values())


def _may_join(products: Sequence[Node]) -> bool:
    """Tell if two products read the same rows, and constants of the same types, and neither reads the other."""
    first, second = products[0], products[-1]
    x, other = first.operands[0], second.operands[0]
    types = [[v.type for v in product.operands] for product in (first, second)]
    return (
        len(products) == 2 and x is other and first.op == second.op and types[0] == types[1] and _is_supported(second)
    )


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


@dataclass(frozen=True, eq=False)
class PackedChunks(PackedSource):
    """The launch of a product whose warps request some chunks in registers, and then multiply them.

    ahead: chunks of the depth that a thread requests before it multiplies.
    parts: blocks that share the depth.
    """

    ahead: int
    parts: int

    @property
    def scratch_bytes(self) -> int:
        return self.groups_of_tiles * self.parts * self.size * 4 if self.parts > 1 else 0

    def launch(self) -> Launch:
        arguments, packed, step = Arguments(), self.codes, self.warps * self.parts
        columns = packed.type.shape[0]
        zeros = "" if packed.zeros is None else arguments.read(packed.zeros, packed.by_block(packed.zeros))
        cuda = self.bound(zeros).bind(
            CODES=arguments.read(packed.codes, packed.stored()),
            SCALES=arguments.read(packed.scales, packed.by_block(packed.scales)),
            PARTS=self.parts,
            STEP=step,
        )
        tile = "first + t"
        if columns % (16 * self.tiles):  # its results are not stored
            tile = f"({tile} < {columns // 16}u ? {tile} : {columns // 16 - 1}u)"
        rows, add_warps = self.load_rows(cuda, arguments), cuda("add_warps")
        if self.parts > 1:
            counters = arguments.barrier_counters(self.groups_of_tiles)
            cuda = cuda.bind(SCRATCH=arguments.scratch(), COUNTERS=counters)
        store = self.store(arguments)
        body = {"LOAD": cuda("load", TILE=tile), "LOAD_ROWS": rows, "MULTIPLY": cuda("multiply")}
        body["BEGIN"] = arguments.begin()  # all pointers are named now
        loops = [self.ahead] if self.chunks % (step * self.ahead) == 0 else [self.ahead, 1]
        lines = cuda(
            "kernel",
            ROW_COORDINATES=self.row_coordinates(),
            LOOPS=[line for n in dict.fromkeys(loops) for line in cuda("loop", AHEAD=n, **body)],
            SUMS=cuda("sums"),
            SHARE=cuda("share", ADD_WARPS=add_warps) if self.parts > 1 else [],
            ADD_UP=cuda("add_parts") if self.parts > 1 else add_warps,
            RESULT_COORDINATES=self.result_coordinates(),
            EPILOGUE=store,
        )
        return self.finished(lines, arguments, self.groups_of_tiles * self.parts)
