"""Generate batch norm in training and its backward in one launch, which keeps elements on the chip.

Blocks read their part of the image, wait for each other, merge their sums, and continue with the elements that shared
memory holds. Rows are visited from the last to the first, because the last were written most recently. Each block
merges
the sums of its own channels in the order of the chunks, so every run gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.gpu_figures import CACHE_BYTES, MOST_SHARED_BYTES, PROCESSORS
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Launch, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.loops import coordinates
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space
from fusec.gpu.kernels.codegen.row_plan import RowPlan
from fusec.gpu.kernels.norm.batch_norm_source import BatchNormSource, space_of
from fusec.ir import Node, Value

BLOCKS = PROCESSORS  # that run at the same time, one on each multiprocessor
VARIANTS = ((512, 4), (1024, 2))  # threads of a block, and turns whose loads are issued together
LANES = 8  # vectors of channels that a block visits together, at most
RESIDENT_BYTES = MOST_SHARED_BYTES  # shared memory of a block, including its sums
CACHED_BYTES = CACHE_BYTES * 2 // 5  # of elements that the second-level cache still holds in the second pass
MERGED = 16  # chunks whose sums a thread loads together


def plan_resident(plan: RowPlan, most: int) -> RowPlan | None:
    """Adapt a plan to as many blocks as run at the same time; None if channels are not contiguous or too many.

    most: threads of a block, at most.
    """
    if plan.row or plan.vector == 1 or not plan.count:
        return None
    lanes = min(LANES, power_of_two(plan.groups))
    threads = min(most // lanes, power_of_two(plan.count))
    lanes = max(lanes, 32 // threads)
    plan = replace(plan, lanes=lanes, threads=threads, chunks=1, unrolled=1, whole=1)
    chunks = min(BLOCKS // plan.blocks, ceil_div(plan.count, threads))
    return replace(plan, chunks=chunks) if chunks else None


@dataclass(frozen=True)
class BatchNormResident(BatchNormSource):
    """One launch for a step; `sums`, which is also `write`, shares the elements.

    unrolled: turns whose loads are issued together.
    """

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
        """Channels of a block, rounded up to whole vectors and lanes."""
        return self.sums.lanes * self.sums.width

    @property
    def _each(self) -> int:
        """Neighbouring threads that merge the chunks of one channel."""
        return max(1, min(32, self.sums.block // self._own))

    @property
    def _rounds(self) -> int:
        """Rounds in which a block merges its channels."""
        return ceil_div(self._own * self._each, self.sums.block)

    @property
    def _sum_bytes(self) -> int:
        """Shared memory for sums of warps, their centres, and the factors of channels."""
        numbers = (2 * self.sums.block // 32 + 1 + self.factors) * self._own
        return numbers * (8 if self.kind == "double" else 4)

    @property
    def _turn_bytes(self) -> int:
        return sum(self.sums.block * self.sums.vector * v.type.dtype.itemsize for v in self.step.elements)

    @property
    def resident(self) -> int:
        """Turns whose elements stay in shared memory until the sums are known."""
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
        lines += self._load_parameters(arguments)
        if plan.chunks > 1:
            door = f"{arguments.doors(plan.blocks)} + blockIdx.x % {plan.blocks}u * DOOR"
            lines.append(f"meet({door}, {plan.chunks}u);")
        else:
            lines.append("__syncthreads();")
        lines += self._merge_chunks_in_block(arguments)
        if self.step.epilogue_outputs or self.step.epilogue:
            lines += self._second_pass(arguments)
        launch = arguments.launch(f"{self.name}_resident", lines, plan.blocks * plan.chunks, plan.block)
        return (replace(launch, resident_bytes=self.resident * self._turn_bytes, meets=plan.chunks > 1),)

    def _first_pass(self, arguments: Arguments) -> list[str]:
        plan = self.sums
        lines = self.load_centre(plan, arguments, f"chunk * {plan.threads}u")
        code = PointwiseCode(space_of(self.step.x.type, plan), arguments)
        self.accumulate(plan, code)
        keep = self._cache_statements(code)
        bare = code.lines()
        code.head += keep[0]
        code.body += keep[1]
        code.tail += keep[2]
        lines += self._turns(code.lines(), bare)
        return lines + self._merge_warps(arguments)

    def _merge_warps(self, arguments: Arguments) -> list[str]:
        """Merge the sums of threads within warps, then of warps; store them in scratch memory."""
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
        lines += [f"  {line}" for line in self.chunk_statistics("sum0", "sum1", "centres[i]", size)]
        lines.append(f"  const u32 c = blockIdx.x % {plan.blocks}u * {own}u + i;")
        lines.append(f"  if (c < {self.channels}u) {{")
        for number in range(2):  # chunks of a channel are neighbours, because they are read together
            place = f"({number * self.channels}u + c) * {plan.chunks}u + chunk"
            lines.append(f"    {pointer}[{place}] = sum{number};")
        return [*lines, "  }", "}"]

    def _rows(self, chunk: str) -> str:
        """Return the number of rows of a chunk."""
        plan, whole = self.sums, self.turns - 1
        rest, threads = plan.count - whole * self._stride, plan.threads
        if rest == self._stride:
            return f"{self.turns * threads}u"
        left = f"{rest}u - {chunk} * {threads}u"
        some = f"({rest}u <= {chunk} * {threads}u ? 0u : {left} < {threads}u ? {left} : {threads}u)"
        return f"{whole * threads}u + {some}"

    def _cache_statements(self, code: PointwiseCode) -> tuple[list[str], list[str], list[str]]:
        """Return the statements before, in and after the loop over neighbours that cache a turn's elements."""
        head, body, tail = list[str](), list[str](), list[str]()
        for number, value in enumerate(dict.fromkeys(self.step.elements)):
            pack = self._pack(value)
            head.append(f"{pack} kept{number};")
            body.append(f"kept{number}.v[j] = {code.as_stored(value)};")
            tail.append(f"{self._place(number, value)} = kept{number};")
        return head, body, tail

    def _pack(self, value: Value) -> str:
        return f"Pack<{C_TYPES[value.type.dtype]}, {self.sums.vector}>"

    def _place(self, number: int, value: Value) -> str:
        """Return the place in shared memory of the elements of turn `slot`."""
        plan, elements = self.sums, list(dict.fromkeys(self.step.elements))
        start = sum(self.resident * plan.block * plan.vector * v.type.dtype.itemsize for v in elements[:number])
        return f"reinterpret_cast<{self._pack(value)}*>(kept + {start}u)[slot * {plan.block}u + threadIdx.x]"

    def _turns(self, keeping: list[str], bare: list[str]) -> list[str]:
        """Generate the first pass. The last turn comes first, and not all threads have it.

        keeping: the body of turns that are cached.
        bare: the body of other turns.
        """
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
        """Run the body for each channel `c` of the block, number `place` of its channels.

        `s0` counts the threads that share the channel.
        """
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

    def _load_parameters(self, arguments: Arguments) -> list[str]:
        """Load the parameters before blocks meet, because a fused update may write them after that."""
        lines: list[str] = []
        body: list[str] = []
        for number, value in enumerate(self.step.parameters):
            lines.append(f"{self.kind} parameter{number}[{self._rounds}];")
            body.append(f"parameter{number}[round] = wide({arguments.read(value)}[c]);")
            body.append(f"pin(parameter{number}[round]);")
        return [*lines, *self._each_channel(body)]

    def _merge_chunks_in_block(self, arguments: Arguments) -> list[str]:
        """Merge the chunks of the block's channels; compute their factors and statistics."""
        plan, kind, step, each = self.sums, self.kind, self.step, self._each
        channels, chunks, pointer = self.channels, plan.chunks, arguments.scratch(kind)
        places = (f"c * {chunks}u", f"({channels}u + c) * {chunks}u")
        parts = (f"across({pointer} + {places[0]} + s)", f"across({pointer} + {places[1]} + s)")
        turns = f"for (u32 s = s0; s < {chunks}u; s += {each}u)"
        size, around = f"{kind}({self._rows('s')})", f"across({pointer} + {places[0]})"
        body = [f"{kind} acc0[1] = {{{kind}(0)}}, acc1[1] = {{{kind}(0)}};"]
        body += self.merge_loop(turns, size, around, parts, min(MERGED, ceil_div(chunks, each)))
        body += [f"reduce_threads<{plan.block}, {each}, 1, 1>(acc{n}, (({kind}*)0), Add());" for n in range(2)]
        code = PointwiseCode(Space((channels,), ("c",)), arguments, "p")
        code.known |= {value: f"parameter{number}[round]" for number, value in enumerate(step.parameters)}
        factors = self.forward_factors(code) if self.forward else self.backward_factors(code)
        for number, factor in enumerate(factors):
            code.body.append(f"factors[{number * self._own}u + place] = {factor};")
        if step.statistics:
            small = PointwiseCode(code.space, arguments, "q", dict(code.known), dict(code.narrowed))
            for node in step.statistics_nodes:
                small.apply(node)
            for value in step.statistics:
                small.store(value)
            code.body += ["if (chunk == 0u && real) {", *(f"  {line}" for line in small.lines()), "}"]
        body += [f"if (s0 == 0u && spot < {self._own}u) {{", *(f"  {line}" for line in code.lines()), "}"]
        return [*self._each_channel(body), "__syncthreads();"]

    def _second_pass(self, arguments: Arguments) -> list[str]:
        """Generate the second pass.

        Elements read last come first, because they may be in the cache. If the cache holds all that is not in shared
        memory, the
        first rows come last, because the next step reads the result from its beginning.
        """
        plan, kind, step = self.sums, self.kind, self.step
        own, pack = self._own, f"Pack<{self.kind}, {plan.width}>"
        lines: list[str] = []
        for number in range(self.factors):
            at = f"{number * own}u + lane * {plan.width}u"
            lines.append(f"const {pack} f{number} = load_pack<{kind}, {plan.width}>(factors + ({at}));")
        again = PointwiseCode(space_of(step.x.type, plan), arguments, "w")
        stored = [value for value in step.prologue_outputs if again.space.is_pack(value.type)]
        for number, value in enumerate(stored):  # not by a read-only pointer: its cache may be stale
            source = f"{arguments.write(value)} + ({again.space.offset(value.type)})"
            pack = f"{C_TYPES[value.type.dtype]}, {plan.vector}"
            again.head.append(f"const Pack<{pack}> stored{number} = load_pack<{pack}>({source});")
            again.known[value] = f"wide(stored{number}.v[j])"
        for node in self._prologue_without(stored):
            again.apply(node)
        kept = PointwiseCode(space_of(step.x.type, plan), arguments, "k")
        for number, value in enumerate(dict.fromkeys(step.elements)):
            kept.head.append(f"const {self._pack(value)} kept{number} = {self._place(number, value)};")
            kept.known[value] = f"wide(kept{number}.v[j])"
        for node in self._prologue_without(step.elements):
            kept.apply(node)
        for code in (again, kept):
            self.normalise(code, "j")
            for node in step.epilogue:
                code.apply(node)
            for value in step.epilogue_outputs:
                code.store(value)
        rest, was_kept = self._uncached_pass(again.lines()), self._cached_pass(kept.lines())
        lines += [*was_kept, *rest] if self._is_cached else [*rest, *was_kept]
        return ["if (live) {", *(f"  {line}" for line in lines), "}"]

    @property
    def _is_cached(self) -> bool:
        """Tell if the second-level cache likely holds all elements that are not in shared memory."""
        return (self.turns - self.resident) * self._turn_bytes * self.sums.chunks * self.sums.blocks <= CACHED_BYTES

    def _uncached_pass(self, body: list[str]) -> list[str]:
        """Visit the elements that are not in shared memory. It has the last turn, if it has any."""
        last, count = self.turns - 1, self.turns - max(1, self.resident)
        at = f"({count - 1}u - turn)" if self._is_cached else "turn"
        lines: list[str] = []
        if count > 0:
            lines += [f"#pragma unroll {self.unrolled}", f"for (u32 turn = 0; turn < {count}u; ++turn)"]
            lines += self._turn([f"const u32 r = {at} * {self._stride}u + first;"], body)
        if not self.resident:
            lines += self._turn([f"const u32 r = {last * self._stride}u + first;"], body, guarded=True)
        return lines

    def _cached_pass(self, body: list[str]) -> list[str]:
        """Visit the elements in shared memory, the last rows first."""
        if not self.resident:
            return []
        last = self.turns - 1
        lines = self._turn([f"const u32 slot = 0u, r = {last * self._stride}u + first;"], body, guarded=True)
        if self.resident > 1:
            lines += [f"#pragma unroll {self.unrolled}", f"for (u32 slot = 1; slot < {self.resident}u; ++slot)"]
            lines += self._turn([f"const u32 r = ({last}u - slot) * {self._stride}u + first;"], body)
        return lines

    def _prologue_without(self, known: Sequence[Value]) -> list[Node]:
        """Return the prologue nodes that the second pass applies again, given known values."""
        step = self.step
        wanted = {*step.elements, *(v for node in step.epilogue for v in node.operands)} - set(known)
        found: list[Node] = []
        for node in reversed(step.prologue):
            if wanted.intersection(node.results):
                found.insert(0, node)
                wanted |= {v for v in node.operands if v not in known}
        return found
