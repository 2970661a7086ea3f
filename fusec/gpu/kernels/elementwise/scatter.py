"""Generate scatters: rows that are replaced by, or combined with, updates at given indices.

Where updates are few, a thread combines an element with all updates of it, in their order and in one launch. Else one
launch copies the operand, and another one combines it with the updates by atomic operations. A GPU has none for numbers
of 16 bits and fewer, which wider ones hold meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import (
    BLOCK,
    C_TYPES,
    VECTOR_BYTES,
    Arguments,
    Kernel,
    Launch,
    by_value,
    ceil_div,
    compute_type,
)
from fusec.gpu.kernels.codegen.pointwise_code import Space, split_index, thread_index
from fusec.ir import DType, Node, Value
from fusec.ops import Scatter
from fusec.schedule.aliasing import same_storage
from fusec.system.dataclass import dataclass

FEW = 1 << 8  # updates that each thread compares its element with
FEW_COMPARISONS = 1 << 7  # of all elements with all updates, for each thread of a full GPU
MAX_ELEMENTS = 1 << 31
COMBINED = {"none": "y", "add": "x + y", "mul": "x * y", "max": "nmax(x, y)", "min": "nmin(x, y)"}
_CUDA = cuda_template(__package__, "scatter.cuh")


def scatter(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a scatter; None for other steps."""
    node = nodes[0]
    if len(nodes) != 1 or not isinstance(node.op, Scatter):
        return None
    x, indices, updates = (v.type for v in node.operands)
    if x.dtype not in C_TYPES or indices.dtype not in C_TYPES or max(x.size, updates.size) >= MAX_ELEMENTS:
        return None
    if x.size == 0:
        return Kernel("scatter", ())
    step = _Scatter(node, node.op.reduction)
    if _has_few_updates(node, figures):
        return Kernel("scatter", (step.by_place(),))
    if updates.size == 0:
        return Kernel("scatter", (step.copied(is_held=False),))
    launches = (step.copied(step.is_held), step.combined(), *((step.stored(),) if step.is_held else ()))
    return Kernel("scatter", launches, x.size * step.held_bytes if step.is_held else 0)


def has_fixed_order(node: Node, figures: GpuFigures) -> bool:
    """Tell if a scatter gives the same bits every time. Atomic operations add and multiply floats in any order."""
    assert isinstance(node.op, Scatter)
    rounds = node.op.reduction in ("add", "mul") and node.result.type.dtype.is_float
    return not rounds or _has_few_updates(node, figures)


def _has_few_updates(node: Node, figures: GpuFigures) -> bool:
    """Tell if a thread finds all updates of an element."""
    x, indices = (v.type for v in node.operands[:2])
    return indices.size <= FEW and x.size * indices.size <= FEW_COMPARISONS * figures.enough_threads


