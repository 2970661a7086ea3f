"""Plan how blocks, warps and threads share the units and sequences of a recurrent layer, and estimate its time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from fusec.gpu.kernels.codegen.kernel import HALVES, ceil_div
from fusec.ir import DType, Node, Value
from fusec.ops import Recurrent
from fusec.system.dataclass import dataclass

WARPS = 8
HELD_REGISTERS = 96  # of a thread, for weights
LOADED_WORDS = 12  # of 16 bytes, that a thread loads at the same time
MAX_TILES = 16  # of 16 rows, of a block of tensor cores: one more is four more sums of a thread
MAX_DEPTH = 32  # steps of 16 of a warp: each is a word of 16 bytes that a thread asks for
MAX_ROW_SUMS = 64  # of a thread, for 32-bit floats
TRIP_CYCLES = 900  # of a state through the second-level cache to another block, estimated


@dataclass(frozen=True)
class RecurrentPlan:
    """Sizes of launches whose blocks have `units` units of 8 * `columns` sequences.

    processors: the most blocks of a launch, because all must be on the GPU at the same time.
    most_shared_bytes: largest shared memory of a block.
    """

    node: Node
    outputs: Sequence[Value]
    units: int
    columns: int
    processors: int
    most_shared_bytes: int

    @property
    def op(self) -> Recurrent:
        assert isinstance(self.node.op, Recurrent)
        return self.node.op

    @property
    def dtype(self) -> DType:
        return self.node.operands[0].type.dtype

    @property
    def on_tensor_cores(self) -> bool:
        return self.dtype in HALVES

    @property
    def size(self) -> int:
        return self.node.operands[1].type.shape[2]

    @property
    def batch(self) -> int:
        """Return the sequences of a block."""
        return 8 * self.columns

    @property
    def groups(self) -> int:
        """Return the groups of sequences of one launch. A large batch needs several, one after the other."""
        room = self.processors // (self.op.directions * self.blocks)
        return max(1, min(room, ceil_div(self.sequences, self.batch)))

    @property
    def rounds(self) -> int:
        return ceil_div(self.sequences, self.batch * self.groups)

    @property
    def sequences(self) -> int:
        return self.node.operands[0].type.shape[1]

    @property
    def blocks(self) -> int:
        """Return the blocks that share the units of a direction."""
        return ceil_div(self.size, self.units)

    @property
    def grid(self) -> int:
        return self.op.directions * self.groups * self.blocks

    @property
    def slots(self) -> int:
        """Return the rows of a unit: four also for three gates, so that a thread reads them at the same time."""
        return 1 if self.op.gates == 1 else 4

    @property
    def tiles(self) -> int:
        """Return how often a warp computes its rows: 16 on tensor cores, otherwise 32."""
        return ceil_div(self.units * self.slots, 16 if self.on_tensor_cores else 32)

    @property
    def stride(self) -> int:
        """Return the numbers from one sequence to the next in shared memory, so that no two lanes share a bank."""
        return self.tiles * (16 if self.on_tensor_cores else 32) + 4

    @property
    def depths(self) -> int:
        """Return the steps of a product: of 16 on tensor cores, otherwise of one."""
        return ceil_div(self.size, 16) if self.on_tensor_cores else self.size

    @property
    def warps(self) -> int:
        return min(WARPS, self.depths)

    @property
    def depth(self) -> int:
        """Return the steps of a product that one warp makes."""
        return ceil_div(self.depths, self.warps)

    @property
    def items(self) -> int:
        """Return the states that a thread finishes."""
        return ceil_div(self.units * self.batch, 32 * self.warps)

    @property
    def is_held(self) -> bool:
        """Tell if weights stay in registers; otherwise each step reads them from the cache."""
        return self.tiles * self.depth * (4 if self.on_tensor_cores else 1) <= HELD_REGISTERS

    @property
    def halves(self) -> int:
        """Return the products of a step, one after the other: two if a GRU multiplies states that were reset."""
        return 2 if self.op.cell == "gru" and not self.op.linear_before_reset else 1

    @property
    def streamed(self) -> int:
        """Return how often a loop over weights is unrolled that reads them from the cache, for short compilation."""
        return 1 if self.on_tensor_cores else 4

    @property
    def part_words(self) -> int:
        return self.warps * self.batch * self.stride

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a block: sums of two steps, and the states that warps read in fp32."""
        return 4 * (2 * self.part_words + (0 if self.on_tensor_cores else self.warps * self.depth * self.batch))

    @property
    def sent_words(self) -> int:
        """Return the words that blocks send to the blocks of a group in one step."""
        if self.on_tensor_cores:
            return self.columns * self.depths * 64
        return self.warps * self.depth * self.batch

    @property
    def scratch_bytes(self) -> int:
        return 8 * 2 * self.sent_words * self.op.directions * self.groups

    @property
    def is_possible(self) -> bool:
        fits = self.shared_bytes <= self.most_shared_bytes and self.items <= 8 and self.grid <= self.processors
        if self.on_tensor_cores:
            return fits and self.tiles <= MAX_TILES and self.depth <= MAX_DEPTH
        return fits and self.tiles * self.batch <= MAX_ROW_SUMS

    @cached_property
    def cycles(self) -> float:
        """Estimate the cycles of a step of all launches: a trip, words, products, weights, and sums over warps."""
        rows, sequences = self.units * self.slots, self.batch
        words = self.sent_words * 8 / 64
        if self.on_tensor_cores:
            products = 1.6 * self.tiles * self.depths * self.columns
        else:
            products = self.tiles * 32 * self.size * sequences / 128
        weights = 0.0 if self.is_held else rows * self.size * self.dtype.itemsize / 40
        sums = self.part_words / 16 + 40 * self.items
        return self.rounds * self.halves * (TRIP_CYCLES + words + products + weights + sums)
