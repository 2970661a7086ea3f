"""Generate the loops in which threads visit the elements that a `RowPlan` gives them."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.copies_ahead import CopiesAhead
from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.kernel import by_value, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.gpu.kernels.codegen.row_plan import RowPlan
from fusec.system.dataclass import dataclass

TOGETHER = 8  # columns whose sums a block combines
MOST_THREADS = 64  # for one column
_CUDA = cuda_template(__package__, "loops.cuh")


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
        lines += _CUDA(
            "chunk_of_block",
            BLOCKS=plan.blocks,
            LANES=plan.lanes,
            NUMBER=f"{plan.chunks - 1}u - blockIdx.x / {plan.blocks}u" if backwards else f"blockIdx.x / {plan.blocks}u",
            EACH=plan.each,
            COUNT=plan.count,
        )
    lines += _CUDA("live_group", GROUPS=by_value(plan.groups), LAST_GROUP=by_value(max(plan.groups - 1, 0)))
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
    cuda = _CUDA.bind(THREADS=plan.threads, BODY=lines)
    if cached or plan.unrolled == 1:
        return cuda("each_turn", UNROLL="#pragma unroll" if cached else "", TURNS=plan.turns)
    ends_early = plan.each % plan.threads or plan.count % plan.each % plan.threads
    return cuda("each_full_turn", UNROLLED=plan.unrolled, LAST_TURN=cuda("last_turn") if ends_early else [])


def loop_with_copies(plan: RowPlan, body: Sequence[str], copies: CopiesAhead) -> list[str]:
    """Generate the loop of a thread over its elements, which are copied to shared memory ahead of their use."""
    where = coordinates(plan, "r", reduced=True)
    cuda = _CUDA.bind(THREADS=plan.threads, LAST_THREAD=plan.threads - 1, DEPTH=copies.depth, LATER=copies.depth - 1)
    copy, use = (cuda("turn_in_chunk", BODY=[*where, *each]) for each in (copies.statements, body))
    return cuda("each_copied_turn", COPY=copy, USE=use)


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
        return _CUDA(
            "merge_setup",
            KIND=kind,
            BLOCK=self.block,
            LANES=TOGETHER,
            COLUMNS=self.columns,
            LAST_COLUMN=self.columns - 1,
            ZEROS=zeros,
        )

    def reduce(self, numbers: int) -> list[str]:
        """Combine the sums of the threads, so that each thread has the result."""
        each = f"reduce_threads<{self.block}, {self.threads}, {TOGETHER}, 1>"
        return [f"{each}(acc{n}, shared, Add());" for n in range(numbers)]
