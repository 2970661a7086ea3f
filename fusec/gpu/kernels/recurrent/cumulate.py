"""Generate running sums and products, with the pointwise ops before and after them.

One thread computes a short line or a product. Several threads of a block share a longer line of a sum: each adds a few
neighbours, and then they add up their sums. A long line is split into parts, whose sums another launch finds first.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import (
    BLOCK,
    C_TYPES,
    Arguments,
    Kernel,
    Launch,
    by_value,
    ceil_div,
    compute_type,
    power_of_two,
)
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate, split_index, thread_index
from fusec.gpu.kernels.norm.step_roles import ancestors
from fusec.ir import Node, Value
from fusec.ops import Cumulate
from fusec.system.dataclass import dataclass

SHORT = 16  # elements of a line that a thread adds up alone
ITEMS = 4  # neighbours that a thread adds up alone
LOADED = 8  # elements that a thread loads together
LEAST_PART, PART = 1 << 10, 1 << 13  # elements of a line that the threads of a block compute, at least and at most
NEIGHBOURS = 16  # lines whose elements are next to each other in memory, which neighbouring threads compute
MAX_ELEMENTS = 1 << 31
_CUDA = cuda_template(__package__, "cumulate.cuh").bind(ITEMS=ITEMS, LOADED=LOADED, BLOCK=BLOCK)


def cumulate(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a cumulate and pointwise ops around it; None for other steps."""
    step = _matched(nodes, outputs)
    if step is None:
        return None
    name = "+".join(node.op.name for node in nodes)
    if step.y.type.size == 0:
        return Kernel(name, ())
    assert isinstance(step.node.op, Cumulate)
    if step.size <= SHORT or step.node.op.kind == "prod":
        return Kernel(name, (step.by_thread(),))
    return step.by_threads(name, figures)


@dataclass(frozen=True)
class _Cumulate:
    """A step with one cumulate.

    before, after: the pointwise ops that it depends on, and the others.
    """

    node: Node
    before: tuple[Node, ...]
    after: tuple[Node, ...]
    outputs: tuple[Value, ...]

    @property
    def y(self) -> Value:
        return self.node.result

    @property
    def axis(self) -> int:
        assert isinstance(self.node.op, Cumulate)
        return self.node.op.axis % self.y.type.rank

    @property
    def size(self) -> int:
        """The number of elements of a line."""
        return self.y.type.shape[self.axis]

    @property
    def lines(self) -> int:
        return self.y.type.size // self.size

    @property
    def coordinates(self) -> list[tuple[str, int]]:
        """Names and sizes of the dims that number lines, in memory order."""
        y = self.y.type
        return [(f"c{d}", y.shape[d]) for d in y.order or range(y.rank) if d != self.axis and y.shape[d] != 1]

    def code(self, arguments: Arguments, prefix: str) -> PointwiseCode:
        """Return empty code for element `at` of a line."""
        y = self.y.type
        names = tuple("at" if d == self.axis else f"c{d}" if y.shape[d] != 1 else None for d in range(y.rank))
        return PointwiseCode(Space(y.shape, names), arguments, prefix)

    def read(self, arguments: Arguments) -> tuple[list[str], str]:
        """Return the statements that find an element of the operand, and its expression."""
        code = self.code(arguments, "x")
        code.compute(self.before)
        value = code.get(self.node.operands[0])
        return [*code.head, *code.body], value

    def store(self, arguments: Arguments) -> list[str]:
        """Return the statements that store what is made of `running`."""
        code = self.code(arguments, "y")
        code.define(self.y, "running")
        code.compute(self.after, self.outputs)
        return ["{", "const int j = 0;", *code.head, *code.body, *code.tail, "}"]

    def by_thread(self) -> Launch:
        """Return the launch in which a thread computes a line."""
        assert isinstance(self.node.op, Cumulate)
        is_sum, arguments = self.node.op.kind == "sum", Arguments()
        read, value = self.read(arguments)
        lines = thread_index(self.lines, self.coordinates)
        lines += _CUDA(
            "by_thread",
            NUMBER=compute_type(self.y.type.dtype),
            START=0 if is_sum else 1,
            OP="+" if is_sum else "*",
            SIZE=self.size,
            READ=read,
            VALUE=value,
            STORE=self.store(arguments),
        )
        return arguments.launch("cumulate", lines, ceil_div(self.lines, BLOCK))

    def by_threads(self, name: str, figures: GpuFigures) -> Kernel:
        """Return the kernel in which several threads compute a line."""
        y = self.y.type
        apart = y.strides[self.axis] > 1 and self.lines >= NEIGHBOURS
        threads = min(BLOCK // NEIGHBOURS if apart else BLOCK, power_of_two(ceil_div(self.size, ITEMS)))
        together = BLOCK // threads
        share = ceil_div(self.size * ceil_div(self.lines, together), 2 * figures.processors)
        part = min(PART, max(LEAST_PART, power_of_two(share)))
        number, parts = compute_type(y.dtype), ceil_div(self.size, part)
        grid = ceil_div(self.lines * parts, together)
        cuda = _CUDA.bind(
            NUMBER=number,
            SIZE=self.size,
            PART=min(part, self.size),
            THREADS=threads,
            TOGETHER=together,
            STRIDE=together if apart else 1,
            LINES=by_value(self.lines),
            COUNT=by_value(self.lines * parts),
        )
        begin = [*cuda("place"), *split_index("i", self.coordinates)]
        launches, earlier = list[Launch](), list[str]()
        cuda = cuda.bind(SCAN=cuda("scan"))
        if parts > 1:
            arguments = Arguments()
            sums = arguments.scratch(number)
            read, value = self.read(arguments)
            lines = [*begin, *cuda("part_sum", SUMS=sums, READ=read, VALUE=value)]
            launches.append(arguments.launch("cumulate_parts", lines, grid))
        arguments = Arguments()
        if parts > 1:
            earlier = cuda("earlier_parts", SUMS=arguments.scratch(number))
        read, value = self.read(arguments)
        store = self.store(arguments)
        lines = [*begin, *cuda("by_threads", EARLIER=earlier, READ=read, VALUE=value, STORE=store)]
        launches.append(arguments.launch("cumulate", lines, grid))
        scratch_bytes = self.lines * parts * 8 if parts > 1 else 0
        return Kernel(name, tuple(launches), scratch_bytes)


def _matched(nodes: Sequence[Node], outputs: Sequence[Value]) -> _Cumulate | None:
    """Return the parts of a step with one cumulate; None if the step has other ops, or shapes that do not fit."""
    anchors = [node for node in nodes if isinstance(node.op, Cumulate)]
    if len(anchors) != 1 or not all(can_generate(node) for node in nodes if node is not anchors[0]):
        return None
    (node,) = anchors
    y = node.result.type
    if y.dtype not in C_TYPES or y.size >= MAX_ELEMENTS:
        return None
    before = ancestors(nodes, node.operands)
    after = tuple(other for other in nodes if other is not node and other not in before)
    inside = {v for other in before for v in other.results}
    if any(v in inside for other in after for v in other.operands) or any(v in inside for v in outputs):
        return None
    return _Cumulate(node, before, after, tuple(outputs)) if all(v.type.shape == y.shape for v in outputs) else None
