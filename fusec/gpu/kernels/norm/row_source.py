"""The CUDA C of a reduction, softmax or norm: its passes over elements, and what is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Launch, ceil_div, compute_type
from fusec.gpu.kernels.codegen.loops import begun, loop
from fusec.gpu.kernels.codegen.pointwise_code import Chain, Space
from fusec.gpu.kernels.codegen.row_plan import CACHED, Plan
from fusec.gpu.kernels.norm.formulas import Formula
from fusec.ir import Node, Op, Value
from fusec.ops import Reduce

RESIDENT = 1536  # threads of a multiprocessor
WARP = 32


@dataclass
class RowSource:
    """A step with `anchor` meaning `op`; nodes and outputs before it (early) and behind it (late)."""

    anchor: Node
    op: Op
    what: Formula
    plan: Plan
    before: Sequence[Node]
    behind: Sequence[Node]
    early: Sequence[Value]
    late: Sequence[Value]
    packed: bool = False  # elements stay in registers as they were read, which takes half as many
    members: int = 1  # numbers of a plan by channels that come to one: the channels of a group

    def __post_init__(self) -> None:
        self.arguments = Arguments()
        self.x, self.y = self.anchor.operands[0], self.anchor.result
        self.kind = self.what.c_type
        names: list[str | None] = [None] * self.x.type.rank
        for axis in self.plan.axes:
            term = axis.name if axis.scale == 1 else f"{axis.name} * {axis.scale}u"
            names[axis.dim] = term if names[axis.dim] is None else f"({names[axis.dim]} + {term})"
        plan = self.plan
        self.space = Space(self.x.type.shape, tuple(names), plan.along, plan.vector)
        again = len(self.what.passes) > 1 or not isinstance(self.op, Reduce)
        self.cached = again and plan.turns * plan.vector <= CACHED

    @property
    def may_be_packed(self) -> bool:
        """Whether elements can stay as they were read: several at once, nothing done to them before, in 16 bits."""
        straight = not self.before and self.x.type.dtype in HALVES and self.space.is_pack(self.x.type)
        return self.cached and straight

    def launch(self) -> Launch:
        """All in one."""
        lines = [*self._begun(), *self._passes()]
        lines += self._reduced() if isinstance(self.op, Reduce) else self._written()
        resident = RESIDENT // self.plan.block if self.packed else 0
        return self.arguments.launch(self.anchor.op.name, lines, self.plan.blocks, self.plan.block, resident=resident)

    def partial(self) -> Launch:
        """What each chunk comes to, into scratch memory: of moments the mean, and the squares around that."""
        plan, lines = self.plan, self._partial()
        return self.arguments.launch(f"{self.anchor.op.name}_part", lines, plan.blocks * plan.chunks, self.plan.block)

    def at_once(self) -> Launch:
        """A reduction by chunks in one launch: whichever block is the last for its numbers puts them together."""
        plan, lines = self.plan, self._partial()
        door = f"{self.arguments.doors(plan.blocks)} + blockIdx.x % {plan.blocks}u * DOOR"
        lines.append(f"if (!last_of({door}, {plan.chunks}u)) return;")
        lines += ["{", *(f"  {line}" for line in (*self._merged(at_once=True), *self._reduced())), "}"]
        return self.arguments.launch(f"{self.anchor.op.name}_once", lines, plan.blocks * plan.chunks, plan.block)

    def _partial(self) -> list[str]:
        plan = self.plan
        lines = [*self._begun(), f"const u32 size = (end - begin) * {plan.vector if plan.row else 1}u;"]
        lines += self._passes("size")
        pointer = self.arguments.scratch(self.kind)
        lines.append("if (live && t == 0)")
        chunk = "chunk" if plan.chunks > 1 else "0u"
        stores = " ".join(f"{pointer}[{self._place(number, chunk)}] = acc{number}[w];" for number in self._numbers)
        lines.append(f"  for (int w = 0; w < {plan.width}; ++w) {{ {stores} }}")
        return lines

    def merged(self) -> Launch:
        """What chunks came to together, those of all channels of a group; then what is written, again by chunks if it
        is elements."""
        plan, lines = self.plan, self._merged_groups() if self.members > 1 else self._merged()
        if isinstance(self.op, Reduce):
            return self.arguments.launch(self.anchor.op.name, [*lines, *self._reduced()], plan.blocks, self.plan.block)
        lines += self._written()
        return self.arguments.launch(self.anchor.op.name, lines, plan.blocks * plan.chunks, self.plan.block)

    def _merged(self, at_once: bool = False) -> list[str]:
        plan, passes = self.plan, self.what.passes
        self.cached, self.early = False, ()
        lines = self._begun()
        pointer = self.arguments.scratch(f"const {self.kind}")
        for number in self._numbers:
            combine = passes[number].combine
            start = passes[number].start
            part = f"{pointer}[{self._place(number, 's')}]"
            if at_once:
                part = f"across({pointer} + ({self._place(number, 's')}))"
            if self.what.merge == "moments":
                mean = f"{pointer}[{self._place(0, 's')}]"
                term = f"size * {mean}" if number == 0 else f"{part} + size * square({mean} - acc0[w])"
                part = f"({self.kind})({term})"
            lines.append(f"{self.kind} acc{number}[{plan.width}];")
            lines.append(f"for (int w = 0; w < {plan.width}; ++w) acc{number}[w] = {start};")
            lines.append(f"for (u32 s = t; s < {plan.chunks}u; s += {plan.threads}u) {{")
            lines.append(f"  const {self.kind} size = {self._size};")
            lines.append(
                f"  for (int w = 0; w < {plan.width}; ++w) acc{number}[w] = {combine}()(acc{number}[w], {part});"
            )
            lines += ["}", *self._together(number), *self._ended(number, passes[number].finish)]
        return lines

    def _merged_groups(self) -> list[str]:
        """The same for the groups that the channels of a block belong to, a warp for each; then each channel's own."""
        plan, kind, passes, members = self.plan, self.kind, self.what.passes, self.members
        self.cached, self.early = False, ()
        lines, pointer = self._begun(), self.arguments.scratch(f"const {kind}")
        channels, warps, numbers = plan.lanes * plan.width, plan.block // WARP, plan.groups * plan.width
        local, total = (channels - 1) // members + 2, numbers // members
        lines.append(f"__shared__ {kind} met[{len(passes)}][{local}];")
        lines.append(f"const u32 first = blockIdx.x % {plan.blocks}u * {channels}u / {members}u;")
        for number, each in enumerate(passes):
            part, mean = (
                f"{pointer}[({n}u * {plan.chunks}u + s) * {numbers}u + of * {members}u + i % {members}u]"
                for n in (number, 0)
            )
            term = f"size * {mean}" if number == 0 else f"{part} + size * square({mean} - met[0][g])"
            reduced = f"reduce_threads<{plan.block}, {WARP}, 1, 1>(sum, ({kind}*)0, {each.combine}());"
            finished = each.finish.replace("#", "sum[0]")
            lines += [
                f"for (u32 turn = 0; turn < {ceil_div(local, warps)}u; ++turn) {{",
                f"  const u32 mine = turn * {warps}u + threadIdx.x / {WARP}u, g = mine < {local}u ? mine : 0u;",
                f"  const u32 of = first + g < {total}u ? first + g : {total - 1}u;",
                f"  {kind} sum[1] = {{{each.start}}};",
                f"  for (u32 i = threadIdx.x % {WARP}u; i < {plan.chunks * members}u; i += {WARP}u) {{",
                f"    const u32 s = i / {members}u;",
                f"    const {kind} size = {self._size};",
                f"    sum[0] = {each.combine}()(sum[0], ({kind})({term}));",
                "  }",
                f"  {reduced}",
                f"  if (threadIdx.x % {WARP}u == 0 && mine < {local}u) met[{number}][g] = {finished};",
                "}",
                "__syncthreads();",
            ]
        for number in self._numbers:
            lines.append(f"{kind} acc{number}[{plan.width}];")
            own = f"met[{number}][(at * {plan.width}u + w) / {members}u - first]"
            lines.append(f"for (int w = 0; w < {plan.width}; ++w) acc{number}[w] = {own};")
        return lines

    @property
    def _size(self) -> str:
        """How many elements went into what chunk `s` came to."""
        plan = self.plan
        rest, by = plan.count - (plan.chunks - 1) * plan.each, plan.vector if plan.row else 1
        return f"{self.kind}((s == {plan.chunks - 1}u ? {rest}u : {plan.each}u) * {by}u)"

    @property
    def _kept(self) -> str:
        """An element that a thread kept."""
        return "wide(cache[turn].v[j])" if self.packed else f"cache[turn * {self.plan.vector} + j]"

    @property
    def _numbers(self) -> range:
        return range(len(self.what.passes))

    def _place(self, number: int, chunk: str) -> str:
        """Where a chunk left what a pass came to."""
        plan = self.plan
        return f"({number}u * {plan.chunks}u + {chunk}) * {max(plan.groups, 1) * plan.width}u + at * {plan.width}u + w"

    def _begun(self) -> list[str]:
        """Which numbers a thread is about, and which elements of them."""
        return begun(self.plan, self.kind)

    def _passes(self, size: str = "") -> list[str]:
        """What the passes come to, in acc0 and on. size: how many elements there are, where that is not all; only what
        the next pass needs is then finished."""
        plan = self.plan
        lines = [f"{self.kind} cache[{plan.turns * plan.vector}];"] if self.cached else []
        if self.packed:
            lines = [f"Pack<{C_TYPES[self.x.type.dtype]}, {plan.vector}> cache[{plan.turns}];"]
        for number, each in enumerate(self.what.passes):
            acc = f"acc{number}"
            lines.append(f"{self.kind} {acc}[{plan.width}];")
            lines.append(f"for (int w = 0; w < {plan.width}; ++w) {acc}[w] = {each.start};")
            mine, term = f"{acc}[{'0' if plan.row else 'j'}]", self._filled(each.term)
            lines += self._turns(f"{mine} = {each.combine}()({mine}, ({self.kind})({term}));", first=number == 0)
            lines += self._together(number)
            finish = each.finish
            if size:
                finish = f"# / {self.kind}({size})" if number + 1 < len(self.what.passes) else ""
            lines += self._ended(number, finish)
        return lines

    def _together(self, number: int) -> list[str]:
        plan, combine = self.plan, self.what.passes[number].combine
        by = 1 if plan.row else plan.lanes
        kind = f"reduce_threads<{self.plan.block}, {plan.threads}, {by}, {plan.width}>"
        return [f"{kind}(acc{number}, shared, {combine}());"]

    def _ended(self, number: int, finish: str) -> list[str]:
        if not finish:
            return []
        acc = f"acc{number}[w]"
        return [f"for (int w = 0; w < {self.plan.width}; ++w) {acc} = {finish.replace('#', acc)};"]

    def _loop(self, body: Sequence[str]) -> list[str]:
        """The body for each turn of a thread, with the coordinates there."""
        return loop(self.plan, body, self.cached)

    def _turns(self, statement: str, first: bool) -> list[str]:
        """One pass over the elements; `e` is the one at hand."""
        if self.cached and not first:
            take = f"const {self.kind} e = {self._kept};"
            return self._loop([f"for (int j = 0; j < {self.plan.vector}; ++j) {{ {take} {statement} }}"])
        return self._loop(self._read([statement], first).lines())

    def _read(self, statements: Sequence[str], first: bool) -> Chain:
        chain = Chain(self.space, self.arguments)
        for node in self.before:
            chain.apply(node)
        if first:
            for value in self.early:  # every lane that is not live repeats what the last one does
                chain.store(value)
        element = chain.get(self.x)
        chain.inside.append(f"const {self.kind} e = {element};")
        if self.packed and first:
            chain.before.append(f"cache[turn] = {element.removeprefix('wide(').removesuffix('.v[j])')};")
        elif self.cached and first:
            chain.inside.append(f"cache[turn * {self.plan.vector} + j] = e;")
        chain.inside += statements
        return chain

    def _written(self) -> list[str]:
        """The last pass of a softmax or norm: each element again, and what becomes of it."""
        if self.cached:
            chain = Chain(self.space, self.arguments, "w")
            chain.inside.append(f"const {self.kind} e = {self._kept};")
        else:
            chain = self._read([], first=False)
        text = self._filled(self.what.result)
        for place, (letter, type) in enumerate(zip("sb", self.what.parameters, strict=False)):
            text = text.replace(f"#{letter}", chain.get(self.anchor.operands[1 + place], type))
        chain.define(self.y, text)
        return ["if (live) {", *self._loop(self._finished(chain).lines()), "}"]

    def _filled(self, text: str) -> str:
        """With what the passes gave in place of their numbers."""
        for number in range(len(self.what.passes)):
            text = text.replace(f"#{number}", f"acc{number}[{'0' if self.plan.row else 'j'}]")
        return text

    def _reduced(self) -> list[str]:
        """The numbers of a reduction, by one of the threads that share each."""
        op, plan = self.op, self.plan
        assert isinstance(op, Reduce)
        kept = [d for d in range(self.x.type.rank) if op.keepdims or d not in op.axes]
        names = tuple(None if d in op.axes else self.space.names[d] for d in kept)
        along = kept.index(plan.along) if not plan.row and plan.along in kept else -1
        chain = Chain(Space(self.y.type.shape, names, along, plan.width), self.arguments, "w")
        text = self.what.result.replace("#0", f"acc{len(self.what.passes) - 1}[j]").replace("#1", "acc0[j]")
        c_type = compute_type(self.y.type.dtype)
        chain.define(self.y, f"({c_type})({text})")
        return ["if (live && t == 0) {", *(f"  {line}" for line in self._finished(chain).lines()), "}"]

    def _finished(self, chain: Chain) -> Chain:
        for node in self.behind:
            chain.apply(node)
        for value in self.late:
            chain.store(value)
        return chain
