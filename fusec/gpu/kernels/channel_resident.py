"""The CUDA C of a batch norm in training and its backward in one launch: blocks read their part of the image, meet to
put their sums together, and go on with what they kept of it on chip.

Turns go through the image side by side, the last rows first: these were written last, and are the ones kept. Sums are
put together in the order of the chunks, by each block for its own channels, so that bits do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.chain import Chain, Space
from fusec.gpu.kernels.channel_source import ChannelSource, space_of
from fusec.gpu.kernels.row_plan import Plan
from fusec.gpu.kernels.spec import C_TYPES, Arguments, Launch, ceil_div, power_of_two
from fusec.gpu.kernels.walk import coordinates
from fusec.ir import Node, Value

BLOCKS, THREADS = 132, 512  # at once on the GPU, one block on each of its processors
LANES = 8  # vectors of channels that a block goes through side by side, at most
RESIDENT_BYTES = 224 << 10  # of a block, its sums among them
UNROLLED = 4  # turns whose elements are asked for together


def shared_out(plan: Plan) -> Plan | None:
    """A plan for sums over all but the channels, with as many blocks as are on the GPU at once; None if channels are
    not neighbours in memory, or too many."""
    if plan.row or plan.vector == 1 or not plan.count:
        return None
    lanes = min(LANES, power_of_two(plan.groups))
    threads = min(THREADS // lanes, power_of_two(plan.count))
    lanes = max(lanes, 32 // threads)
    plan = replace(plan, lanes=lanes, threads=threads, chunks=1, unrolled=1, whole=1)
    chunks = min(BLOCKS // plan.blocks, ceil_div(plan.count, threads))
    return replace(plan, chunks=chunks) if chunks else None


@dataclass(frozen=True)
class ResidentSource(ChannelSource):
    """One launch for a step; `sums`, which is also `write`, shares out the elements."""

    @property
    def turns(self) -> int:
        return ceil_div(self.sums.count, self._stride)

    @property
    def _stride(self) -> int:
        """Rows from one turn of a thread to the next."""
        return self.sums.chunks * self.sums.threads

    @property
    def _sum_bytes(self) -> int:
        """Of shared memory, for the sums of threads and the factors of channels."""
        width = self.sums.lanes * self.sums.width
        return (self.sums.block * self.sums.width + self.factors * width) * (8 if self.kind == "double" else 4)

    @property
    def _turn_bytes(self) -> int:
        return sum(self.sums.block * self.sums.vector * v.type.dtype.itemsize for v in self.part.elements)

    @property
    def resident(self) -> int:
        """Turns whose elements are kept until the sums are known."""
        return max(0, min(self.turns, (RESIDENT_BYTES - self._sum_bytes) // self._turn_bytes))

    @property
    def scratch_bytes(self) -> int:
        return 2 * self.sums.chunks * self.channels * (8 if self.kind == "double" else 4)

    def launches(self) -> tuple[Launch, ...]:
        plan, arguments = self.sums, Arguments()
        lines = [
            f"__shared__ {self.kind} shared[{plan.block * plan.width}];",
            f"__shared__ {self.kind} factors[{self.factors * plan.lanes * plan.width}];",
            "RESIDENT(kept);",
            f"const u32 t = threadIdx.x / {plan.lanes}u, lane = threadIdx.x % {plan.lanes}u;",
            f"const u32 group = blockIdx.x % {plan.blocks}u * {plan.lanes}u + lane;",
            f"const u32 chunk = blockIdx.x / {plan.blocks}u, first = chunk * {plan.threads}u + t;",
            f"const bool live = group < {plan.groups}u;",
            f"const u32 at = live ? group : {max(plan.groups - 1, 0)}u;",
            *coordinates(plan, "at", reduced=False),
        ]
        lines += self._first_pass(arguments)
        lines += self._read_before(arguments)
        if plan.chunks > 1:
            door = f"{arguments.doors(plan.blocks)} + blockIdx.x % {plan.blocks}u * DOOR"
            lines.append(f"meet({door}, {plan.chunks}u);")
        else:
            lines.append("__syncthreads();")
        lines += self._put_together(arguments)
        if self.part.late or self.part.behind:
            lines += self._second_pass(arguments)
        launch = arguments.launch(f"{self.name}_resident", lines, plan.blocks * plan.chunks, plan.block)
        return (replace(launch, resident_bytes=self.resident * self._turn_bytes, meets=plan.chunks > 1),)

    def _first_pass(self, arguments: Arguments) -> list[str]:
        plan, kind = self.sums, self.kind
        lines = self.centre(plan, arguments, f"chunk * {plan.threads}u")
        chain = Chain(space_of(self.part.x.type, plan), arguments)
        self.added(plan, chain)
        keep = self._keeping(chain)
        bare = chain.lines()
        chain.before += keep[0]
        chain.inside += keep[1]
        chain.after += keep[2]
        lines += self._turns(chain.lines(), bare)
        reduced = f"reduce_threads<{plan.block}, {plan.threads}, {plan.lanes}, {plan.width}>"
        lines += [f"{reduced}(acc{n}, shared, Add());" for n in range(2)]
        return lines + self.handed_over(plan, arguments, "chunk", f"{kind}({self._rows('chunk')})")

    def _rows(self, chunk: str) -> str:
        """How many rows a chunk has."""
        plan, whole = self.sums, self.turns - 1
        rest, threads = plan.count - whole * self._stride, plan.threads
        if rest == self._stride:
            return f"{self.turns * threads}u"
        left = f"{rest}u - {chunk} * {threads}u"
        some = f"({rest}u <= {chunk} * {threads}u ? 0u : {left} < {threads}u ? {left} : {threads}u)"
        return f"{whole * threads}u + {some}"

    def _keeping(self, chain: Chain) -> tuple[list[str], list[str], list[str]]:
        """Statements before, inside and behind the loop over neighbours that keep the elements of a turn."""
        before, inside, after = list[str](), list[str](), list[str]()
        for number, value in enumerate(dict.fromkeys(self.part.elements)):
            pack = self._pack(value)
            before.append(f"{pack} kept{number};")
            inside.append(f"kept{number}.v[j] = {chain.as_stored(value)};")
            after.append(f"{self._place(number, value)} = kept{number};")
        return before, inside, after

    def _pack(self, value: Value) -> str:
        return f"Pack<{C_TYPES[value.type.dtype]}, {self.sums.vector}>"

    def _place(self, number: int, value: Value) -> str:
        """Where the elements of turn `slot` are kept."""
        plan, elements = self.sums, list(dict.fromkeys(self.part.elements))
        start = sum(self.resident * plan.block * plan.vector * v.type.dtype.itemsize for v in elements[:number])
        return f"reinterpret_cast<{self._pack(value)}*>(kept + {start}u)[slot * {plan.block}u + threadIdx.x]"

    def _turns(self, keeping: list[str], bare: list[str]) -> list[str]:
        """The first pass over the elements: the last turn first, which some threads have not, and the kept ones."""
        last = self.turns - 1
        head = f"const u32 slot = 0u, r = {last * self._stride}u + first;"
        lines = self._turn([head], keeping if self.resident else bare, guarded=True)
        for low, high, body in ((1, self.resident, keeping), (max(1, self.resident), self.turns, bare)):
            if low < high:
                lines.append(f"#pragma unroll {UNROLLED}")
                lines.append(f"for (u32 slot = {low}u; slot < {high}u; ++slot)")
                lines += self._turn([f"const u32 r = ({last}u - slot) * {self._stride}u + first;"], body)
        return lines

    def _turn(self, head: list[str], body: list[str], guarded: bool = False) -> list[str]:
        lines = [*coordinates(self.sums, "r", reduced=True), *body]
        if guarded and self.sums.count % self._stride:
            lines = [f"if (r < {self.sums.count}u) {{", *(f"  {line}" for line in lines), "}"]
        return ["{", *(f"  {line}" for line in (*head, *lines)), "}"]

    def _read_before(self, arguments: Arguments) -> list[str]:
        """What the sums are put together with, for channel `c`: an update may be written there once blocks have met."""
        plan, own = self.sums, self.sums.lanes * self.sums.width
        lines = [
            f"const u32 place = threadIdx.x % {own}u, s0 = threadIdx.x / {own}u;",
            f"const u32 wanted = blockIdx.x % {plan.blocks}u * {own}u + place;",
            f"const bool real = wanted < {self.channels}u;",
            f"const u32 c = real ? wanted : {self.channels - 1}u;",
        ]
        for number, value in enumerate(self.part.parameters):
            lines.append(f"{self.kind} parameter{number} = wide({arguments.read(value)}[c]);")
            lines.append(f"pin(parameter{number});")
        return lines

    def _put_together(self, arguments: Arguments) -> list[str]:
        """The sums of all chunks for the channels of this block, the factors, and what else is made of them."""
        plan, kind, part = self.sums, self.kind, self.part
        own, channels, chunks = plan.lanes * plan.width, self.channels, plan.chunks
        each = plan.block // own
        pointer = arguments.scratch(kind)
        parts = (
            f"across({pointer} + (s * {channels}u + c))",
            f"across({pointer} + (({chunks}u + s) * {channels}u + c))",
        )
        turns = f"for (u32 s = s0; s < {chunks}u; s += {each}u)"
        merged = self.merged(turns, f"{kind}({self._rows('s')})", f"across({pointer} + c)", parts)
        chain = Chain(Space((channels,), ("c",)), arguments, "p")
        chain.known |= {value: f"parameter{number}" for number, value in enumerate(part.parameters)}
        factors = self.on_forward(chain) if self.forward else self.on_backward(chain)
        for number, factor in enumerate(factors):
            chain.inside.append(f"factors[{number * own}u + place] = {factor};")
        if part.kept:
            small = Chain(chain.space, arguments, "q", dict(chain.known), dict(chain.narrowed))
            for node in part.small:
                small.apply(node)
            for value in part.kept:
                small.store(value)
            chain.inside += ["if (chunk == 0u && real) {", *(f"  {line}" for line in small.lines()), "}"]
        body = [f"{kind} acc0[1] = {{{kind}(0)}}, acc1[1] = {{{kind}(0)}};", *merged]
        body += [f"reduce_threads<{plan.block}, {each}, {own}, 1>(acc{n}, shared, Add());" for n in range(2)]
        body += ["if (s0 == 0u) {", *(f"  {line}" for line in chain.lines()), "}"]
        return ["{", *(f"  {line}" for line in body), "}", "__syncthreads();"]

    def _second_pass(self, arguments: Arguments) -> list[str]:
        """The elements once more: first those read last, which may be in the cache, then those that were kept."""
        plan, kind, part = self.sums, self.kind, self.part
        own, pack = plan.lanes * plan.width, f"Pack<{self.kind}, {plan.width}>"
        lines: list[str] = []
        for number in range(self.factors):
            at = f"{number * own}u + lane * {plan.width}u"
            lines.append(f"const {pack} f{number} = load_pack<{kind}, {plan.width}>(factors + ({at}));")
        again = Chain(space_of(part.x.type, plan), arguments, "w")
        for node in self._needed(()):  # what the first pass stored is not read: it might come from a stale cache
            again.apply(node)
        kept = Chain(space_of(part.x.type, plan), arguments, "k")
        for number, value in enumerate(dict.fromkeys(part.elements)):
            kept.before.append(f"const {self._pack(value)} kept{number} = {self._place(number, value)};")
            kept.known[value] = f"wide(kept{number}.v[j])"
        for node in self._needed(part.elements):
            kept.apply(node)
        for chain in (again, kept):
            self.normed(chain, "j")
            for node in part.behind:
                chain.apply(node)
            for value in part.late:
                chain.store(value)
        last, rest = self.turns - 1, self.turns - self.resident
        if rest > 0:
            # the last turn is among the kept ones, if there are any
            body = again.lines()
            whole = rest if self.resident else rest - 1
            if whole:
                lines += [f"#pragma unroll {UNROLLED}", f"for (u32 turn = 0; turn < {whole}u; ++turn)"]
                lines += self._turn([f"const u32 r = turn * {self._stride}u + first;"], body)
            if not self.resident:
                lines += self._turn([f"const u32 r = {last * self._stride}u + first;"], body, guarded=True)
        if self.resident:
            if self.resident > 1:
                lines += [f"#pragma unroll {UNROLLED}", f"for (u32 turn = {rest}u; turn < {last}u; ++turn)"]
                head = f"const u32 slot = {last}u - turn, r = turn * {self._stride}u + first;"
                lines += self._turn([head], kept.lines())
            lines += self._turn(
                [f"const u32 slot = 0u, r = {last * self._stride}u + first;"], kept.lines(), guarded=True
            )
        return ["if (live) {", *(f"  {line}" for line in lines), "}"]

    def _needed(self, known: Sequence[Value]) -> list[Node]:
        """The nodes before that the second pass applies again, what is known apart."""
        part = self.part
        wanted = {*part.elements, *(v for node in part.behind for v in node.operands)} - set(known)
        found: list[Node] = []
        for node in reversed(part.before):
            if wanted.intersection(node.results):
                found.insert(0, node)
                wanted |= {v for v in node.operands if v not in known}
        return found
