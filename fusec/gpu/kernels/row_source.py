"""The CUDA C of a reduction, softmax or norm: its passes over elements, and what is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.chain import Chain, Space
from fusec.gpu.kernels.formulas import Formula
from fusec.gpu.kernels.row_plan import CACHED, Plan
from fusec.gpu.kernels.spec import Arguments, Launch, compute_type
from fusec.gpu.kernels.walk import begun, loop
from fusec.ir import Node, Op, Value
from fusec.ops import Reduce


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
        self.cached = len(self.what.passes) > 1 and plan.turns * plan.vector <= CACHED

    def launch(self) -> Launch:
        """All in one."""
        lines = [*self._begun(), *self._passes()]
        lines += self._reduced() if isinstance(self.op, Reduce) else self._written()
        return self.arguments.launch(self.anchor.op.name, lines, self.plan.blocks, self.plan.block)

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
        plan, lines = self.plan, self._merged()
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
            part = f"{pointer}[{self._place(number, 's', 'i')}]"
            if at_once:
                part = f"across({pointer} + ({self._place(number, 's', 'i')}))"
            if self.what.merge == "moments":
                mean = f"{pointer}[{self._place(0, 's', 'i')}]"
                term = f"size * {mean}" if number == 0 else f"{part} + size * square({mean} - acc0[w])"
                part = f"({self.kind})({term})"
            lines.append(f"{self.kind} acc{number}[{plan.width}];")
            lines.append(f"for (int w = 0; w < {plan.width}; ++w) acc{number}[w] = {start};")
            lines.append(f"for (u32 i = t; i < {plan.chunks * self.members}u; i += {plan.threads}u) {{")
            lines.append(f"  const u32 s = i / {self.members}u;")
            rest = plan.count - (plan.chunks - 1) * plan.each
            size = (
                f"{self.kind}((s == {plan.chunks - 1}u ? {rest}u : {plan.each}u) * {plan.vector if plan.row else 1}u)"
            )
            lines.append(f"  const {self.kind} size = {size};")
            lines.append(
                f"  for (int w = 0; w < {plan.width}; ++w) acc{number}[w] = {combine}()(acc{number}[w], {part});"
            )
            lines += ["}", *self._together(number), *self._ended(number, passes[number].finish)]
        return lines

    @property
    def _numbers(self) -> range:
        return range(len(self.what.passes))

    def _place(self, number: int, chunk: str, member: str = "") -> str:
        """Where a chunk left what a pass came to; member: of this channel of the group, by its number there."""
        plan, own = self.plan, f"at * {self.plan.width}u + w"
        if member and self.members > 1:
            own = f"({own}) / {self.members}u * {self.members}u + {member} % {self.members}u"
        return f"({number}u * {plan.chunks}u + {chunk}) * {max(plan.groups, 1) * plan.width}u + {own}"

    def _begun(self) -> list[str]:
        """Which numbers a thread is about, and which elements of them."""
        return begun(self.plan, self.kind)

    def _passes(self, size: str = "") -> list[str]:
        """What the passes come to, in acc0 and on. size: how many elements there are, where that is not all; only what
        the next pass needs is then finished."""
        plan = self.plan
        lines = [f"{self.kind} cache[{plan.turns * plan.vector}];"] if self.cached else []
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
            take = f"const {self.kind} e = cache[turn * {self.plan.vector} + j];"
            return self._loop([f"for (int j = 0; j < {self.plan.vector}; ++j) {{ {take} {statement} }}"])
        return self._loop(self._read([statement], first).lines())

    def _read(self, statements: Sequence[str], first: bool) -> Chain:
        chain = Chain(self.space, self.arguments)
        for node in self.before:
            chain.apply(node)
        if first:
            for value in self.early:  # every lane that is not live repeats what the last one does
                chain.store(value)
        chain.inside.append(f"const {self.kind} e = {chain.get(self.x)};")
        if self.cached and first:
            chain.inside.append(f"cache[turn * {self.plan.vector} + j] = e;")
        chain.inside += statements
        return chain

    def _written(self) -> list[str]:
        """The last pass of a softmax or norm: each element again, and what becomes of it."""
        if self.cached:
            chain = Chain(self.space, self.arguments, "w")
            chain.inside.append(f"const {self.kind} e = cache[turn * {self.plan.vector} + j];")
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
