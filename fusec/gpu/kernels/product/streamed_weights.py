"""Generate products of 5 to 32 rows with constant weights of 16 bits: a decoder's, for a batch of tokens.

The time is that of reading the weights once. One warp of a block requests them, stored in the order in which they are
multiplied, some stages ahead, and the rows at the same depth. The other warps multiply 16 columns at a time on tensor
cores. The launch is dependent: its first weights, which are constant, are requested while the launch before it still
runs. Where columns are few, the blocks of a cluster share the depth. An RMS norm of the rows is computed by every block,
which saves a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import resources

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, CLUSTERS, HALVES, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate, split_index
from fusec.gpu.kernels.convolution.row_norm import MAX_STREAMED, begins_few_rows, has_packed_rows
from fusec.ir import Node, TensorType, Value
from fusec.ops import MatMul, RmsNorm

MIN_ROWS, MAX_ROWS = 5, 32  # fewer rows have a kernel that multiplies without tensor cores
BATCH = 8  # loads of a row that a thread requests before it adds up squares
WARPS = 8  # that multiply
TILE, OCTET, STEP = 16, 8, 32  # columns of a tile, rows of one product of a warp, depth that a thread's loads span
PARTS = (1, 2, 4, 8)  # blocks of a cluster, which every GPU with clusters can start
MAX_TILES = 16  # of a block
RING_BYTES = (104 << 10, 200 << 10)  # of stages; with half a multiprocessor's memory, the next launch begins early
MAX_STAGE_DEPTH, MAX_STAGE_BYTES = 128, 33 << 10
MAX_STAGES = 12
MAX_TILINGS = 3
_CUDA = cuda_template(__package__, "streamed_weights.cuh")
_RING = resources.files("fusec.gpu.kernels.product").joinpath("stage_ring.cuh").read_text(encoding="utf-8")


def streamed_weights(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of one or two such products of the same rows; None for other steps.

    An RMS norm of the rows may be before them, and pointwise ops after them.
    """
    norm = nodes[0] if isinstance(nodes[0].op, RmsNorm) else None
    products = [node for node in nodes if isinstance(node.op, MatMul)]
    epilogue = [node for node in nodes if node not in products and node is not norm]
    if not figures.has(CLUSTERS) or not 1 <= len(products) <= 2 or not all(map(can_generate, epilogue)):
        return None
    if not _are_supported(products):
        return None
    if norm is not None and (not begins_few_rows(nodes, MAX_STREAMED) or norm.result in outputs):
        return None
    results = {v for node in epilogue for v in node.results}
    if results & {v for product in products for v in product.operands} or any(
        v.type.shape != products[0].result.type.shape for v in results
    ):
        return None
    name = "+".join(node.op.name for node in nodes)
    return with_variants(
        Kernel(name, (StreamSource(norm, products, epilogue, outputs, *tiling).launch(),))
        for tiling in _tilings(products, figures)
    )


def _are_supported(products: Sequence[Node]) -> bool:
    """Tell if the products have some rows, which are the same ones, and constant weights of one shape."""
    x, weights, y = products[0].operands[0], products[0].operands[1].type, products[0].result.type
    for product in products:
        w = product.operands[1]
        if product.operands[0] is not x or w.literal is None or w.type.shape != weights.shape:
            return False
    if len({t.dtype for t in (x.type, weights, y)}) > 1 or x.type.dtype not in HALVES or x.type.rank < 2 or not y.size:
        return False
    depth, columns = weights.shape[-2:]
    is_matrix = weights.size == depth * columns < 1 << 31
    rows = x.type.size // max(1, depth)
    return is_matrix and depth % STEP == 0 and columns % TILE == 0 and MIN_ROWS <= rows <= MAX_ROWS and has_packed_rows(x.type)


