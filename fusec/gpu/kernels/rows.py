"""Reductions, softmax and norms: some threads of a block share the elements that go into one number, whatever dims and
memory order they come from; pointwise ops before and behind are done on the way.

Where the innermost dim is reduced ("row"), neighbours are added up within a thread; else ("column") each of them has
a number of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.chain import Chain, Space, decoded, step, stored, takes, widest
from fusec.gpu.kernels.formulas import Formula, formula
from fusec.gpu.kernels.spec import BLOCK, C_TYPES, Arguments, Kernel, Launch, ceil_div, compute_type, power_of_two
from fusec.ir import Node, TensorType, Value
from fusec.ops import GroupNorm, InstanceNorm, LayerNorm, Reduce, RmsNorm, Softmax
from fusec.program import inputs_of

ANCHORS = (Reduce, Softmax, LayerNorm, RmsNorm, InstanceNorm, GroupNorm)
CACHED = 32  # elements a thread keeps in registers, rather than to read them once for each pass
COALESCED_BYTES = 64  # that threads side by side read in one go, at least
ENOUGH_THREADS = 1 << 17  # to fill the largest GPU


@dataclass(frozen=True)
class Axis:
    """One loop: coordinate `name` of a logical dim, of which one step is `scale` elements."""

    name: str
    dim: int
    size: int
    reduced: bool
    scale: int = 1


@dataclass(frozen=True)
class Plan:
    """How the elements of x are shared out: `threads` for one number (or vector of them), `lanes` of those a block."""

    axes: tuple[Axis, ...]  # in memory order
    row: bool
    vector: int
    threads: int
    lanes: int
    count: int  # of what the threads of one number go through, in vectors
    groups: int  # of numbers, in vectors

    @property
    def along(self) -> int:
        return self.axes[-1].dim if self.axes else -1

    @property
    def turns(self) -> int:
        return ceil_div(self.count, self.threads)

    @property
    def width(self) -> int:
        """Numbers a thread reduces to."""
        return 1 if self.row else self.vector


def rows(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel for a reduction, softmax or norm with pointwise ops around it; None if the step is no such thing."""
    anchors = [node for node in nodes if isinstance(node.op, ANCHORS)]
    if len(anchors) != 1 or not all(takes(node) for node in nodes if node is not anchors[0]):
        return None
    (anchor,) = anchors
    x, y = anchor.operands[0], anchor.result
    before, behind = _split(nodes, anchor)
    what = formula(anchor)
    made = {v for node in nodes for v in node.results}
    if what is None or x.type.dtype not in C_TYPES or any(v in made for v in anchor.operands[1:]):
        return None
    early = [v for v in outputs if v.node in before]
    late = [v for v in outputs if v not in early]
    if any(v.type.shape != x.type.shape for v in early) or any(v.type.shape != y.type.shape for v in late):
        return None
    name = "+".join(node.op.name for node in nodes)
    if any(v.node in before for node in behind for v in node.operands):
        return None
    if y.type.size == 0:
        return Kernel(name, ())
    if x.type.size >= 1 << 31:
        return None
    read = [
        v.type for v in (*inputs_of([*before, anchor]), *early) if v.type.size != 1 and v not in anchor.operands[1:]
    ]
    written = [] if isinstance(anchor.op, Reduce) else [v.type for v in (*inputs_of(behind), *late) if v is not y]
    plan = _plan(anchor, [*read, *(t for t in written if t.size != 1)])
    source = _Source(anchor, what, plan, before, behind, early, late)
    return Kernel(name, (source.launch(),))


def _split(nodes: Sequence[Node], anchor: Node) -> tuple[list[Node], list[Node]]:
    """The nodes that the anchor depends on, and the others."""
    wanted = {anchor.operands[0]}
    before: list[Node] = []
    for node in reversed(nodes[: list(nodes).index(anchor)]):
        if any(v in wanted for v in node.results):
            before.insert(0, node)
            wanted |= set(node.operands)
    return before, [node for node in nodes if node is not anchor and node not in before]


def _axes(anchor: Node) -> list[Axis]:
    op, x = anchor.op, anchor.operands[0].type
    if isinstance(op, Reduce):
        reduced = set(op.axes)
    elif isinstance(op, Softmax):
        reduced = {op.axis % x.rank}
    elif isinstance(op, (LayerNorm, RmsNorm)):
        reduced = set(range(op.axis % x.rank, x.rank))
    else:
        reduced = set(range(2, x.rank))
    axes: list[Axis] = []
    for dim in x.order or range(x.rank):
        if isinstance(op, GroupNorm) and dim == 1:
            each = x.shape[1] // op.groups
            axes += [Axis("g1", 1, op.groups, False, each), Axis("c1", 1, each, True)]
        else:
            axes.append(Axis(f"c{dim}", dim, x.shape[dim], dim in reduced))
    return [axis for axis in axes if axis.size != 1]


