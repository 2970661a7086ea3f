"""Generate the loops in which threads visit the elements that a `RowPlan` gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.kernel import by_value, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.gpu.kernels.codegen.row_plan import RowPlan

TOGETHER = 8  # columns whose sums a block combines
MOST_THREADS = 64  # for one column


def thread_setup(plan: RowPlan, kind: str, backwards: bool = False) -> list[str]:
    """Generate the statements that tell a thread which numbers and elements it handles.

    They also declare `shared`, the memory in which threads combine results.

    backwards: the last chunk comes first.
    """
    lines: list[str] = []
    if plan.threads > 1 and not (plan.row and plan.threads <= 32):
        lines.append(f"__shared__ {kind} shared[{plan.block * plan.width}];")
    else:
        lines.append(f"{kind}* shared = 0;")
    if plan.row:
        lines.append(f"const u32 t = threadIdx.x % {plan.threads}u, lane = threadIdx.x / {plan.threads}u;")
    else:
        lines.append(f"const u32 t = threadIdx.x / {plan.lanes}u, lane = threadIdx.x % {plan.lanes}u;")
    if plan.chunks == 1:
        lines.append(f"const u32 group = blockIdx.x * {plan.lanes}u + lane, begin = 0, end = {plan.count}u;")
    else:
        lines.append(f"const u32 group = blockIdx.x % {plan.blocks}u * {plan.lanes}u + lane;")
        chunk = f"blockIdx.x / {plan.blocks}u"
        if backwards:
            chunk = f"{plan.chunks - 1}u - {chunk}"
        lines.append(f"const u32 chunk = {chunk}, begin = chunk * {plan.each}u;")
        lines.append(f"const u32 end = begin + {plan.each}u < {plan.count}u ? begin + {plan.each}u : {plan.count}u;")
    lines.append(f"const bool live = group < {by_value(plan.groups)};")
    lines.append(f"const u32 at = live ? group : {by_value(max(plan.groups - 1, 0))};")
    return lines + coordinates(plan, "at", reduced=False)


def coordinates(plan: RowPlan, index: str, reduced: bool) -> list[str]:
    """Generate the coordinates along the reduced axes, or along the others, from one index over them."""
    axes = [axis for axis in plan.axes if axis.reduced is reduced]
    if not axes:
        return []
    inner = axes[-1] is plan.axes[-1] and plan.vector > 1
    sizes = [(axis.name, axis.size) for axis in axes]
    if not inner:
        return split_index(index, sizes)
    name, size = sizes[-1]
    lines = split_index(index, [*sizes[:-1], (f"{name}_pack", size // plan.vector)])
    return [*lines, f"const u32 {name} = {name}_pack * {plan.vector}u;"]


def loop(plan: RowPlan, body: Sequence[str], cached: bool = False) -> list[str]:
    """Generate the loop of a thread over its elements, with their coordinates.

    cached: the loop is unrolled, because its elements stay in registers.
    """
    if not plan.count:
        return []
    lines = [*coordinates(plan, "r", reduced=True), *body]
    first, last = f"const u32 r = begin + t + turn * {plan.threads}u;", "if (r >= end) continue;"
    if cached or plan.unrolled == 1:
        head = ["#pragma unroll"] if cached else []
        return [*head, *_block(f"for (u32 turn = 0; turn < {plan.turns}u; ++turn)", [first, last, *lines])]
    # Only the last turn checks for the end, because loads of several turns are then issued together.
    whole = [
        f"const u32 full = (end - begin) / {plan.threads}u;",
        f"#pragma unroll {plan.unrolled}",
        *_block("for (u32 turn = 0; turn < full; ++turn)", [first, *lines]),
    ]
    if plan.each % plan.threads or plan.count % plan.each % plan.threads:
        whole += _block(f"for (u32 r = begin + full * {plan.threads}u + t; r < end; r = end)", lines)
    return _block("", whole)


def _block(head: str, lines: Sequence[str]) -> list[str]:
    return [f"{head} {{".strip(), *(f"  {line}" for line in lines), "}"]


@dataclass(frozen=True)
class ChunkMerge:
    """A launch that combines the results of chunks: a number of each chunk for each column, in the order of the chunks.

    given: threads for one column; 0 lets the number of chunks decide.
    """

    columns: int
    chunks: int
    given: int = 0

    @property
    def threads(self) -> int:
        """Threads for one column."""
        return self.given or max(32 // TOGETHER, min(MOST_THREADS, power_of_two(self.chunks)))

    @property
    def block(self) -> int:
        return TOGETHER * self.threads

    @property
    def blocks(self) -> int:
        return ceil_div(self.columns, TOGETHER)

    def setup(self, kind: str, numbers: int) -> list[str]:
        """Declare column `c` of thread `t`, and zero acc0, acc1 and so on."""
        zeros = ", ".join(f"acc{n}[1] = {{{kind}(0)}}" for n in range(numbers))
        return [
            f"__shared__ {kind} shared[{self.block}];",
            f"const u32 t = threadIdx.x / {TOGETHER}u, lane = threadIdx.x % {TOGETHER}u;",
            f"const u32 group = blockIdx.x * {TOGETHER}u + lane;",
            f"const bool live = group < {self.columns}u;",
            f"const u32 c = live ? group : {self.columns - 1}u;",
            f"{kind} {zeros};",
        ]

    def reduce(self, numbers: int) -> list[str]:
        """Combine the sums of the threads, so that each thread has the result."""
        each = f"reduce_threads<{self.block}, {self.threads}, {TOGETHER}, 1>"
        return [f"{each}(acc{n}, shared, Add());" for n in range(numbers)]
