"""Generate the parts that variants of a product with packed weights share: rows, sums of warps and results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Launch, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index
from fusec.gpu.kernels.product.packed.packed_codes import PackedCodes
from fusec.ir import Node, TensorType, Value
from fusec.system.dataclass import dataclass

OCTET = 8  # rows of one product
CUDA = cuda_template(__package__, "packed_product.cuh")


@dataclass(frozen=True, eq=False)
class PackedSource:
    """The launch of a product.

    warps: warps of a block; they share the depth.
    tiles: tiles of 16 columns, for each warp.
    """

    product: Node
    epilogue: Sequence[Node]
    outputs: Sequence[Value]
    warps: int
    tiles: int

    @property
    def codes(self) -> PackedCodes:
        return PackedCodes.of(self.product)

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
    def chunks(self) -> int:
        """The chunks of the depth."""
        return self.codes.type.shape[1] // self.codes.depth

    @property
    def groups_of_tiles(self) -> int:
        return ceil_div(self.codes.type.shape[0], 16 * self.tiles)

    @property
    def size(self) -> int:
        """The results of a block."""
        return self.rows * 16 * self.tiles

    def bound(self, zeros: str) -> CudaTemplate:
        """Fill the holes of the fragments that depend on the product and its split; zeros: see `PackedCodes.bind`."""
        columns = self.codes.type.shape[0]
        return self.codes.bind(CUDA, zeros).bind(
            TYPE=C_TYPES[self.x.dtype],
            WARPS=self.warps,
            THREADS=32 * self.warps,
            TILES=self.tiles,
            PARTS=1,
            CHUNKS=self.chunks,
            ROWS=self.rows,
            OCTETS=self.octets,
            COLUMNS=columns,
            WIDTH=16 * self.tiles,
            SIZE=self.size,
            ALL_TILES=self.tiles,
            ALL_SUMS=self.size,
            IS_PARTIAL=c_bool(columns % (16 * self.tiles) != 0),
        )

    def finished(self, lines: Sequence[str], arguments: Arguments, blocks: int, resident: int = 0) -> Launch:
        """Return the launch with this body."""
        launch = arguments.launch("packed_product", lines, blocks, 32 * self.warps, resident=resident)
        return replace(launch, dependent=True)

    def row_coordinates(self) -> list[str]:
        return [line for octet in range(self.octets) for line in self._coordinates(octet)]

    def _coordinates(self, octet: int) -> list[str]:
        row = f"row{octet}"
        last = f"const u32 {row} = {octet * OCTET}u + g < {self.rows}u ? {octet * OCTET}u + g : {self.rows - 1}u;"
        return [last, *split_index(row, [(f"r{octet}_{d}", self.x.shape[d]) for d in range(self.x.rank - 1)])]

    def result_coordinates(self) -> list[str]:
        return split_index("at", [(f"y{d}", self.x.shape[d]) for d in range(self.x.rank - 1)])

    def load_rows(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Load the neighbours of each row that a thread multiplies, one by one where they are not contiguous."""
        *outer, inner = self.x.strides
        moved = [stride for stride, size in zip(outer, self.x.shape, strict=False) if size > 1]
        packs = inner == 1 and all(stride % self.codes.count == 0 for stride in moved)
        lines: list[str] = []
        for octet in range(self.octets):
            space = Space(self.x.shape, (*(f"r{octet}_{d}" for d in range(self.x.rank - 1)), "k"))
            pointer, at = arguments.read(self.product.operands[0]), space.offset(self.x)
            each = cuda.bind(OCTET=octet, POINTER=pointer, AT=at, STRIDE=inner)
            lines += each("load_row", LOAD_NEIGHBOURS=each("load_pack" if packs else "load_elements"))
        return lines

    def store(self, arguments: Arguments) -> list[str]:
        """Apply the epilogue to a result, and store it."""
        y = self.product.result
        names = (*(f"y{d}" for d in range(y.type.rank - 1)), "column")
        code = PointwiseCode(Space(y.type.shape, names), arguments)
        for value, total in self.sums():
            code.define(value, total)
        code.compute(self.epilogue, self.outputs)
        return code.lines()

    def sums(self) -> list[tuple[Value, str]]:
        """Return results of products, and the names of their sums."""
        return [(self.product.result, "sum")]