def _plan(anchor: Node, types: Sequence[TensorType]) -> Plan:
    axes, rank = _axes(anchor), anchor.operands[0].type.rank
    row = not axes or axes[-1].reduced
    vector = 1
    if axes and axes[-1].scale == 1:
        along = axes[-1].dim
        steps = [[step(t, rank, along), *(step(t, rank, d) for d in range(rank) if d != along)] for t in types]
        vector = widest(axes[-1].size, types, steps)
    count = math.prod(a.size for a in axes if a.reduced) // (vector if row else 1)
    groups = math.prod(a.size for a in axes if not a.reduced) // (1 if row else vector)
    if row:
        threads = min(BLOCK, power_of_two(ceil_div(count, max(1, CACHED // vector))))
    else:
        side_by_side = max(1, COALESCED_BYTES // (vector * anchor.operands[0].type.dtype.itemsize))
        most = max(1, BLOCK // min(side_by_side, power_of_two(groups)))
        wanted = min(power_of_two(ceil_div(count, 8)), power_of_two(ceil_div(ENOUGH_THREADS, max(groups, 1))))
        threads = min(most, wanted)
    lanes = max(1, min(BLOCK // threads, power_of_two(max(groups, 1))), 32 // threads)
    return Plan(tuple(axes), row, vector, threads, lanes, count, groups)


@dataclass
class _Source:
    anchor: Node
    what: Formula
    plan: Plan
    before: Sequence[Node]
    behind: Sequence[Node]
    early: Sequence[Value]
    late: Sequence[Value]

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
        plan = self.plan
        block = plan.threads * plan.lanes
        lines: list[str] = []
        if plan.threads > 1 and not (plan.row and plan.threads <= 32):
            lines.append(f"__shared__ {self.kind} shared[{block * plan.width}];")
        else:
            lines.append(f"{self.kind}* shared = 0;")
        if plan.row:
            lines.append(f"const u32 t = threadIdx.x % {plan.threads}u, lane = threadIdx.x / {plan.threads}u;")
        else:
            lines.append(f"const u32 t = threadIdx.x / {plan.lanes}u, lane = threadIdx.x % {plan.lanes}u;")
        lines.append(f"const u32 group = blockIdx.x * {plan.lanes}u + lane;")
        lines.append(f"const bool live = group < {plan.groups}u;")
        lines.append(f"const u32 at = live ? group : {max(plan.groups - 1, 0)}u;")
        lines += self._coordinates("at", reduced=False)
        if self.cached:
            lines.append(f"{self.kind} cache[{plan.turns * plan.vector}];")
        for number, each in enumerate(self.what.passes):
            acc = f"acc{number}"
            lines.append(f"{self.kind} {acc}[{plan.width}];")
            lines.append(f"for (int w = 0; w < {plan.width}; ++w) {acc}[w] = {each.start};")
            mine, term = f"{acc}[{'0' if plan.row else 'j'}]", self._filled(each.term)
            lines += self._turns(f"{mine} = {each.combine}()({mine}, ({self.kind})({term}));", first=number == 0)
            by = 1 if plan.row else plan.lanes
            lines.append(
                f"reduce_threads<{block}, {plan.threads}, {by}, {plan.width}>({acc}, shared, {each.combine}());"
            )
            if each.finish:
                lines.append(
                    f"for (int w = 0; w < {plan.width}; ++w) {acc}[w] = {each.finish.replace('#', f'{acc}[w]')};"
                )
        lines += self._reduced() if isinstance(self.anchor.op, Reduce) else self._written()
        grid = ceil_div(max(plan.groups, 1), plan.lanes)
        return self.arguments.launch(self.anchor.op.name, lines, grid, block)

    def _coordinates(self, index: str, reduced: bool) -> list[str]:
        plan = self.plan
        axes = [axis for axis in plan.axes if axis.reduced is reduced]
        if not axes:
            return []
        inner = axes[-1] is plan.axes[-1] and plan.vector > 1
        sizes = [(axis.name, axis.size) for axis in axes]
        if not inner:
            return decoded(index, sizes)
        name, size = sizes[-1]
        lines = decoded(index, [*sizes[:-1], (f"{name}_pack", size // plan.vector)])
        return [*lines, f"const u32 {name} = {name}_pack * {plan.vector}u;"]

    def _loop(self, body: Sequence[str]) -> list[str]:
        """The body for each turn of a thread, with the coordinates there."""
        plan = self.plan
        if not plan.count:
            return []
        lines = ["#pragma unroll"] if self.cached else []
        lines.append(f"for (u32 turn = 0; turn < {plan.turns}u; ++turn) {{")
        lines.append(f"  const u32 r = t + turn * {plan.threads}u;")
        lines.append(f"  if (r >= {plan.count}u) continue;")
        lines += [f"  {line}" for line in (*self._coordinates("r", reduced=True), *body)]
        return [*lines, "}"]

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
        chain.inside.append(f"const {self.kind} result = {stored(text, self.y.type.dtype)};")
        return ["if (live) {", *self._loop(self._finished(chain).lines()), "}"]

    def _filled(self, text: str) -> str:
        """With what the passes gave in place of their numbers."""
        for number in range(len(self.what.passes)):
            text = text.replace(f"#{number}", f"acc{number}[{'0' if self.plan.row else 'j'}]")
        return text

    def _reduced(self) -> list[str]:
        """The numbers of a reduction, by one of the threads that share each."""
        op, plan = self.anchor.op, self.plan
        assert isinstance(op, Reduce)
        kept = [d for d in range(self.x.type.rank) if op.keepdims or d not in op.axes]
        names = tuple(None if d in op.axes else self.space.names[d] for d in kept)
        along = kept.index(plan.along) if not plan.row and plan.along in kept else -1
        chain = Chain(Space(self.y.type.shape, names, along, plan.width), self.arguments, "w")
        text = self.what.result.replace("#0", f"acc{len(self.what.passes) - 1}[j]").replace("#1", "acc0[j]")
        c_type = compute_type(self.y.type.dtype)
        chain.inside.append(f"const {c_type} result = {stored(f'({c_type})({text})', self.y.type.dtype)};")
        return ["if (live && t == 0) {", *(f"  {line}" for line in self._finished(chain).lines()), "}"]

    def _finished(self, chain: Chain) -> Chain:
        chain.known[self.y] = "result"
        for node in self.behind:
            chain.apply(node)
        for value in self.late:
            chain.store(value)
        return chain
