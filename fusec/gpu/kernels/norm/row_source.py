"""Generate the CUDA C of a reduction, softmax or norm: its passes over elements, and its stores."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.copies_ahead import CopiesAhead
from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Launch, ceil_div, compute_type
from fusec.gpu.kernels.codegen.loops import loop, loop_with_copies, thread_setup
from fusec.gpu.kernels.codegen.pointwise_code import BYTES, PointwiseCode, Space
from fusec.gpu.kernels.codegen.row_plan import CACHED, RowPlan
from fusec.gpu.kernels.norm.row_step import RowStep
from fusec.ops import Reduce
from fusec.system.dataclass import dataclass

WARP = 32
_CUDA = cuda_template(__package__, "row.cuh")


@dataclass
class RowSource:
    """The launches of a step.

    packed_threads: elements stay in registers as they were read, because that takes half as many registers. So many
        threads share the registers of a multiprocessor. 0 if elements stay numbers.
    members: numbers of the plan that are combined to one: the channels of a group, if the plan is by channels.
    depth: turns whose elements are copied to shared memory ahead of their use; 0 if they are loaded.
    """

    step: RowStep
    plan: RowPlan
    packed_threads: int = 0
    members: int = 1
    depth: int = 0

    def __post_init__(self) -> None:
        self.arguments = Arguments()
        self.anchor, self.op, self.formula = self.step.anchor, self.step.op, self.step.formula
        self.x, self.y, self.kind = self.step.x, self.step.y, self.formula.c_type
        self.prologue_outputs = self.step.prologue_outputs
        names: list[str | None] = [None] * self.x.type.rank
        for axis in self.plan.axes:
            term = axis.name if axis.scale == 1 else f"{axis.name} * {axis.scale}u"
            names[axis.dim] = term if names[axis.dim] is None else f"({names[axis.dim]} + {term})"
        plan = self.plan
        self.space = Space(self.x.type.shape, tuple(names), plan.along, plan.vector)
        self._cuda = _CUDA.bind(KIND=self.kind, WIDTH=plan.width, CHUNKS=plan.chunks, THREADS=plan.threads, WARP=WARP)
        self.copied_bytes = 0  # of shared memory, once the first pass is generated
        self.joint = len(self.step.reductions) > 1
        again = not self.joint and (len(self.formula.passes) > 1 or not isinstance(self.op, Reduce))
        self.cached = again and plan.turns * plan.vector <= CACHED

    @property
    def may_be_packed(self) -> bool:
        """Tell if elements can stay as they were read: packs of 16-bit elements, without a prologue."""
        straight = not self.step.prologue and self.x.type.dtype in HALVES and self.space.is_pack(self.x.type)
        return self.cached and straight

    def launch(self) -> Launch:
        """Return the launch that does everything."""
        lines = [*self._setup(), *self._passes()]
        lines += self._write_reduction() if isinstance(self.op, Reduce) else self._write()
        resident = self.packed_threads // self.plan.block
        plan, name, arguments = self.plan, self.anchor.op.name, self.arguments
        if any(value.type.dtype in BYTES for value in self.step.epilogue_outputs):
            # before a product of bytes, which copies its weights meanwhile
            lines = [*arguments.begin(), *lines]
            launch = arguments.launch(name, lines, plan.blocks, plan.block, resident=resident)
            return replace(launch, dependent=True)
        return arguments.early_launch(name, lines, plan.blocks, plan.block, resident=resident)

    def partial(self) -> Launch:
        """Return the launch that stores the result of each chunk in scratch memory.

        Of moments, that is the mean of the chunk and the squares around it.
        """
        plan, lines = self.plan, self._chunk()
        return self.arguments.early_launch(
            f"{self.anchor.op.name}_part", lines, plan.blocks * plan.chunks, self.plan.block
        )

    def one_launch(self) -> Launch:
        """Return a reduction by chunks in one launch: the last block of each number merges its chunks."""
        plan, lines = self.plan, self._chunk()
        counter = f"{self.arguments.barrier_counters(plan.blocks)} + blockIdx.x % {plan.blocks}u * COUNTER_STRIDE"
        lines.append(f"if (!last_of({counter}, {plan.chunks}u)) return;")
        lines += ["{", *self._merge_chunks(one_launch=True), *self._write_reduction(), "}"]
        name = f"{self.anchor.op.name}_once"
        launch = self.arguments.early_launch(name, lines, plan.blocks * plan.chunks, plan.block)
        return replace(launch, resident_bytes=self.copied_bytes)

    def _chunk(self) -> list[str]:
        plan = self.plan
        lines = [*self._setup(), f"const u32 size = (end - begin) * {plan.vector if plan.row else 1}u;"]
        lines += self._passes("size")
        pointer = self.arguments.scratch(self.kind)
        chunk = "chunk" if plan.chunks > 1 else "0u"
        stores = " ".join(f"{pointer}[{self._place(number, chunk)}] = acc{number}[w];" for number in self._numbers)
        return lines + self._cuda("store_chunk", STORES=stores)

    def merged(self) -> Launch:
        """Return the launch that merges chunks (of all channels of a group) and stores the results.

        Elements are stored by chunks again.
        """
        plan, lines = self.plan, self._merge_groups() if self.members > 1 else self._merge_chunks()
        if isinstance(self.op, Reduce):
            return self.arguments.early_launch(
                self.anchor.op.name, [*lines, *self._write_reduction()], plan.blocks, self.plan.block
            )
        lines += self._write()
        return self.arguments.early_launch(self.anchor.op.name, lines, plan.blocks * plan.chunks, self.plan.block)

    def _merge_chunks(self, one_launch: bool = False) -> list[str]:
        self.cached, self.prologue_outputs = False, ()
        lines = self._setup()
        pointer = self.arguments.scratch(f"const {self.kind}")
        for number, each in enumerate(self.formula.passes):
            part = f"{pointer}[{self._place(number, 's')}]"
            if one_launch:
                part = f"load_fresh({pointer} + ({self._place(number, 's')}))"
            if self.formula.merge == "moments":
                mean = f"{pointer}[{self._place(0, 's')}]"
                term = f"size * {mean}" if number == 0 else f"{part} + size * square({mean} - acc0[w])"
                part = f"({self.kind})({term})"
            merge = self._cuda.bind(ACC=f"acc{number}", COMBINE=each.combine, PART=part, SIZE=self._size)
            lines += [*merge("start_pass", START=each.start), *merge("merge_chunks")]
            lines += [*self._reduce_block(number), *self._finish(number, each.finish)]
        return lines

    def _merge_groups(self) -> list[str]:
        """Merge the chunks of the groups that a block's channels belong to, each group by one warp."""
        plan, passes, members = self.plan, self.formula.passes, self.members
        self.cached, self.prologue_outputs = False, ()
        lines, pointer = self._setup(), self.arguments.scratch(f"const {self.kind}")
        channels, numbers = plan.lanes * plan.width, plan.groups * plan.width
        local = (channels - 1) // members + 2
        cuda = self._cuda.bind(
            BLOCK=plan.block,
            GROUPS=numbers // members,
            LAST_GROUP=numbers // members - 1,
            LOCAL=local,
            MEMBERS=members,
            PARTS=plan.chunks * members,
            SIZE=self._size,
            TURNS=ceil_div(local, plan.block // WARP),
            WARPS=plan.block // WARP,
        )
        lines += cuda("find_groups", PASSES=len(passes), BLOCKS=plan.blocks, BLOCK_CHANNELS=channels)
        for number, each in enumerate(passes):
            part, mean = (
                f"{pointer}[({n}u * {plan.chunks}u + s) * {numbers}u + of * {members}u + i % {members}u]"
                for n in (number, 0)
            )
            lines += cuda(
                "merge_groups",
                NUMBER=number,
                START=each.start,
                COMBINE=each.combine,
                TERM=f"size * {mean}" if number == 0 else f"{part} + size * square({mean} - sums[0][g])",
                FINISHED=each.finish.replace("#", "sum[0]"),
            )
        return [*lines, *(line for n in self._numbers for line in cuda("take_group", ACC=f"acc{n}", NUMBER=n))]

    @property
    def _size(self) -> str:
        """The number of elements in chunk `s`."""
        plan = self.plan
        rest, by = plan.count - (plan.chunks - 1) * plan.each, plan.vector if plan.row else 1
        return f"{self.kind}((s == {plan.chunks - 1}u ? {rest}u : {plan.each}u) * {by}u)"

    @property
    def _cached_element(self) -> str:
        """The current element, from registers."""
        return "wide(cache[turn].v[j])" if self.packed_threads else f"cache[turn * {self.plan.vector} + j]"

    @property
    def _numbers(self) -> range:
        return range(len(self.formula.passes))

    def _place(self, number: int, chunk: str) -> str:
        """Return the place in scratch memory where a chunk stores the result of a pass."""
        plan = self.plan
        return f"({number}u * {plan.chunks}u + {chunk}) * {max(plan.groups, 1) * plan.width}u + at * {plan.width}u + w"

    def _setup(self) -> list[str]:
        return thread_setup(self.plan, self.kind)

    def _passes(self, size: str = "") -> list[str]:
        """Run the passes; their results are in acc0, acc1 and so on.

        size: the number of elements of a chunk, if this is one. Then only what the next pass needs is finished.
        """
        if self.joint:
            return self._joint_passes()
        plan = self.plan
        lines = [f"{self.kind} cache[{plan.turns * plan.vector}];"] if self.cached else []
        if self.packed_threads:
            lines = [f"Pack<{C_TYPES[self.x.type.dtype]}, {plan.vector}> cache[{plan.turns}];"]
        for number, each in enumerate(self.formula.passes):
            acc = f"acc{number}"
            lines += self._cuda("start_pass", ACC=acc, START=each.start)
            lines += self._pass(self._statement(number), first=number == 0)
            lines += self._reduce_block(number)
            finish = each.finish
            if size:
                finish = f"# / {self.kind}({size})" if number + 1 < len(self.formula.passes) else ""
            lines += self._finish(number, finish)
        return lines

    def _joint_passes(self) -> list[str]:
        """Run the passes of several reductions, each of which needs no other, in one visit of the elements."""
        lines: list[str] = []
        for number, each in enumerate(self.formula.passes):
            lines += self._cuda("start_pass", ACC=f"acc{number}", START=each.start)
        lines += self._pass(" ".join(map(self._statement, self._numbers)), first=True)
        return lines + [line for number in self._numbers for line in self._reduce_block(number)]

    def _statement(self, number: int) -> str:
        """Combine the term of an element with the number of a pass."""
        each, mine = self.formula.passes[number], f"acc{number}[{'0' if self.plan.row else 'j'}]"
        return f"{mine} = {each.combine}()({mine}, ({self.kind})({self._substitute(each.term)}));"

    def _reduce_block(self, number: int) -> list[str]:
        plan, combine = self.plan, self.formula.passes[number].combine
        by = 1 if plan.row else plan.lanes
        return [f"reduce_threads<{plan.block}, {plan.threads}, {by}, {plan.width}>(acc{number}, shared, {combine}());"]

    def _finish(self, number: int, finish: str) -> list[str]:
        if not finish:
            return []
        acc = f"acc{number}[w]"
        return [f"for (int w = 0; w < {self.plan.width}; ++w) {acc} = {finish.replace('#', acc)};"]

    def _loop(self, body: Sequence[str]) -> list[str]:
        """Loop over the thread's elements, with their coordinates."""
        return loop(self.plan, body, self.cached)

    def _pass(self, statement: str, first: bool) -> list[str]:
        """Visit each element once; the statement calls it `e`."""
        if self.cached and not first:
            take = f"const {self.kind} e = {self._cached_element};"
            return self._loop([f"for (int j = 0; j < {self.plan.vector}; ++j) {{ {take} {statement} }}"])
        code = self._load([statement], first)
        if code.copies is None or not code.copies.statements:
            return self._loop(code.lines())
        self.copied_bytes = code.copies.nbytes
        return loop_with_copies(self.plan, code.lines(), code.copies)

    def _load(self, statements: Sequence[str], first: bool) -> PointwiseCode:
        copies = CopiesAhead(self.depth, self.plan.block) if self.depth and first else None
        code = PointwiseCode(self.space, self.arguments, copies=copies)
        code.compute(self.step.prologue)
        if first:
            for value in self.prologue_outputs:  # lanes that are not live repeat the last one's stores
                code.store(value)
        element = code.get(self.x)
        code.body.append(f"const {self.kind} e = {element};")
        if self.packed_threads and first:
            code.head.append(f"cache[turn] = {element.removeprefix('wide(').removesuffix('.v[j])')};")
        elif self.cached and first:
            code.body.append(f"cache[turn * {self.plan.vector} + j] = e;")
        code.body += statements
        return code

    def _write(self) -> list[str]:
        """Run the last pass of a softmax or norm, which stores its results."""
        if self.cached:
            code = PointwiseCode(self.space, self.arguments, "w")
            code.body.append(f"const {self.kind} e = {self._cached_element};")
        else:
            code = self._load([], first=False)
        text = self._substitute(self.formula.result)
        for place, (letter, type) in enumerate(zip("sb", self.formula.parameters, strict=False)):
            text = text.replace(f"#{letter}", code.get(self.anchor.operands[1 + place], type))
        code.define(self.y, text)
        return ["if (live) {", *self._loop(self._apply_epilogue(code).lines()), "}"]

    def _substitute(self, text: str) -> str:
        """Replace placeholders by the results of the passes."""
        for number in range(len(self.formula.passes)):
            text = text.replace(f"#{number}", f"acc{number}[{'0' if self.plan.row else 'j'}]")
        return text

    def _write_reduction(self) -> list[str]:
        """Store the numbers of a reduction, each by one of the threads that share it."""
        op, plan = self.op, self.plan
        assert isinstance(op, Reduce)
        remaining = [d for d in range(self.x.type.rank) if op.keepdims or d not in op.axes]
        names = tuple(None if d in op.axes else self.space.names[d] for d in remaining)
        along = remaining.index(plan.along) if not plan.row and plan.along in remaining else -1
        code = PointwiseCode(Space(self.y.type.shape, names, along, plan.width), self.arguments, "w")
        for node, result in self.step.reductions:
            text = re.sub(r"#(\d)", r"acc\1[j]", result)
            code.define(node.result, f"({compute_type(node.result.type.dtype)})({text})")
        return ["if (live && t == 0) {", *self._apply_epilogue(code).lines(), "}"]

    def _apply_epilogue(self, code: PointwiseCode) -> PointwiseCode:
        code.compute(self.step.epilogue, self.step.epilogue_outputs)
        return code
