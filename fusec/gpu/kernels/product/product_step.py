"""Recognise products of many rows with few weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import HALVES
from fusec.gpu.kernels.codegen.pointwise_code import can_generate, stride_along, widest_vector
from fusec.ir import DType, Node, TensorType, Value, channels_last
from fusec.ops import Conv, MatMul
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

PACK = 8  # neighbours of a result that a thread handles
MIN_ROWS = 512  # a bound of what is tried; tuning times the kernel on each GPU, so this needs no figure
WORDS = 4  # of a row, that a thread multiplies at a time
DTYPES = {*((dtype, dtype) for dtype in HALVES), (DType.I8, DType.I32)}  # of a row, and of a sum


@dataclass(frozen=True, eq=False)
class ProductStep:
    """A product with the prologue of its first operand and the epilogue of its result."""

    product: Node
    prologue: Sequence[Node]
    epilogue: Sequence[Node]

    @property
    def x(self) -> TensorType:
        return self.product.operands[0].type

    @property
    def y(self) -> TensorType:
        return self.product.result.type

    @property
    def along(self) -> int:
        """The dim along which rows are multiplied."""
        return 1 if isinstance(self.product.op, Conv) else self.x.rank - 1

    @property
    def depth(self) -> int:
        return self.x.shape[self.along]

    @property
    def columns(self) -> int:
        return self.y.shape[self.along]

    @property
    def rows(self) -> int:
        return self.y.size // max(1, self.columns)

    @property
    def steps(self) -> tuple[int, ...]:
        """The distance of neighbours of the result in the first operand, for each dim: a convolution has strides."""
        op = self.product.op
        return (1, 1, *op.strides) if isinstance(op, Conv) else (1,) * self.x.rank

    @property
    def words(self) -> int:
        """The words of a row that a thread multiplies at a time: two where four would not be whole, or mostly zeros."""
        is_short = self.x.dtype is DType.I8 and (self.depth % 16 != 0 or self.depth <= 32)
        return WORDS // 2 if is_short else WORDS

    @property
    def pack(self) -> int:
        """The neighbours of a row that a thread multiplies at a time."""
        return self.words * 4 // self.x.dtype.itemsize

    @property
    def chunk(self) -> int:
        """The depth that a warp multiplies at a time."""
        return self.pack * 4

    @property
    def results(self) -> set[Value]:
        """The values that may be stored."""
        made = {self.product.result, *(v for node in self.epilogue for v in node.results)}
        return {v for v in made if v.type.shape == self.y.shape}

    @property
    def residuals(self) -> list[Value]:
        """The values of the shape of the result that the epilogue reads."""
        own = inputs_of(self.epilogue)
        return [v for v in own if v.type.shape == self.y.shape and v is not self.product.result and v.literal is None]

    @property
    def weights(self) -> TensorType:
        """The type of the weights as they are stored: contiguous along the depth."""
        w = self.product.operands[1].type
        return w.with_order((*range(w.rank - 2), w.rank - 1, w.rank - 2)) if self.along != 1 or w.rank == 2 else w

    @property
    def row_dims(self) -> list[int]:
        """The dims that number the rows."""
        return [d for d in range(self.y.rank) if d != self.along]

    @property
    def inner(self) -> int:
        """The last of these dims that has several places, or the last one."""
        return next((d for d in reversed(self.row_dims) if self.y.shape[d] != 1), self.row_dims[-1])

    def is_linear(self, types: Sequence[TensorType], y: TensorType | None = None) -> bool:
        """Tell if the number of a row is enough to find it in tensors, or in what broadcasts to `y` along rows."""
        along, inner = self.along, self.inner
        for type in types:
            full = type if y is None else y
            if y is not None and all(stride_along(type, y.rank, d) == 0 for d in range(y.rank) if d != along):
                continue
            if type.shape != full.shape or type.strides[along] != 1 or type.shape[inner] == 1:
                return False
            size = type.shape[along]
            for d in reversed(self.row_dims):
                if type.shape[d] != 1 and type.strides[d] != size:
                    return False
                size *= type.shape[d]
        return True

    def fits(self, figures: GpuFigures) -> bool:
        """Tell if rows are moved by packs, and memory rather than arithmetic bounds the product."""
        k, n = self.depth, self.columns
        if k % self.pack or n % PACK or self.rows < MIN_ROWS or max(self.x.size, self.y.size) >= 1 << 31:
            return False
        # bytes are moved in half the time of halves, and multiplied in half, too
        if k * n * self.x.dtype.itemsize**2 > 4 * figures.intensity * (k + n):
            return False  # cuDNN's engines are faster
        if self.x.dtype is DType.I8 and any(d % self.pack for d in _outer_strides(self.x, self.along)):
            return False
        read = [v.type for v in inputs_of([*self.prologue, self.product]) if v is not self.product.operands[1]]
        written = [v.type for v in (*inputs_of(self.epilogue), *self.results)]
        sides = ((self.x, k, read if self.prologue else [self.x]), (self.y, n, written))
        return all(self._packs(space, size, [t for t in types if t.size != 1]) for space, size, types in sides)

    def _packs(self, space: TensorType, size: int, types: Sequence[TensorType]) -> bool:
        rank = space.rank
        others = [d for d in range(rank) if d != self.along]
        steps = [[stride_along(t, rank, self.along), *(stride_along(t, rank, d) for d in others)] for t in types]
        return widest_vector(size, types, steps) == PACK


def _outer_strides(type: TensorType, along: int) -> list[int]:
    return [type.strides[d] for d in range(type.rank) if d != along and type.shape[d] != 1]


def _is_row(type: TensorType, y: TensorType, along: int) -> bool:
    """Tell if a term of the epilogue has one number for each column, so that each row may compute it again."""
    return type.size == y.shape[along] and stride_along(type, y.rank, along) == 1


def match_product(nodes: Sequence[Node]) -> ProductStep | None:
    """Sort the nodes into prologue, one product and epilogue; None if they are not that."""
    product = next((node for node in nodes if isinstance(node.op, (Conv, MatMul))), None)
    if product is None or not all(can_generate(node) or node is product for node in nodes):
        return None
    x, w = product.operands
    y = product.result
    if (x.type.dtype, y.type.dtype) not in DTYPES or w.literal is None or not y.type.size:
        return None
    if isinstance(product.op, Conv):
        op, usual = product.op, channels_last(x.type.rank)
        plain = not any(op.pads) and op.groups == 1 and math.prod(w.type.shape[2:]) == 1
        if not plain or x.type.order != usual or y.type.order != usual:
            return None
    elif w.type.size != math.prod(w.type.shape[-2:]) or x.type.rank < 2 or x.type.order or y.type.order:
        return None
    at = list(nodes).index(product)
    prologue: list[Node] = []
    wanted = {x}
    for node in reversed(nodes[:at]):
        if not wanted.isdisjoint(node.results):
            prologue.insert(0, node)
            wanted.update(node.operands)
    epilogue = [node for node in nodes if node is not product and node not in prologue]
    if any(v.type.shape != x.type.shape for node in prologue for v in node.results):
        return None
    along = 1 if isinstance(product.op, Conv) else y.type.rank - 1
    if not all(v.type.shape == y.type.shape or _is_row(v.type, y.type, along) for n in epilogue for v in n.results):
        return None
    if prologue and x.type.dtype is DType.I8:
        return None
    made = {v for node in prologue for v in node.results}
    if any(v in made for node in epilogue for v in node.operands) or w in made:
        return None
    return ProductStep(product, prologue, epilogue)