def _tilings(products: Sequence[Node], figures: GpuFigures) -> Iterator[tuple[int, int, int, int]]:
    """Yield tiles of a block, blocks that share the depth, depth of a stage, and stages; those to try first come first.

    All blocks run together, so the tiles are those with which most multiprocessors have a block.
    """
    depth, columns = products[0].operands[1].type.shape[-2:]
    rows, tiles = products[0].result.type.size // columns, columns // TILE
    found: list[tuple[int, int, int]] = []
    for parts in PARTS:
        for each in range(1, MAX_TILES // len(products) + 1):
            blocks = tiles // each * parts
            shares = parts == 1 or rows * TILE * each % (4 * parts) == 0
            if tiles % each == 0 and depth % (parts * STEP) == 0 and blocks <= figures.processors and shares:
                found.append((blocks, each, parts))
    # a block reads all rows, so few tiles read rows too often, and many parts have many sums
    found.sort(key=lambda sizes: (-sizes[0], abs(sizes[1] * len(products) - WARPS)))
    for _, each, parts in found[:MAX_TILINGS]:
        for ring_bytes in RING_BYTES:
            tiling = _stages(each * len(products), depth // parts, rows, min(ring_bytes, figures.dynamic_bytes))
            if tiling is not None:
                yield each, parts, *tiling


def _stages(tiles: int, depth: int, rows: int, ring_bytes: int) -> tuple[int, int] | None:
    """Return the depth of a stage, and how many stages have room; None if too few have."""
    stage_depth = STEP
    while (
        depth % (2 * stage_depth) == 0
        and stage_depth < MAX_STAGE_DEPTH
        and 2 * stage_depth * 2 * TILE * tiles <= MAX_STAGE_BYTES
    ):
        stage_depth *= 2
    turns = depth // stage_depth
    stages = min(MAX_STAGES, ring_bytes // _stage_bytes(tiles, stage_depth, rows), turns)
    return (stage_depth, stages) if stages >= min(2, turns) else None


def _pitch(stage_depth: int) -> int:
    """Return the bytes from one row of a stage to the next, so that eight threads read different banks."""
    return ceil_div(stage_depth * 2, 128) * 128 + 64 if stage_depth > STEP else 64


def _stage_bytes(tiles: int, stage_depth: int, rows: int) -> int:
    return tiles * TILE * stage_depth * 2 + rows * _pitch(stage_depth)


@dataclass(frozen=True, eq=False)
class StreamSource:
    """The launch of one or two products.

    norm: of the rows, before the products; None without one.
    products: of the same rows.
    tiles: of 16 columns of each product, for a block.
    parts: blocks of a cluster, which share the depth.
    stage_depth, stages: of the ring in shared memory.
    """

    norm: Node | None
    products: Sequence[Node]
    epilogue: Sequence[Node]
    outputs: Sequence[Value]
    tiles: int
    parts: int
    stage_depth: int
    stages: int

    @property
    def y(self) -> TensorType:
        return self.products[0].result.type

    @property
    def x(self) -> TensorType:
        """The rows as they are read."""
        return (self.norm or self.products[0]).operands[0].type

    @property
    def rows(self) -> int:
        return self.y.size // self.y.shape[-1]

    @property
    def stage_bytes(self) -> int:
        copied = self.rows + (self.norm is not None)
        return _stage_bytes(self.tiles * len(self.products), self.stage_depth, copied)

    @property
    def turns(self) -> int:
        """The stages that a block multiplies."""
        return self.x.shape[-1] // (self.parts * self.stage_depth)

    @property
    def size(self) -> int:
        """The results of a block's columns, of each product."""
        return self.rows * TILE * self.tiles

    @property
    def blocks(self) -> int:
        return self.y.shape[-1] // (TILE * self.tiles) * self.parts

    @property
    def ring_bytes(self) -> int:
        """The stages, or the sums that take their place if they are larger."""
        return ceil_div(max(self.stages * self.stage_bytes, 4 * self.size * len(self.products)), 16) * 16

    @property
    def box_at(self) -> int:
        """The place of what the blocks of a cluster send: after the barriers of the stages, and one more."""
        return self.ring_bytes + ceil_div(2 * self.stages + 1, 2) * 16

    def weights(self, product: Node) -> TensorType:
        """Return the type of the weights as they are stored: in the order of blocks, stages, tiles and threads.

        Thread 4g + q multiplies columns g and g + 8 of a tile, and 8 neighbours along the depth.
        """
        w = product.operands[1].type
        depth = (self.parts, self.turns, self.stage_depth // STEP, 4, 2, 2, 2)
        columns = (self.y.shape[-1] // (TILE * self.tiles), self.tiles, 2, 8)
        part, turn, step, q, half, later, pair, block, tile, high, g = range(11)
        order = (block, part, turn, step, tile, half, g, q, later, high, pair)
        return TensorType((*depth, *columns), w.dtype, order)

    def launch(self) -> Launch:
        arguments, count, threads = Arguments(), len(self.products), 32 * (WARPS + 1)
        product_bytes = self.tiles * TILE * self.stage_depth * 2
        cuda = _CUDA.bind(
            TYPE=C_TYPES[self.x.dtype],
            WARPS=WARPS,
            THREADS=threads,
            TILES=self.tiles,
            ALL_TILES=self.tiles * count,
            OWN=ceil_div(self.tiles * count, WARPS),
            OCTETS=ceil_div(self.rows, OCTET),
            ROWS=self.rows,
            COPIED_ROWS=self.rows + (self.norm is not None),
            DEPTH=self.x.shape[-1],
            BATCH=BATCH,
            PRODUCTS=count,
            PARTS=self.parts,
            PART_DEPTH=self.x.shape[-1] // self.parts,
            STAGE_DEPTH=self.stage_depth,
            STAGES=self.stages,
            TURNS=self.turns,
            EARLY=min(self.stages, self.turns),
            RING_BYTES=self.ring_bytes,
            STAGE_BYTES=self.stage_bytes,
            WEIGHT_BYTES=product_bytes * count,
            PRODUCT_BYTES=product_bytes,
            ROW_PITCH=_pitch(self.stage_depth),
            WIDTH=TILE * self.tiles,
            SIZE=self.size,
            EACH=self.size // self.parts,
            BOX_AT=self.box_at,
        )
        names = [f"x{d}" for d in range(self.x.rank - 1)]
        cuda = cuda.bind(
            INPUT=arguments.read((self.norm or self.products[0]).operands[0]),
            INPUT_PLACE=Space(self.x.shape, (*names, "k")).offset(self.x),
            ROW_COORDINATES=split_index("row", list(zip(names, self.x.shape, strict=False))),
        )
        copies = cuda("expect")
        for number, product in enumerate(self.products):
            pointer = arguments.read(product.operands[1], self.weights(product))
            copies += cuda("copy_product", WEIGHTS=pointer, PLACE=number * product_bytes)
        normed, store = self._normalise(cuda, arguments), self._store(cuda, arguments)
        cuda = cuda.bind(COPY_WEIGHTS=copies, **normed)
        lines = cuda(
            "kernel",
            BEGIN_CLUSTER=cuda("begin_cluster") if self.parts > 1 else [],
            BEGIN=arguments.begin(),  # after all pointers are named
            COPY=cuda("copy"),
            MULTIPLY=cuda("multiply"),
            STORE=store,
        )
        launch = arguments.launch(
            "streamed_weights", lines, self.blocks, threads, preamble=[_RING], resident=1, cluster=self.parts
        )
        nbytes = self.box_at + (4 * self.size * count if self.parts > 1 else 0)
        return replace(launch, resident_bytes=nbytes, architecture=CLUSTERS, dependent=True)

    def _normalise(self, cuda: CudaTemplate, arguments: Arguments) -> dict[str, list[str]]:
        """Return the statements that normalise the rows."""
        holes = ("NORMALISE", "FROM_SCALE", "FACTORS_OF_ROWS", "LOAD_SCALE", "NORMALISE_ROW")
        if self.norm is None:
            return {hole: [] for hole in holes}
        assert isinstance(self.norm.op, RmsNorm)
        scale, epsilon = arguments.read(self.norm.operands[1]), f"{self.norm.op.epsilon!r}f"
        return {hole: cuda(hole.lower(), NORM_SCALE=scale, EPSILON=epsilon) for hole in holes}

    def _store(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Add up the parts of results, apply the epilogue and store them. Only what is stored is rounded."""
        names = (*(f"y{d}" for d in range(self.y.rank - 1)), "column")
        code = PointwiseCode(Space(self.y.shape, names), arguments, rounds=False)
        sums: list[str] = []
        for number, product in enumerate(self.products):
            code.define(product.result, f"sum{number}")
            sums += cuda("take_sum" if self.parts == 1 else "add_parts", SUM=f"sum{number}", NUMBER=number)
        code.compute(self.epilogue, self.outputs)
        return cuda(
            "store" if self.parts == 1 else "store_in_cluster",
            ADD_UP=sums,
            RESULT_COORDINATES=split_index("at", [(f"y{d}", self.y.shape[d]) for d in range(self.y.rank - 1)]),
            EPILOGUE=code.lines(),
        )
