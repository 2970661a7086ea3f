"""Hold a few rows in the registers of a block, and compute an RMS norm of them before products of the rows.

Every block computes the norm for itself, which saves a launch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.ir import Node, TensorType, Value
from fusec.ops import MatMul, PackedMatMul, RmsNorm, Slice
from fusec.system.dataclass import dataclass

MAX_ROWS = 4  # in registers
MAX_STREAMED = 31  # in shared memory; a warp copies them and their scale
PACK = 8  # numbers that one load of a thread moves
ROW_PRODUCTS = (MatMul, PackedMatMul)
_CUDA = cuda_template(__package__, "row_norm.cuh")


def begins_few_rows(nodes: Sequence[Node], most: int = MAX_ROWS) -> bool:
    """Tell if an RMS norm of at most `most` rows comes before products of its result, pointwise ops and slices."""
    norm, *others = nodes
    if not isinstance(norm.op, RmsNorm) or norm.op.axis % norm.result.type.rank != norm.result.type.rank - 1:
        return False
    x = norm.operands[0].type
    rows_fit = 0 < x.size <= most * x.shape[-1] and x.dtype in HALVES and has_packed_rows(x)
    products = [node for node in others if isinstance(node.op, ROW_PRODUCTS)]
    reads_norm = all(norm.result is product.operands[0] for product in products)
    rest = [node for node in others if node not in products]
    applied = all(
        (can_generate(node) or is_slice_of_columns(node)) and norm.result not in node.operands for node in rest
    )
    return rows_fit and norm.result.type == x and reads_norm and applied


def is_slice_of_columns(node: Node) -> bool:
    """Tell if a slice keeps all rows, and neighbouring columns of each."""
    op, x = node.op, node.operands[0].type
    if not isinstance(op, Slice) or x.rank < 2 or node.result.type.within:
        return False
    is_whole = op.sizes[:-1] == x.shape[:-1] and not any(op.starts[:-1])
    return is_whole and all(step == 1 for step in op.steps) and op.sizes[-1] > 0


def has_packed_rows(x: TensorType) -> bool:
    """Tell if rows are contiguous, and begin and end at multiples of a pack."""
    *outer, inner = x.strides
    moved = [stride for stride, size in zip(outer, x.shape, strict=False) if size > 1]
    whole = x.size > 0 and x.shape[-1] % PACK == 0
    return inner == 1 and whole and not any(stride % PACK for stride in moved) and x.span < 1 << 31


@dataclass(frozen=True, eq=False)
class BlockRows:
    """Rows that the threads of a block hold in `x`, each some packs of every row.

    value: the rows as they are read.
    norm: norm of the rows; None without one.
    warps: warps of the block.
    """

    value: Value
    norm: Node | None
    warps: int

    @property
    def packs(self) -> int:
        """The packs of a row that a thread holds."""
        return ceil_div(self.value.type.shape[-1] // PACK, 32 * self.warps)

    @property
    def rows(self) -> int:
        return self.value.type.size // self.value.type.shape[-1]

    def bind(self, cuda: CudaTemplate) -> CudaTemplate:
        """Return fragments with the sizes of the rows."""
        x, threads = self.value.type, 32 * self.warps
        all_packs = x.shape[-1] // PACK
        return cuda.bind(
            TYPE=C_TYPES[x.dtype],
            ROWS=self.rows,
            WARPS=self.warps,
            THREADS=threads,
            PACKS=self.packs,
            ALL_PACKS=all_packs,
            DEPTH=x.shape[-1],
            IS_WHOLE=c_bool(all_packs == threads * self.packs),
        )

    def load(self, arguments: Arguments) -> list[str]:
        """Return the statements that load the rows, and normalise them."""
        cuda, pointer = self.bind(_CUDA), arguments.read(self.value)
        strides = self.value.type.strides
        rows: list[str] = []
        for row in range(self.rows):
            place = np.unravel_index(row, self.value.type.shape[:-1])
            offset = sum(int(i) * stride for i, stride in zip(place, strides, strict=False))
            rows += cuda("load_row", ROW=row, POINTER=pointer, OFFSET=offset)
        return [*cuda("load", LOAD_ROWS=rows), *self._normalise(cuda, arguments)]

    def _normalise(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        if self.norm is None:
            return []
        assert isinstance(self.norm.op, RmsNorm)
        return cuda("normalise", EPSILON=f"{self.norm.op.epsilon!r}f", SCALE=arguments.read(self.norm.operands[1]))

    def share(self, pointer: str) -> list[str]:
        """Return the statements that copy the rows to shared memory, where other threads may read them."""
        return self.bind(_CUDA)("share", SHARED=pointer)
