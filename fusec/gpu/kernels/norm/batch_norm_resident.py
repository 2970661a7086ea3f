"""The CUDA C of a batch norm in training and its backward in one launch: blocks read their part of the image, meet to
put their sums together, and go on with what they kept of it on chip.

Turns go through the image side by side, the last rows first: these were written last, and are the ones kept. Sums are
put together in the order of the chunks, by each block for its own channels, so that bits do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Launch, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.loops import coordinates
from fusec.gpu.kernels.codegen.pointwise_code import Chain, Space
from fusec.gpu.kernels.codegen.row_plan import Plan
from fusec.gpu.kernels.norm.batch_norm_source import ChannelSource, space_of
from fusec.ir import Node, Value

BLOCKS = 132  # at once on the GPU, one on each of its processors
WAYS = ((512, 4), (1024, 2))  # threads of a block, and turns whose elements are asked for together
LANES = 8  # vectors of channels that a block goes through side by side, at most
RESIDENT_BYTES = 224 << 10  # of a block, its sums among them
CACHED_BYTES = 24 << 20  # of what was not kept, that the second-level cache still holds
MERGED = 16  # chunks whose sums a thread asks for together


def shared_out(plan: Plan, most: int) -> Plan | None:
    """A plan for sums over all but the channels, with as many blocks as are on the GPU at once, of so many threads at
    most; None if channels are not neighbours in memory, or too many."""
    if plan.row or plan.vector == 1 or not plan.count:
        return None
    lanes = min(LANES, power_of_two(plan.groups))
    threads = min(most // lanes, power_of_two(plan.count))
    lanes = max(lanes, 32 // threads)
    plan = replace(plan, lanes=lanes, threads=threads, chunks=1, unrolled=1, whole=1)
    chunks = min(BLOCKS // plan.blocks, ceil_div(plan.count, threads))
    return replace(plan, chunks=chunks) if chunks else None


@dataclass(frozen=True)
class ResidentSource(ChannelSource):
    """One launch for a step; `sums`, which is also `write`, shares out the elements."""

    unrolled: int

    @property
    def turns(self) -> int:
        return ceil_div(self.sums.count, self._stride)

    @property
    def _stride(self) -> int:
        """Rows from one turn of a thread to the next."""
        return self.sums.chunks * self.sums.threads

    @property
    def _own(self) -> int:
        """Channels of a block, with those that are none."""
        return self.sums.lanes * self.sums.width

    @property
    def _each(self) -> int:
        """Threads, side by side, that put together what chunks came to for a channel."""
        return max(1, min(32, self.sums.block // self._own))

    @property
    def _rounds(self) -> int:
        """In which a block has its channels put together."""
        return ceil_div(self._own * self._each, self.sums.block)

    @property
    def _sum_bytes(self) -> int:
        """Of shared memory, for the sums of warps, the numbers these are around, and the factors of channels."""
        numbers = (2 * self.sums.block // 32 + 1 + self.factors) * self._own
        return numbers * (8 if self.kind == "double" else 4)

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
            f"__shared__ {self.kind} sums[{2 * plan.block // 32}][{self._own}], centres[{self._own}];",
            f"__shared__ {self.kind} factors[{self.factors * self._own}];",
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
        plan = self.sums
        lines = self.centre(plan, arguments, f"chunk * {plan.threads}u")
        chain = Chain(space_of(self.part.x.type, plan), arguments)
        self.added(plan, chain)
        keep = self._keeping(chain)
        bare = chain.lines()
        chain.before += keep[0]
        chain.inside += keep[1]
        chain.after += keep[2]
        lines += self._turns(chain.lines(), bare)
        return lines + self._of_warps(arguments)

    def _of_warps(self, arguments: Arguments) -> list[str]:
        """The sums of threads: first within warps, then by a thread for each channel, into the scratch memory."""
        plan, kind, own = self.sums, self.kind, self._own
        pointer, warps = arguments.scratch(kind), plan.block // 32
        lines = ["#pragma unroll", f"for (int s = 16; s >= {plan.lanes}; s /= 2) {{", "  #pragma unroll"]
        lines.append(f"  for (int w = 0; w < {plan.width}; ++w) {{")
        lines += [f"    acc{n}[w] += __shfl_xor_sync(0xffffffffu, acc{n}[w], s);" for n in range(2)]
        lines += ["  }", "}", f"if (threadIdx.x % 32u < {plan.lanes}u)", f"  for (int w = 0; w < {plan.width}; ++w) {{"]
        for number in range(2):
            lines.append(f"    sums[{number * warps}u + threadIdx.x / 32u][lane * {plan.width}u + w] = acc{number}[w];")
        lines += [f"    if (threadIdx.x < 32u) centres[lane * {plan.width}u + w] = around[w];", "  }"]
        lines += ["__syncthreads();", f"for (u32 i = threadIdx.x; i < {own}u; i += {plan.block}u) {{"]
        lines += [f"  {kind} sum0 = {kind}(0), sum1 = {kind}(0);", "  #pragma unroll"]
        lines.append(f"  for (u32 k = 0; k < {warps}u; ++k) {{ sum0 += sums[k][i]; sum1 += sums[{warps}u + k][i]; }}")
        size = f"{kind}({self._rows('chunk')})"
        lines += [f"  {line}" for line in self.concluded("sum0", "sum1", "centres[i]", size)]
        lines.append(f"  const u32 c = blockIdx.x % {plan.blocks}u * {own}u + i;")
        lines.append(f"  if (c < {self.channels}u) {{")
        for number in range(2):  # the chunks of a channel side by side, as they are read together
            place = f"({number * self.channels}u + c) * {plan.chunks}u + chunk"
            lines.append(f"    {pointer}[{place}] = sum{number};")
        return [*lines, "  }", "}"]

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
                lines.append(f"#pragma unroll {self.unrolled}")
                lines.append(f"for (u32 slot = {low}u; slot < {high}u; ++slot)")
                lines += self._turn([f"const u32 r = ({last}u - slot) * {self._stride}u + first;"], body)
        return lines

    def _turn(self, head: list[str], body: list[str], guarded: bool = False) -> list[str]:
        lines = [*coordinates(self.sums, "r", reduced=True), *body]
        if guarded and self.sums.count % self._stride:
            lines = [f"if (r < {self.sums.count}u) {{", *(f"  {line}" for line in lines), "}"]
        return ["{", *(f"  {line}" for line in (*head, *lines)), "}"]

    def _each_channel(self, body: list[str]) -> list[str]:
        """The body for channel `c`, number `place` of the block's, with `s0` counting the threads that share it."""
        plan, own, each = self.sums, self._own, self._each
        return [
            "#pragma unroll",
            f"for (u32 round = 0; round < {self._rounds}u; ++round) {{",
            f"  const u32 s0 = threadIdx.x % {each}u, spot = round * {plan.block // each}u + threadIdx.x / {each}u;",
            f"  const u32 place = spot < {own}u ? spot : {own - 1}u;",
            f"  const u32 wanted = blockIdx.x % {plan.blocks}u * {own}u + place;",
            f"  const bool real = spot < {own}u && wanted < {self.channels}u;",
            f"  const u32 c = real ? wanted : {self.channels - 1}u;",
            *(f"  {line}" for line in body),
            "}",
        ]

    def _read_before(self, arguments: Arguments) -> list[str]:
        """What the sums are put together with: an update may be written there once blocks have met."""
        lines: list[str] = []
        body: list[str] = []
        for number, value in enumerate(self.part.parameters):
            lines.append(f"{self.kind} parameter{number}[{self._rounds}];")
            body.append(f"parameter{number}[round] = wide({arguments.read(value)}[c]);")
            body.append(f"pin(parameter{number}[round]);")
        return [*lines, *self._each_channel(body)]

    def _put_together(self, arguments: Arguments) -> list[str]:
        """The sums of all chunks for the channels of this block, the factors, and what else is made of them."""
        plan, kind, part, each = self.sums, self.kind, self.part, self._each
        channels, chunks, pointer = self.channels, plan.chunks, arguments.scratch(kind)
        places = (f"c * {chunks}u", f"({channels}u + c) * {chunks}u")
        parts = (f"across({pointer} + {places[0]} + s)", f"across({pointer} + {places[1]} + s)")
        turns = f"for (u32 s = s0; s < {chunks}u; s += {each}u)"
        size, around = f"{kind}({self._rows('s')})", f"across({pointer} + {places[0]})"
        body = [f"{kind} acc0[1] = {{{kind}(0)}}, acc1[1] = {{{kind}(0)}};"]
        body += self.merged(turns, size, around, parts, min(MERGED, ceil_div(chunks, each)))
        body += [f"reduce_threads<{plan.block}, {each}, 1, 1>(acc{n}, (({kind}*)0), Add());" for n in range(2)]
        chain = Chain(Space((channels,), ("c",)), arguments, "p")
        chain.known |= {value: f"parameter{number}[round]" for number, value in enumerate(part.parameters)}
        factors = self.on_forward(chain) if self.forward else self.on_backward(chain)
        for number, factor in enumerate(factors):
            chain.inside.append(f"factors[{number * self._own}u + place] = {factor};")
        if part.kept:
            small = Chain(chain.space, arguments, "q", dict(chain.known), dict(chain.narrowed))
            for node in part.small:
                small.apply(node)
            for value in part.kept:
                small.store(value)
            chain.inside += ["if (chunk == 0u && real) {", *(f"  {line}" for line in small.lines()), "}"]
        body += [f"if (s0 == 0u && spot < {self._own}u) {{", *(f"  {line}" for line in chain.lines()), "}"]
        return [*self._each_channel(body), "__syncthreads();"]

    def _second_pass(self, arguments: Arguments) -> list[str]:
        """The elements once more. Those read last come first, as they may be in the cache; but where all that was not
        kept is there, the first rows come last, for whatever reads the result from its beginning."""
        plan, kind, part = self.sums, self.kind, self.part
        own, pack = self._own, f"Pack<{self.kind}, {plan.width}>"
        lines: list[str] = []
        for number in range(self.factors):
            at = f"{number * own}u + lane * {plan.width}u"
            lines.append(f"const {pack} f{number} = load_pack<{kind}, {plan.width}>(factors + ({at}));")
        again = Chain(space_of(part.x.type, plan), arguments, "w")
        stored = [value for value in part.early if again.space.is_pack(value.type)]
        for number, value in enumerate(stored):  # through the pointer it was written by: no stale cache is asked
            source = f"{arguments.write(value)} + ({again.space.offset(value.type)})"
            pack = f"{C_TYPES[value.type.dtype]}, {plan.vector}"
            again.before.append(f"const Pack<{pack}> stored{number} = load_pack<{pack}>({source});")
            again.known[value] = f"wide(stored{number}.v[j])"
        for node in self._needed(stored):
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
        rest, was_kept = self._rest(again.lines()), self._kept(kept.lines())
        lines += [*was_kept, *rest] if self._is_cached else [*rest, *was_kept]
        return ["if (live) {", *(f"  {line}" for line in lines), "}"]

    @property
    def _is_cached(self) -> bool:
        """Whether the second-level cache is likely to hold all that was not kept."""
        return (self.turns - self.resident) * self._turn_bytes * self.sums.chunks * self.sums.blocks <= CACHED_BYTES

    def _rest(self, body: list[str]) -> list[str]:
        """The second pass over what was not kept; the last turn, which some threads have not, is kept if any is."""
        last, count = self.turns - 1, self.turns - max(1, self.resident)
        at = f"({count - 1}u - turn)" if self._is_cached else "turn"
        lines: list[str] = []
        if count > 0:
            lines += [f"#pragma unroll {self.unrolled}", f"for (u32 turn = 0; turn < {count}u; ++turn)"]
            lines += self._turn([f"const u32 r = {at} * {self._stride}u + first;"], body)
        if not self.resident:
            lines += self._turn([f"const u32 r = {last * self._stride}u + first;"], body, guarded=True)
        return lines

    def _kept(self, body: list[str]) -> list[str]:
        """The second pass over what was kept, the last rows first."""
        if not self.resident:
            return []
        last = self.turns - 1
        lines = self._turn([f"const u32 slot = 0u, r = {last * self._stride}u + first;"], body, guarded=True)
        if self.resident > 1:
            lines += [f"#pragma unroll {self.unrolled}", f"for (u32 slot = 1; slot < {self.resident}u; ++slot)"]
            lines += self._turn([f"const u32 r = ({last}u - slot) * {self._stride}u + first;"], body)
        return lines

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
