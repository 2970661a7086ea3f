"""Generate batch norm in one launch whose elements come to shared memory by asynchronous copies.

A compiler places loads next to their first use, so few of them are under way at the same time. Asynchronous copies need
no registers, and several turns of them are always under way. Both passes of the norm visit the elements in this way.
The first turns stay in shared memory from one pass to the next. The others share a ring of slots, and are copied again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from fusec.gpu.kernels.codegen.copies_ahead import ASYNCHRONOUS, COPIED_BYTES
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.dilated import dilated_names, dilates
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, ceil_div
from fusec.gpu.kernels.codegen.loops import coordinates
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space
from fusec.gpu.kernels.norm.batch_norm.batch_norm_resident import BatchNormResident
from fusec.gpu.kernels.norm.batch_norm.batch_norm_source import space_of
from fusec.ir import Node, Value
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

BYTES_AHEAD = 64 << 10  # of a block, under way at the same time
MOST_AHEAD = 8  # turns
WORD_BYTES = 4  # the least that an asynchronous copy moves
_CUDA = cuda_template(__package__, "batch_norm_streamed.cuh")


@dataclass(frozen=True)
class BatchNormStreamed(BatchNormResident):
    """One launch for a step, with asynchronous copies."""

    form: ClassVar[str] = "streamed"

    @property
    def exists(self) -> bool:
        """Tell if the GPU has asynchronous copies, and they can bring all elements to shared memory."""
        given = [v for v in self._moved if v.node not in self.step.prologue]
        made = [v for v in self._moved if v not in given]
        if self.figures.sm < ASYNCHRONOUS or not set(given) <= set(self._first) or self.resident < 0:
            return False
        has_memory = all(self._memory_of(v) is not None and self._is_copied(v) for v in made)
        return self.resident == self.turns or has_memory

    def _memory_of(self, element: Value) -> Value | None:
        """Return the value in whose memory a computed element is between the passes; None if there is none.

        If the step does not store the gradient of two norms, it is there where the first norm's result will be. The
        thread that writes an element of the result has read its gradient before.
        """
        if element in self.step.prologue_outputs:
            return element
        is_common = self.step.second is not None and element is self.step.anchor.operands[0]
        has_place = self.step.y in self.step.epilogue_outputs and self.step.y.type == element.type
        return self.step.y if is_common and has_place else None

    @property
    def resident(self) -> int:
        """Turns that stay in shared memory; negative if there is too little."""
        return self.turns if self._slots == self.turns else self._slots - self.depth

    @property
    def resident_bytes(self) -> int:
        return self._slots * self._turn_bytes + self._staged_bytes

    @cached_property
    def depth(self) -> int:
        """Turns whose copies are under way at the same time."""
        return min(self.turns, MOST_AHEAD, max(2, ceil_div(BYTES_AHEAD, max(1, self._bytes_of(self._first)))))

    @property
    def _slots(self) -> int:
        room = self.figures.dynamic_bytes - self.sum_bytes - self._staged_bytes
        return max(0, min(self.turns, room // self._turn_bytes))

    @property
    def _staged_bytes(self) -> int:
        """Shared memory for operands that are no elements of the norm."""
        return self.depth * max(self._bytes_of(self._staged(values)) for values in (self._first, self._second))

    def _bytes_of(self, values: Sequence[Value]) -> int:
        """Bytes of a turn of a block."""
        return sum(self._pack_bytes(v) for v in values) * self.sums.block

    def _pack_bytes(self, value: Value) -> int:
        return WORD_BYTES if self._shares_word(value) else self.sums.vector * value.type.dtype.itemsize

    def _shares_word(self, value: Value) -> bool:
        """Tell if two threads have their elements in one word, which each of them copies."""
        pair = 2 * self.sums.vector
        whole = all(number % pair == 0 for number in (value.type.size, *value.type.strides) if number != 1)
        bits = value.type.dtype.bits
        return whole and bits < 8 and pair * bits == 8 * WORD_BYTES

    @property
    def _space(self) -> Space:
        return space_of(self.step.x.type, self.sums)

    @property
    def _moved(self) -> tuple[Value, ...]:
        return tuple(dict.fromkeys(self.step.elements))

    @cached_property
    def _dilated(self) -> Mapping[Value, Node]:
        return dilates([*self.step.prologue, *self.step.epilogue]) or {}

    def _is_copied(self, value: Value) -> bool:
        sizes = COPIED_BYTES if value not in self._dilated else COPIED_BYTES[-1:]  # of copies of zeros
        whole = value.type.dtype.bits >= 8 and self._pack_bytes(value) in sizes
        is_number = value in self.step.numbers
        return (whole or self._shares_word(value)) and not is_number and self._space.is_pack(value.type)

    def _inputs(self, nodes: Sequence[Node]) -> tuple[Value, ...]:
        return tuple(v for v in inputs_of(nodes) if self._is_copied(v))

    @cached_property
    def _first(self) -> tuple[Value, ...]:
        """The values that are copied for the first pass."""
        return self._inputs([*self.step.prologue, *self.step.anchors])

    @cached_property
    def _second(self) -> tuple[Value, ...]:
        """The values other than elements that are copied for the second pass."""
        step = self.step
        late = self._inputs([*step.prologue_without(step.elements), *step.epilogue])
        return tuple(v for v in late if v not in self._moved and v.node not in step.anchors)

    def _staged(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """Return the values that are copied to memory of their own."""
        in_place = self._replaced if values is self._first else {}
        return tuple(v for v in values if v not in self._moved and v not in in_place)

    @cached_property
    def _replaced(self) -> Mapping[Value, Value]:
        """The elements that are computed from copied values, and take the place of one of them, by that value."""
        found: dict[Value, Value] = {}
        for element in self._moved:
            if element.node in self.step.prologue:
                free = (v for v in self._first if v not in self._moved and v not in found)
                same = [v for v in free if self._pack_bytes(v) == self._pack_bytes(element)]
                found |= dict.fromkeys(same[:1], element)
        return found

    @cached_property
    def _streamed_cuda(self) -> CudaTemplate:
        return _CUDA.bind(
            DEPTH=self.depth,
            LATER=self.depth - 1,
            TURNS=self.turns,
            LAST_TURN=self.turns - 1,
            STRIDE=self._stride,
            COUNT=self.sums.count,
            COORDINATES=coordinates(self.sums, "r", reduced=True),
        )

    def _turn(self, turn: str, body: Sequence[str]) -> list[str]:
        """Run statements for a turn, if the thread has it. turn: its number, as C, counted from the last row on."""
        stay, depth = self.resident, self.depth
        slot = "turn" if stay == self.turns else f"turn < {stay}u ? turn : {stay}u + (turn - {stay}u) % {depth}u"
        return self._streamed_cuda("turn", TURN=turn, SLOT=slot, BODY=body)

    def _second_turn(self, step: str) -> str:
        """Return the turn of a step of the second pass.

        What is copied again comes first, the most recent turn before others: results would push it out of the cache.
        """
        again = self.turns - self.resident
        return f"{step} < {again}u ? {self.turns - 1}u - {step} : {step} - {again}u" if again else step

    def _slot_of(self, element: Value, stored: Value | None = None) -> str:
        """Return the place of an element of turn `slot`. stored: the value that is there, if it is another."""
        number = self._moved.index(element)
        start = sum(self._slots * self._bytes_of([v]) for v in self._moved[:number])
        return self.shared_pack(start, "slot", stored or element)

    def _stage_of(self, value: Value, values: Sequence[Value], step: str) -> str:
        """Return the place of another operand for a step."""
        staged = self._staged(values)
        start = self._slots * self._turn_bytes
        start += sum(self.depth * self._bytes_of([v]) for v in staged[: staged.index(value)])
        slot = f"{step} % {self.depth}u"
        if self._shares_word(value):
            return self.shared_place(start, slot, "u32")
        return self.shared_pack(start, slot, value)

    def _copy(self, place: str, pointer: str, value: Value) -> str:
        at = self._space.offset(value.type)
        if self._shares_word(value):
            source = f"(const u8*){pointer} + ({at}) / {2 * self.sums.vector}u * {WORD_BYTES}u"
            return f"copy_ahead<{WORD_BYTES}>(&{place}, {source});"
        if value in self._dilated:
            names, there = dilated_names(self._dilated[value], self._space.names)
            at = replace(self._space, names=names).offset(value.type)
            return f"copy_or_zeros_ahead(&{place}, {pointer} + ({at}), {there});"
        return f"copy_ahead<{self._pack_bytes(value)}>(&{place}, {pointer} + ({at}));"

    def _take(self, code: PointwiseCode, value: Value, name: str, place: str) -> None:
        """Read a thread's elements of a copied value."""
        if self._shares_word(value):
            number = f"({self._space.offset(value.type)}) / {self.sums.vector}u % 2u"
            parts = f"PackedParts<{C_TYPES[value.type.dtype]}, {self.sums.vector}>"
            code.head.append(f"const {parts} {name} = {{{place} >> {number} * 16u}};")
            code.known[value] = f"wide({name}.get(j))"
        else:
            code.head.append(f"const {self._pack(value)} {name} = {place};")
            code.known[value] = f"wide({name}.v[j])"

    def sum_elements(self, arguments: Arguments) -> list[str]:
        copies: list[str] = []
        code = PointwiseCode(self._space, arguments)
        for number, value in enumerate(self._first):
            element = value if value in self._moved else self._replaced.get(value)
            places = [
                self._stage_of(value, self._first, step) if element is None else self._slot_of(element, value)
                for step in ("ahead", "step")
            ]
            copies.append(self._copy(places[0], arguments.read(value), value))
            self._take(code, value, f"given{number}", places[1])
        self.accumulate(code)
        for number, value in enumerate(v for v in self._moved if v not in self._first):
            code.head.append(f"{self._pack(value)} made{number};")
            code.body.append(f"made{number}.v[j] = {code.as_stored(value)};")
            code.tail.append(f"{self._slot_of(value)} = made{number};")
            memory = self._memory_of(value)
            if self.resident < self.turns and memory is not None and memory is not value:
                pack = f"{C_TYPES[value.type.dtype]}, {self.sums.vector}"
                place = f"{arguments.write(memory)} + ({self._space.offset(memory.type)})"
                is_read_again = f"turn >= {self.resident}u && turn < {self.turns - self.depth}u"
                code.tail.append(f"if ({is_read_again}) store_pack<{pack}>({place}, made{number});")
        copy = self._turn("ahead", copies)
        stream = self._streamed_cuda("stream", BODY=self._turn("step", code.lines()), COPY=copy)
        return [*self.place(), *self._streamed_cuda("begin", COPY=copy), *self.begin_sums(arguments), *stream]

    def load_early(self, arguments: Arguments) -> list[str]:
        """Load the parameters, and begin to copy what the second pass reads besides elements."""
        lines = super().load_early(arguments)
        if not self._second or not self._writes:
            return lines
        return [*lines, *self._streamed_cuda("begin", COPY=self._second_copy(arguments))]

    @property
    def _writes(self) -> bool:
        return bool(self.step.epilogue_outputs or self.step.epilogue)

    def _second_copy(self, arguments: Arguments, again: Sequence[str] = ()) -> list[str]:
        """Copy the operands of step `ahead` of the second pass. again: statements that copy elements, too."""
        staged = [
            self._copy(self._stage_of(value, self._second, "ahead"), arguments.read(value), value)
            for value in self._second
        ]
        return self._turn(self._second_turn("ahead"), [*staged, *again])

    def write_elements(self, arguments: Arguments) -> list[str]:
        """Generate the second pass."""
        if not self._writes:
            return []
        code = PointwiseCode(self._space, arguments, "w")
        again: list[str] = []
        for number, value in enumerate(self._moved):
            memory = self._memory_of(value) if value.node in self.step.prologue else None
            if self.resident < self.turns:
                pointer = arguments.read(value) if memory is None else arguments.write(memory)
                again.append(self._copy(self._slot_of(value), pointer, value))
            code.head.append(f"const {self._pack(value)} element{number} = {self._slot_of(value)};")
            code.known[value] = f"wide(element{number}.v[j])"
        for number, value in enumerate(self._second):
            self._take(code, value, f"other{number}", self._stage_of(value, self._second, "step"))
        code.compute(self.step.prologue_without(self.step.elements))
        self.normalise(code, "j")
        code.compute(self.step.epilogue, self.step.epilogue_outputs)
        if again:  # slots of turns that stay are not filled again
            end = self.turns - self.resident
            again = [f"if (ahead >= {self.depth}u && ahead < {end}u) {{", *again, "}"]
        stream = self._streamed_cuda(
            "stream",
            BODY=self._turn(self._second_turn("step"), code.lines()),
            COPY=self._second_copy(arguments, again) if again or self._second else [],
        )
        if again and not self._second:  # the first copies belong to no turn
            stream = [*self._streamed_cuda("begin", COPY=[]), *stream]
        return [*self.load_factors(), "if (live) {", *stream, "}"]
