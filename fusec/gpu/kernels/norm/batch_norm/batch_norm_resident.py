"""Generate batch norm in training and its backward in one launch, which keeps elements on the chip.

Blocks read their part of the image, wait for each other, merge their sums, and continue with the elements that shared
memory holds. Rows are visited from the last to the first, because the last were written most recently. Each block
merges the sums of its own channels in the order of the chunks, so every run gives the same bits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import ClassVar

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Launch, ceil_div, power_of_two
from fusec.gpu.kernels.codegen.loops import coordinates
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space
from fusec.gpu.kernels.codegen.row_plan import RowPlan
from fusec.gpu.kernels.norm.batch_norm.batch_norm_source import BatchNormSource, space_of
from fusec.gpu.kernels.norm.resident_norm import ResidentNorm, meet_at_counter
from fusec.ir import Value
from fusec.system.dataclass import dataclass

# Threads of a block, turns whose loads are issued together, and vectors of channels that a block visits together, at
# most. Of many channels, more vectors make longer accesses to memory, and more chunks to merge.
VARIANTS = ((512, 4, 8), (1024, 2, 8), (512, 4, 16), (512, 4, 32))
MERGED = 24  # chunks whose sums a thread loads together, at most
_CUDA = cuda_template(__package__, "batch_norm_resident.cuh")


def plan_resident(plan: RowPlan, most: int, most_lanes: int, figures: GpuFigures) -> RowPlan | None:
    """Adapt a plan to one block for each multiprocessor; None if channels are not contiguous or too many.

    most: threads of a block, at most.
    most_lanes: vectors of channels that a block visits together, at most.
    """
    if plan.row or plan.vector == 1 or not plan.count:
        return None
    lanes = min(most_lanes, power_of_two(plan.groups))
    threads = min(most // lanes, power_of_two(plan.count))
    lanes = max(lanes, 32 // threads)
    plan = replace(plan, lanes=lanes, threads=threads, chunks=1, unrolled=1, whole=1)
    chunks = min(figures.processors // plan.blocks, ceil_div(plan.count, threads))
    return replace(plan, chunks=chunks) if chunks else None


@dataclass(frozen=True)
class BatchNormResident(BatchNormSource, ResidentNorm):
    """One launch for a step; `sums`, which is also `write`, shares the elements.

    unrolled: turns whose loads are issued together.
    figures: their shared memory and cache hold elements between the passes.
    """

    unrolled: int
    figures: GpuFigures
    form: ClassVar[str] = "resident"  # in the names of launches

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
        """Threads that merge the chunks of one channel."""
        return max(1, self.sums.block // self._own)

    @property
    def _rounds(self) -> int:
        """Rounds in which a block merges its channels."""
        return ceil_div(self._own * self._each, self.sums.block)

    @property
    def sum_bytes(self) -> int:
        """Shared memory for sums of warps, their centres, and the factors of channels."""
        numbers = (self._sum_rows + 1 + self.factors) * self._own
        return numbers * (8 if self.kind == "double" else 4)

    @property
    def _sum_rows(self) -> int:
        """Rows of sums: of warps, and then of the threads that merge the chunks of a channel."""
        return self.totals * max(self.sums.block // 32, self._each)

    @property
    def _turn_bytes(self) -> int:
        return sum(self.sums.block * self.sums.vector * v.type.dtype.itemsize for v in self.step.elements)

    @property
    def _numbers(self) -> int:
        """Numbers that a chunk stores for a channel: its sums, filled up to a whole pack."""
        return power_of_two(self.totals)

    @property
    def resident(self) -> int:
        """Turns whose elements stay in shared memory until the sums are known."""
        return max(0, min(self.turns, (self.figures.dynamic_bytes - self.sum_bytes) // self._turn_bytes))

    @property
    def scratch_bytes(self) -> int:
        return self._numbers * self.sums.chunks * self.channels * (8 if self.kind == "double" else 4)

    @cached_property
    def _resident_cuda(self) -> CudaTemplate:
        plan = self.sums
        return _CUDA.bind(
            BLOCK=plan.block,
            BLOCKS=plan.blocks,
            CHANNELS=self.channels,
            CHUNKS=plan.chunks,
            EACH=self._each,
            KIND=self.kind,
            LANES=plan.lanes,
            NUMBERS=self._numbers,
            OWN=self._own,
            UNROLLED=self.unrolled,
            WIDTH=plan.width,
        )

    def launches(self) -> tuple[Launch, ...]:
        plan, arguments = self.sums, Arguments()
        lines = self.resident_body(arguments)
        launch = arguments.launch(f"{self.name}_{self.form}", lines, plan.blocks * plan.chunks, plan.block)
        return (replace(launch, resident_bytes=self.resident_bytes, cooperative=plan.chunks > 1),)

    @property
    def resident_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.resident * self._turn_bytes

    def place(self) -> list[str]:
        """Generate a thread's place."""
        plan = self.sums
        lines = self._resident_cuda(
            "place",
            SUM_ROWS=self._sum_rows,
            FACTORS=self.factors * self._own,
            THREADS=plan.threads,
            GROUPS=plan.groups,
            LAST_GROUP=max(plan.groups - 1, 0),
        )
        return [*lines, *coordinates(plan, "at", reduced=False)]

    def begin_sums(self, arguments: Arguments) -> list[str]:
        """Generate what a thread's sums begin with."""
        return self.load_centre(arguments, f"chunk * {self.sums.threads}u")

    def sum_elements(self, arguments: Arguments) -> list[str]:
        lines = [*self.place(), *self.begin_sums(arguments)]
        code = PointwiseCode(space_of(self.step.x.type, self.sums), arguments)
        self.accumulate(code)
        bare = code.lines()
        for number, value in enumerate(dict.fromkeys(self.step.elements)):
            code.head.append(f"{self._pack(value)} kept{number};")
            code.body.append(f"kept{number}.v[j] = {code.as_stored(value)};")
            code.tail.append(f"{self._place_of(number, value)} = kept{number};")
        return lines + self._first_pass(code.lines(), bare)

    def store_sums(self, arguments: Arguments) -> list[str]:
        scratch, size = arguments.scratch(self.kind), f"{self.kind}({self._rows('chunk')})"
        warps, at = self.sums.block // 32, f"[lane * {self.sums.width}u + w]"
        return self._resident_cuda(
            "merge_warps",
            WARPS=warps,
            SHUFFLES=self.for_each_total("acc#[w] += __shfl_xor_sync(0xffffffffu, acc#[w], s);"),
            STORES=self.for_each_total(f"sums[#u * {warps}u + threadIdx.x / 32u]{at} = acc#[w];"),
            ZEROS=", ".join(self.for_each_total(f"sum# = {self.kind}(0)")),
            ADDITIONS=" ".join(self.for_each_total(f"sum# += sums[#u * {warps}u + k][i];")),
            STATISTICS=self.chunk_statistics("sum0", "sum1", "centres[i]", size),
            SCRATCH=scratch,
            TOTALS=", ".join(self.for_each_total("sum#")),
        )

    def _rows(self, chunk: str) -> str:
        """Return the number of rows of a chunk."""
        plan, whole = self.sums, self.turns - 1
        rest, threads = plan.count - whole * self._stride, plan.threads
        if rest == self._stride:
            return f"{self.turns * threads}u"
        left = f"{rest}u - {chunk} * {threads}u"
        some = f"({rest}u <= {chunk} * {threads}u ? 0u : {left} < {threads}u ? {left} : {threads}u)"
        return f"{whole * threads}u + {some}"

    def _pack(self, value: Value) -> str:
        return f"Pack<{C_TYPES[value.type.dtype]}, {self.sums.vector}>"

    def _place_of(self, number: int, value: Value) -> str:
        """Return the place in shared memory of the elements of turn `slot`."""
        plan, elements = self.sums, list(dict.fromkeys(self.step.elements))
        start = sum(self.resident * plan.block * plan.vector * v.type.dtype.itemsize for v in elements[:number])
        return self.shared_pack(start, "slot", value)

    def shared_pack(self, start: int, number: str, value: Value) -> str:
        """Return a thread's place in shared memory, in pack `number` of each thread from byte `start` on."""
        return self.shared_place(start, number, self._pack(value))

    def shared_place(self, start: int, number: str, c_type: str) -> str:
        """Return such a place of another type."""
        block = self.sums.block
        return f"reinterpret_cast<{c_type}*>(memory + {start}u)[({number}) * {block}u + threadIdx.x]"

    def _first_pass(self, caching: list[str], bare: list[str]) -> list[str]:
        """Generate the first pass. The last turn comes first, and not all threads have it.

        caching: the body of turns that are cached.
        bare: the body of other turns.
        """
        lines = self._last_turn(caching if self.resident else bare, "slot = 0u, ")
        lines += self._turns("slot", 1, self.resident, caching)
        return lines + self._turns("slot", max(1, self.resident), self.turns, bare)

    def _last_turn(self, body: list[str], slot: str = "") -> list[str]:
        """Generate the last turn, which only some threads have."""
        lines = [*coordinates(self.sums, "r", reduced=True), *body]
        if self.sums.count % self._stride:
            lines = [f"if (r < {self.sums.count}u) {{", *lines, "}"]
        return ["{", f"const u32 {slot}r = {(self.turns - 1) * self._stride}u + first;", *lines, "}"]

    def _turns(self, name: str, low: int, high: int, body: list[str], number: str = "") -> list[str]:
        """Loop over the turns from `low` up to `high`.

        name: the variable of the loop, which counts from the last turn on.
        number: number of the turn, as C, if it is another.
        """
        if low >= high:
            return []
        number = number or f"({self.turns - 1}u - {name})"
        row = f"const u32 r = {number} * {self._stride}u + first;"
        turn = ["{", row, *coordinates(self.sums, "r", reduced=True), *body, "}"]
        return self._resident_cuda("turns", NAME=name, FIRST=low, COUNT=high, TURN=turn)

    def _each_channel(self, body: list[str]) -> list[str]:
        """Run the body for each channel of the block."""
        return self._resident_cuda(
            "each_channel",
            ROUNDS=self._rounds,
            SPOTS=self.sums.block // self._each,
            LAST_OWN=self._own - 1,
            LAST_CHANNEL=self.channels - 1,
            BODY=body,
        )

    def load_early(self, arguments: Arguments) -> list[str]:
        """Load the parameters, which `meet` waits for, because a fused update may write them after that."""
        lines: list[str] = []
        body: list[str] = []
        for number, value in enumerate(self.step.parameters):
            lines.append(f"{self.kind} parameter{number}[{self._rounds}];")
            body.append(f"parameter{number}[round] = wide({arguments.read(value)}[c]);")
        return [*lines, *self._each_channel(body)]

    def meet(self, arguments: Arguments) -> list[str]:
        pins = [f"pin(parameter{number}[round]);" for number, _ in enumerate(self.step.parameters)]
        each = self._resident_cuda("each_round", ROUNDS=self._rounds, BODY=pins)
        return [*each, *meet_at_counter(arguments, self.sums.blocks, "team", self.sums.chunks, "chunk")]

    def merge_sums(self, arguments: Arguments) -> list[str]:
        kind, step, each, channels, chunks = self.kind, self.step, self._each, self.channels, self.sums.chunks
        parts = ceil_div(chunks, each)
        together = ceil_div(parts, ceil_div(parts, MERGED))
        turns = f"for (u32 k = 0; k < {together}u; ++k) if (const u32 s = s0 + (k0 + k) * {each}u; s < {chunks}u)"
        merge = self.merge_loop(turns, f"{kind}({self._rows('s')})", self.for_each_total("pairs[k].v[#]"), together)
        centre = self.merge_centre(f"load_fresh({arguments.scratch(kind)} + c * {self._numbers}u)")
        code = PointwiseCode(Space((channels,), ("c",)), arguments, "p")
        code.known |= {value: f"parameter{number}[round]" for number, value in enumerate(step.parameters)}
        factors = self.forward_factors(code) if self.forward else self.backward_factors(code)
        for number, factor in enumerate(factors):
            code.body.append(f"factors[{number * self._own}u + place] = {factor};")
        if step.statistics:
            small = PointwiseCode(code.space, arguments, "q", dict(code.known), dict(code.narrowed))
            small.compute(step.statistics_nodes, step.statistics)
            code.body += ["if (chunk == 0u && real) {", *small.lines(), "}"]
        body = self._resident_cuda(
            "merge_chunks",
            ZEROS=", ".join(self.for_each_total(f"acc#[1] = {{{kind}(0)}}")),
            CENTRE=centre,
            PARTS=parts,
            TOGETHER=together,
            PAIR=self._pair(arguments, "s"),
            MERGE=merge,
            STORES=self.for_each_total(f"sums[#u * {each}u + s0][place] = acc#[0];"),
            ADDITIONS=" ".join(self.for_each_total(f"acc#[0] += sums[#u * {each}u + k][place];")),
            FINISH=code.lines(),
        )
        return [*self._each_channel(body), "__syncthreads();"]

    def _pair(self, arguments: Arguments, chunk: str) -> str:
        """Return the sums of a chunk of channel `c`, as C. chunk: its number, as C."""
        place = f"{arguments.scratch(self.kind)} + ({chunk} * {self.channels}u + c) * {self._numbers}u"
        pack = f"Pack<{self.kind}, {self._numbers}>"
        if self.kind == "float":
            return f"load_fresh(reinterpret_cast<const {pack}*>({place}))"
        return f"{pack}{{{{{', '.join(self.for_each_total(f'load_fresh({place} + #u)'))}}}}}"

    def write_elements(self, arguments: Arguments) -> list[str]:
        """Generate the second pass.

        Elements read last come first, because they may be in the cache. If the cache holds all that is not in shared
        memory, the first rows come last. The next step reads the result from its beginning.
        """
        plan, step = self.sums, self.step
        if not (step.epilogue_outputs or step.epilogue):
            return []
        lines = self.load_factors()
        again = PointwiseCode(space_of(step.x.type, plan), arguments, "w")
        stored = [value for value in step.prologue_outputs if again.space.is_pack(value.type)]
        for number, value in enumerate(stored):  # not by a read-only pointer: its cache may be stale
            source = f"{arguments.write(value)} + ({again.space.offset(value.type)})"
            pack = f"{C_TYPES[value.type.dtype]}, {plan.vector}"
            again.head.append(f"const Pack<{pack}> stored{number} = load_pack<{pack}>({source});")
            again.known[value] = f"wide(stored{number}.v[j])"
        again.compute(self.step.prologue_without(stored))
        cached = PointwiseCode(space_of(step.x.type, plan), arguments, "k")
        for number, value in enumerate(dict.fromkeys(step.elements)):
            cached.head.append(f"const {self._pack(value)} kept{number} = {self._place_of(number, value)};")
            cached.known[value] = f"wide(kept{number}.v[j])"
        cached.compute(self.step.prologue_without(step.elements))
        for code in (again, cached):
            self.normalise(code, "j")
            code.compute(step.epilogue, step.epilogue_outputs)
        uncached, cached_pass = self._uncached_pass(again.lines()), self._cached_pass(cached.lines())
        lines += [*cached_pass, *uncached] if self._is_cached else [*uncached, *cached_pass]
        return ["if (live) {", *lines, "}"]

    def load_factors(self) -> list[str]:
        """Load the factors of a thread's channels."""
        kind, own, width = self.kind, self._own, self.sums.width
        lines: list[str] = []
        for number in range(self.factors):
            at = f"{number * own}u + lane * {width}u"
            lines.append(f"const Pack<{kind}, {width}> f{number} = load_pack<{kind}, {width}>(factors + ({at}));")
        return lines

    @property
    def _is_cached(self) -> bool:
        """Tell if the second-level cache likely holds all elements that are not in shared memory."""
        nbytes = (self.turns - self.resident) * self._turn_bytes * self.sums.chunks * self.sums.blocks
        return nbytes <= self.figures.resident_cache_bytes

    def _uncached_pass(self, body: list[str]) -> list[str]:
        """Visit the elements that are not in shared memory. It has the last turn, if it has any."""
        count = self.turns - max(1, self.resident)
        number = f"({count - 1}u - turn)" if self._is_cached else "turn"
        lines = self._turns("turn", 0, count, body, number)
        return lines if self.resident else lines + self._last_turn(body)

    def _cached_pass(self, body: list[str]) -> list[str]:
        """Visit the elements in shared memory, the last rows first."""
        if not self.resident:
            return []
        return self._last_turn(body, "slot = 0u, ") + self._turns("slot", 1, self.resident, body)
