"""Plan how a block runs the body of a scan: which values it stores in shared memory, and between which barriers.

Views, and results that one node reads, are computed where they are read. All others are stored. A step is a few phases
with a barrier after each; in one phase all threads compute elements of values that do not depend on each other.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache

from fusec.ir import Constant, Node, Value
from fusec.lowering.scan_phases import MOVES, phases_of
from fusec.lowering.scan_rows import RowDims, row_dims
from fusec.ops import Cast, Concat, MatMul, Pad, Pointwise, Reduce, Scan
from fusec.system.dataclass import dataclass

SHARED_BYTES = 1 << 15  # of states and stored values; every GPU has half as much again, which sequences use
MOST_THREADS = 1024
MOST_BLOCKS = 256  # of more rows than this, a block has several
WARP = 32
FEW_THREADS = 256  # of elements whose addends a whole warp shares, wherever they are in memory
STRIDED_LANES = 4  # threads that share an element whose addends are apart: so each load of a warp has whole sectors
LEAST_ADDENDS = 4  # of a thread, or fewer threads share an element
MOST_OPERANDS = 4  # of a concat, each of which is read and then selected
# Elements that a thread computes between two barriers, on average. More is left to launches of many blocks. An addend
# counts as a part of an element, so that the limit is between the loops that an H200 ran faster as one launch (sums of
# 128 addends) and as many (of 256): docs/results.md, "Loops as one op and as the nodes of their steps".
MOST_WORK = 10
ADDENDS = 3  # as much work as an element


@dataclass(frozen=True, eq=False)
class ScanPlan:
    """Describe how a block runs a body.

    rows: the dim of values along which blocks share their rows. Each block has all of other values.
    phases: the values that are computed between two barriers, in order. Outputs of the body are among them.
    """

    op: Scan
    rows: RowDims
    phases: tuple[tuple[Value, ...], ...]

    @property
    def all_rows(self) -> int:
        """Return the number of independent rows."""
        return next((v.type.shape[dim] for v, dim in self.rows.items()), 1)

    @cached_property
    def blocks(self) -> int:
        """Return the number of blocks: one for each row, unless there are very many."""
        return max(n for n in range(1, MOST_BLOCKS + 1) if self.all_rows % n == 0)

    @property
    def block_rows(self) -> int:
        """Return the rows of a block."""
        return self.all_rows // self.blocks

    @cached_property
    def next_states(self) -> dict[Value, list[int]]:
        """Return the numbers of the states that a value becomes."""
        found: dict[Value, list[int]] = {}
        for index, value in enumerate(self.op.body.graph.outputs[: self.op.states]):
            found.setdefault(value, []).append(index)
        return found

    @property
    def stored(self) -> list[Value]:
        """Return the values that have memory of their own, because other nodes read them."""
        computed = (v for phase in self.phases for v in phase if v.node is not None and v.literal is None)
        return [v for v in computed if v not in self.next_states and any(node.results for node in v.users)]

    @property
    def threads(self) -> int:
        """Return the threads of a block: one for each element of the largest phase."""
        largest = max((sum(self.size(v) * self.lanes(v) for v in phase) for phase in self.phases), default=1)
        return min(MOST_THREADS, -(-largest // WARP) * WARP)

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of states, before and after a step, and of stored values."""
        states = self.op.body.graph.inputs[: self.op.states]
        return sum(2 * self.nbytes(v) for v in states) + sum(map(self.nbytes, self.stored))

    @property
    def work(self) -> float:
        """Return how many elements a thread computes in a step."""
        return sum(self._work_of(value) for phase in self.phases for value in phase)

    def shape(self, value: Value) -> tuple[int, ...]:
        """Return the shape of the part of a value that a block has."""
        dim = self.rows.get(value, -1)
        return tuple(self.block_rows if d == dim else size for d, size in enumerate(value.type.shape))

    def size(self, value: Value) -> int:
        return math.prod(self.shape(value))

    def nbytes(self, value: Value) -> int:
        """Return the bytes of a block's part of a value, a multiple of 16."""
        return -(-self.size(value) * value.type.dtype.itemsize // 16) * 16

    def depth(self, value: Value) -> int:
        """Return how many elements are added up, or compared, for one of a value."""
        node = value.node
        if node is not None and isinstance(node.op, MatMul):
            return node.operands[0].type.shape[-1]
        if node is not None and isinstance(node.op, Reduce):
            return self.size(node.operands[0]) // max(self.size(value), 1)
        return 1

    def lanes(self, value: Value) -> int:
        """Return how many threads of a warp, side by side, share the addends of an element: a power of two.

        As many as a warp has if the addends are side by side in memory, or if there are few elements.
        """
        size, depth, node = self.size(value), self.depth(value), value.node
        innermost = node is not None and isinstance(node.op, Reduce) and _is_innermost(node.op, node.operands[0])
        if innermost and depth >= WARP:
            return WARP
        lanes = WARP if innermost or size * WARP <= FEW_THREADS else STRIDED_LANES
        while lanes > 1 and (size * lanes > MOST_THREADS or depth < lanes * LEAST_ADDENDS):
            lanes //= 2
        return lanes

    def _work_of(self, value: Value) -> float:
        turns = math.ceil(self.size(value) * self.lanes(value) / self.threads)
        return turns * (1 + math.ceil(self.depth(value) / self.lanes(value)) / ADDENDS)


def scan_plan(op: Scan) -> ScanPlan | None:
    """Return how a block runs the body of a scan; None if it does not, or would take longer than other launches."""
    plan = _planned(op)
    return plan if isinstance(plan, ScanPlan) else None


def why_not(op: Scan) -> str:
    """Return the reason why no block runs the body of a scan; empty if one does."""
    plan = _planned(op)
    return plan if isinstance(plan, str) else ""


@lru_cache(maxsize=256)
def _planned(op: Scan) -> ScanPlan | str:
    """Return the plan of a scan, or the reason why it has none."""
    graph = op.body.graph
    refused = dict.fromkeys(node.op.name for node in graph.nodes if not _can_run(node))
    if refused:
        return f"its body has {', '.join(refused)}"
    if any(v.type.dtype.is_narrow for v in graph.values()):
        return "its body has 4-bit integers or 8-bit floats"
    if any(v.type.size == 0 for v in graph.values()) or not graph.outputs:
        return "its body has values without elements"
    plan = ScanPlan(op, row_dims(op), phases_of(op))
    if plan.shared_bytes > SHARED_BYTES:
        return f"a step has {plan.shared_bytes} bytes of states and results, more than {SHARED_BYTES}"
    if plan.work > MOST_WORK * len(plan.phases):
        products = any(isinstance(node.op, MatMul) for node in graph.nodes)
        return "its products are large" if products else "a step computes too much for one block"
    return plan


def _is_innermost(op: Reduce, x: Value) -> bool:
    """Tell if a reduction takes in elements that are side by side in memory."""
    axes = {axis % x.type.rank for axis in op.axes}
    return bool(axes) and all(size == 1 for size in x.type.shape[max(axes) + 1 :])


def _can_run(node: Node) -> bool:
    op = node.op
    if isinstance(op, Constant):
        return op.literal.type.size == 1
    if isinstance(op, Pad):
        return op.mode == "constant"
    if isinstance(op, Concat):
        return len(node.operands) <= MOST_OPERANDS
    if isinstance(op, Reduce):
        return node.result.type.dtype.is_float or op.kind in ("sum", "max", "min", "prod")
    if isinstance(op, MatMul):
        return node.result.type.dtype.is_float
    return isinstance(op, (Pointwise, Cast, *MOVES))