@dataclass(frozen=True)
class _Scatter:
    """A scatter, and how it combines numbers."""

    node: Node
    reduction: str

    @property
    def dtype(self) -> DType:
        return self.node.result.type.dtype

    @property
    def is_held(self) -> bool:
        """Tell if wider numbers hold the result while it is combined."""
        return self.reduction != "none" and self.dtype.itemsize < 4

    @property
    def held_bytes(self) -> int:
        return max(4, self.dtype.itemsize)

    @property
    def number(self) -> str:
        """The C type in which numbers are combined by atomic operations."""
        own = compute_type(self.dtype)
        return "i32" if self.dtype.is_int and self.is_held else own

    def _template(self) -> CudaTemplate:
        """Return the template with what all launches share. A row has the coordinate `row`, and an update `n`."""
        old, _, new = self.node.operands
        rows, updates = self._space("row", old), self._space("n", new)
        return _CUDA.bind(
            TYPE=C_TYPES[self.dtype],
            ROWS=by_value(old.type.shape[0]),
            AT_OLD=rows.offset(old.type),
            AT_NEW=updates.offset(new.type),
            AT_RESULT=rows.offset(self.node.result.type),
            COMBINED=COMBINED[self.reduction],
        )

    def _rows(self, first: str, count: int) -> list[tuple[str, int]]:
        """Return names and sizes of the coordinates of a thread: the first, of rows or updates, and those of a row."""
        shape = self.node.result.type.shape
        return [(first, count), *((f"c{d}", size) for d, size in enumerate(shape) if d and size != 1)]

    def by_place(self) -> Launch:
        """Return the launch in which a thread finds all updates of an element."""
        arguments, result = Arguments(), self.node.result
        old, indices, new = self.node.operands
        cuda = self._template().bind(NUMBER=compute_type(self.dtype))
        work = cuda(
            "by_place",
            OLD=arguments.read(old),
            INDICES=arguments.read(indices),
            NEW=arguments.read(new),
            RESULT=arguments.write(result),
            COUNT=by_value(indices.type.size),
            ELEMENTS=by_value(result.type.size),
            COORDINATES=split_index("i", self._rows("row", result.type.shape[0])),
            BLOCK=BLOCK,
        )
        return arguments.launch("scatter", work, ceil_div(result.type.size, BLOCK), preamble=cuda("functions"))

    def copied(self, is_held: bool) -> Launch:
        """Return the launch that copies the operand to the result, or to the numbers that hold it."""
        arguments, (old, *_), result = Arguments(), self.node.operands, self.node.result
        cuda, size, rows = self._template(), result.type.size, result.type.shape[0]
        source = arguments.read(old)
        vector = VECTOR_BYTES // max(1, self.dtype.itemsize)
        packed = all(same_storage(v.type.shape, v.type.order, ()) and not v.type.within for v in (old, result))
        if is_held:
            work = cuda("hold", HELD=arguments.scratch(self.number), NUMBER=self.number, OLD=source)
        elif packed and size % vector == 0:
            work = cuda("copy_packs", VECTOR=vector, OLD=source, RESULT=arguments.write(result))
            lines = thread_index(size // vector)
            return arguments.launch("scatter_copy", [*lines, *work], ceil_div(size // vector, BLOCK))
        else:
            work = cuda("copy", OLD=source, RESULT=arguments.write(result))
        lines = thread_index(size, self._rows("row", rows))
        return arguments.launch("scatter_copy", [*lines, *work], ceil_div(size, BLOCK))

    def combined(self) -> Launch:
        """Return the launch that combines the copy with the updates."""
        arguments, result = Arguments(), self.node.result
        _, indices, new = self.node.operands
        cuda = self._template().bind(NEW=arguments.read(new), INDICES=arguments.read(indices))
        preamble = list[str]()
        if self.reduction == "none":
            work = cuda("replace", RESULT=arguments.write(result))
        else:
            cuda = cuda.bind(NUMBER=self.number)
            if self.is_held:
                memory = f"{arguments.scratch(self.number)} + ({self._held_at()})"
            else:
                offset = self._space("row", result).offset(result.type)
                memory = f"{arguments.write(result)} + ({offset})"
            work = cuda("combine", MEMORY=memory)
            preamble = [*cuda("functions"), *cuda("update_memory", UPDATE=self._update(cuda))]
        lines = thread_index(new.type.size, self._rows("n", indices.type.size))
        lines = [*lines, *cuda("place"), *work]
        return arguments.launch("scatter", lines, ceil_div(new.type.size, BLOCK), preamble=preamble)

    def stored(self) -> Launch:
        """Return the launch that stores what wider numbers held."""
        arguments, result = Arguments(), self.node.result
        work = self._template()(
            "store",
            HELD=arguments.scratch(self.number),
            RESULT=arguments.write(result),
            STORED=compute_type(self.dtype),
        )
        lines = thread_index(result.type.size, self._rows("row", result.type.shape[0]))
        return arguments.launch("scatter_store", [*lines, *work], ceil_div(result.type.size, BLOCK))

    def _update(self, cuda: CudaTemplate) -> list[str]:
        """Return the statements that combine a number with one in memory."""
        if self.reduction == "add":
            return cuda("update_by_add", ADDED="u64" if self.number == "i64" else self.number)
        return cuda("update_by_exchange", BITS="u64" if self.held_bytes == 8 else "u32")

    def _space(self, first: str, value: Value) -> Space:
        """Return the space of the operand or of the updates. The first coordinate is the row, or the update."""
        shape = value.type.shape
        return Space(shape, (first, *(f"c{d}" if size != 1 else None for d, size in enumerate(shape) if d)))

    def _held_at(self) -> str:
        """Return the place of an element among the held ones, which are in the order of the dims."""
        shape = self.node.result.type.shape
        names = [
            (f"c{d}" if d else "row", math.prod(shape[d + 1 :])) for d in range(len(shape)) if not d or shape[d] != 1
        ]
        return " + ".join(f"{name} * {stride}" for name, stride in names)
