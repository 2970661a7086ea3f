"""Generate the part of a scan that fills shared memory: states, rows of sequences, and values that all steps read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments
from fusec.gpu.kernels.recurrent.scan_code import BodyCode, Memory
from fusec.gpu.kernels.recurrent.scan_views import At
from fusec.ir import Value
from fusec.lowering.scan_plan import SHARED_BYTES, ScanPlan
from fusec.system.dataclass import dataclass

COPIED_BYTES = 1 << 13  # of the rows of a sequence that are copied together, and of a value that all steps read
ROOM = (3 << 14) - SHARED_BYTES  # for these copies: what every GPU has of shared memory, without states and results


@dataclass
class BlockMemory:
    """The shared memory of a block, and the statements that fill it.

    operands: the scan's operands.
    used: bytes that have an owner.
    room: bytes that copies may use.
    before: statements before the first step; in_step: those at the beginning of each.
    """

    plan: ScanPlan
    operands: Sequence[Value]
    arguments: Arguments
    used: int = 0
    room: int = ROOM
    before: list[str] = field(default_factory=list[str])
    in_step: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        if self.plan.rows:
            self.before.append(f"const u32 first_row = blockIdx.x * {self.plan.block_rows}u;")

    def place(self, name: str, value: Value, copies: int = 1) -> Memory:
        """Reserve shared memory for a block's part of a value, and define a pointer to it."""
        c_type, strides, stride = C_TYPES[value.type.dtype], list[int](), 1
        self.before.append(f"{c_type}* const {name} = ({c_type}*)(memory + {self.used}u);")
        self.used += -(-copies * self.plan.size(value) * value.type.dtype.itemsize // 16) * 16
        for size in reversed(self.plan.shape(value)):
            strides.append(stride if size > 1 else 0)
            stride *= size
        return Memory(name, tuple(reversed(strides)), self.plan.rows.get(value, -1))

    def state(self, index: int, value: Value) -> Memory:
        """Reserve two places of a state, and fill the first. Pointers to both change with each step."""
        places = self.place(f"places{index}", value, 2)
        self.copy(self.before, value, places, self._given(index))
        c_type, size = C_TYPES[value.type.dtype], self.plan.size(value)
        self.in_step.append(f"const {c_type}* const state{index} = places{index} + step % 2u * {size}u;")
        self.in_step.append(f"{c_type}* const next{index} = places{index} + (step + 1u) % 2u * {size}u;")
        return replace(places, pointer=f"state{index}")

    def sequence(self, index: int, value: Value) -> Memory:
        """Return where the row of a sequence is: copied with those of the next steps, if they are small."""
        given, c_type, size = self._given(index), C_TYPES[value.type.dtype], self.plan.size(value)
        row_bytes = size * value.type.dtype.itemsize
        rows = min(self.plan.op.steps, min(COPIED_BYTES, self.room) // row_bytes)
        if rows < 2:
            along, *strides = given.strides
            self.in_step.append(f"const {c_type}* const row{index} = {given.pointer} + (u64)step * {along}u;")
            return Memory(f"row{index}", tuple(strides))
        self.room -= rows * row_bytes
        places = self.place(f"rows{index}", value, rows)
        self.in_step.append(f"if (step % {rows}u == 0u) {{")
        self._copy_rows(value, rows, places, given)
        self.in_step.extend(["__syncthreads();", "}"])
        self.in_step.append(f"const {c_type}* const held{index} = rows{index} + step % {rows}u * {size}u;")
        return replace(places, pointer=f"held{index}")

    def shared(self, index: int, value: Value) -> Memory:
        """Return where a value is that all steps read: copied, if it is small."""
        nbytes = self.plan.nbytes(value)
        if nbytes > min(COPIED_BYTES, self.room) or self.plan.op.steps == 1:
            return self._given(index)
        self.room -= nbytes
        place = self.place(f"shared{index}", value)
        self.copy(self.before, value, place, self._given(index))
        return place

    def at(self, code: BodyCode, value: Value, index: str) -> At:
        """Return the coordinates of element `index` of a block's part of a value."""
        at, dim = code.coordinates(index, self.plan.shape(value)), self.plan.rows.get(value)
        if dim is None:
            return at
        row = "first_row" if self.plan.block_rows == 1 else code.number(f"first_row + {at[dim]}")
        return (*at[:dim], row, *at[dim + 1 :])

    def copy(self, lines: list[str], value: Value, to: Memory, source: Memory) -> None:
        """Add the statements that copy a block's part of a value."""
        code = BodyCode({}, lines)
        with code.block(f"for (u32 i = threadIdx.x; i < {self.plan.size(value)}u; i += {self.plan.threads}u)"):
            at = self.at(code, value, "i")
            lines.append(f"{to.element(at)} = {source.element(at)};")

    def _given(self, index: int) -> Memory:
        """Return where an operand of the scan is."""
        operand = self.operands[index]
        return Memory(self.arguments.read(operand), operand.type.strides)

    def _copy_rows(self, value: Value, rows: int, to: Memory, source: Memory) -> None:
        """Add the statements that copy the rows of a sequence for the next steps."""
        code, size, left = BodyCode({}, self.in_step), self.plan.size(value), f"{self.plan.op.steps}u - step"
        count = code.number(f"({left} < {rows}u ? {left} : {rows}u) * {size}u")
        with code.block(f"for (u32 i = threadIdx.x; i < {count}; i += {self.plan.threads}u)"):
            row, own = ("i", "0u") if size == 1 else map(code.number, (f"i / {size}u", f"i % {size}u"))
            at = self.at(code, value, own)
            first = code.number(f"(u64)(step + {row}) * {source.strides[0]}u", "u64")
            held = replace(to, pointer=f"({to.pointer} + {row} * {size}u)")
            given = Memory(f"({source.pointer} + {first})", source.strides[1:])
            self.in_step.append(f"{held.element(at)} = {given.element(at)};")
