"""Generate group norms in one launch: blocks keep their part of an image in registers and exchange its statistics.

Blocks that share the groups of an image form a cluster and write into each other's shared memory. On GPUs without
clusters they wait for each other at a barrier counter in memory, so all must run at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.kernel import C_TYPES, CLUSTERS, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import unrolled_loops
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space
from fusec.ir import DType, Node, Value
from fusec.ops import GroupNorm

WARP = 32
DOOR_BYTES = 16  # for the barrier, before the numbers that the blocks of a cluster send each other


@dataclass(frozen=True)
class GroupTiling:
    """Shares of an image among blocks.

    own: channels of a block, in whole groups.
    vector: channels of one load.
    rows: pixels that a block visits together.
    blocks: blocks that share the groups.
    pixels: pixels of an image.
    clustered: the blocks form a cluster.
    """

    own: int
    vector: int
    rows: int
    blocks: int
    pixels: int
    clustered: bool

    @property
    def lanes(self) -> int:
        """Vectors of a pixel."""
        return self.own // self.vector

    @property
    def block(self) -> int:
        return self.rows * self.lanes

    @property
    def each(self) -> int:
        """Pixels of a block; the last one may have fewer."""
        return ceil_div(self.pixels, self.blocks)

    @property
    def rest(self) -> int:
        """Pixels of the last block; not positive if there are none for it."""
        return self.pixels - (self.blocks - 1) * self.each

    @property
    def turns(self) -> int:
        return ceil_div(self.each, self.rows)

    @property
    def is_even(self) -> bool:
        """Tell if all threads have equally many elements."""
        return self.each == self.turns * self.rows and self.rest == self.each


@dataclass(frozen=True)
class GroupSource:
    """The source of a norm with a prologue and an epilogue."""

    anchor: Node
    op: GroupNorm
    prologue: Sequence[Node]
    epilogue: Sequence[Node]
    prologue_outputs: Sequence[Value]
    epilogue_outputs: Sequence[Value]
    tiling: GroupTiling

    @property
    def _x(self) -> Value:
        return self.anchor.operands[0]

    @property
    def _members(self) -> int:
        """Channels of a group."""
        return self._x.type.shape[1] // self.op.groups

    @property
    def _groups(self) -> int:
        """Groups of a block."""
        return self.tiling.own // self._members

    @property
    def _columns(self) -> int:
        """Blocks for all channels of a pixel."""
        return self._x.type.shape[1] // self.tiling.own

    @property
    def _parts(self) -> int:
        """Groups that a vector may have channels of, at most."""
        v, m = self.tiling.vector, self._members
        return max((lane * v + v - 1) // m - lane * v // m + 1 for lane in range(self.tiling.lanes))

    @property
    def _vectors(self) -> int:
        """Vectors that a group may have channels in, at most."""
        v, m = self.tiling.vector, self._members
        return max((g * m + m - 1) // v - g * m // v + 1 for g in range(self._groups))

    @property
    def shared_bytes(self) -> int:
        """Static shared memory of a block."""
        alone = 2 * self._groups if self.tiling.blocks == 1 else 0
        return 4 * (2 * self._parts * self.tiling.block + 3 * self.tiling.own + alone)

    def kernel(self) -> Kernel:
        tiling, arguments = self.tiling, Arguments()
        teams = self._x.type.shape[0] * self._columns
        lines = [
            *self._setup(),
            *self._load_elements(arguments),
            *self._thread_statistics(),
            *self._merge_threads(arguments, teams),
        ]
        lines += self._write(arguments)
        cluster = tiling.blocks if tiling.clustered else 1
        launch = arguments.launch("group_norm_kept", lines, teams * tiling.blocks, tiling.block, cluster=cluster)
        if tiling.clustered:
            launch = replace(launch, architecture=CLUSTERS)
        else:
            launch = replace(launch, meets=tiling.blocks > 1)
        launch = replace(launch, resident_bytes=self._exchange_bytes)
        scratch_bytes = 8 * launch.grid * self._groups if launch.meets else 0
        name = "+".join(node.op.name for node in (*self.prologue, self.anchor, *self.epilogue))
        return Kernel(name, (launch,), scratch_bytes)

    def _setup(self) -> list[str]:
        """Declare shared memory, and which image, channels and pixels a thread handles."""
        tiling = self.tiling
        lines = ["RESIDENT(told);"] if tiling.clustered else []
        if tiling.clustered:
            lines.append("u64* door = reinterpret_cast<u64*>(told);")
            lines.append(f"float* met = reinterpret_cast<float*>(told + {DOOR_BYTES});")
        lines += [f"__shared__ float met[{2 * self._groups}];"] if tiling.blocks == 1 else []
        tables = ", ".join(f"{name}[{tiling.lanes}]" for name in ("means", "factors", "shifts"))
        lines += [
            f"__shared__ float parts[2][{self._parts}][{tiling.block}];",
            f"__shared__ Pack<float, {tiling.vector}> {tables};",
            f"const u32 lane = threadIdx.x % {tiling.lanes}u, row = threadIdx.x / {tiling.lanes}u;",
            f"const u32 team = blockIdx.x / {tiling.blocks}u, chunk = blockIdx.x % {tiling.blocks}u;",
            f"const u32 image = team / {self._columns}u, own = lane * {tiling.vector}u;",
            f"const u32 channel = team % {self._columns}u * {tiling.own}u + own;",
            f"const u32 begin = chunk * {tiling.each}u;",
        ]
        if not tiling.is_even:
            last = f"chunk == {tiling.blocks - 1}u ? {tiling.pixels}u : begin + {tiling.each}u"
            lines.append(f"const u32 end = {last};")
        if tiling.clustered:
            lines.append(f"cluster_begins(door, {8 * tiling.blocks * self._groups}u);")
        return lines

    @property
    def _exchange_bytes(self) -> int:
        sent = ceil_div(8 * self.tiling.blocks * self._groups, 16) * 16
        return DOOR_BYTES + sent if self.tiling.clustered else 0

    @property
    def _pack(self) -> str:
        return f"Pack<{C_TYPES[self._x.type.dtype]}, {self.tiling.vector}>"

    def _space(self) -> Space:
        x = self._x.type
        return Space(x.shape, ("image", "channel", *(None,) * (x.rank - 3), "p"), 1, self.tiling.vector)

    def _pixel(self) -> str:
        """Return the pixel of turn `i`."""
        return f"begin + row + i * {self.tiling.rows}u"

    def _load_elements(self, arguments: Arguments) -> list[str]:
        """Load the elements that a thread keeps into `taken`. Past the end it loads the first pixel again."""
        tiling, code, c_type = self.tiling, PointwiseCode(self._space(), arguments), C_TYPES[self._x.type.dtype]
        pack = f"{c_type}, {tiling.vector}"
        lines = [f"Pack<{pack}> taken[{tiling.turns}];", "#pragma unroll"]
        lines.append(f"for (u32 i = 0; i < {tiling.turns}u; ++i) {{")
        if tiling.is_even:
            lines.append(f"const u32 p = {self._pixel()};")
        else:
            lines.append(f"const u32 wanted = {self._pixel()}, p = wanted < end ? wanted : begin;")
        if not self.prologue:
            place = f"{arguments.read(self._x)} + ({code.space.offset(self._x.type)})"
            return [*lines, f"taken[i] = load_pack<{pack}>({place});", "}"]
        for node in self.prologue:
            code.apply(node)
        for value in self.prologue_outputs:
            code.store(value)
        code.body.append(f"taken[i].v[j] = {code.as_stored(self._x)};")
        return [*lines, *code.lines(), "}"]

    def _each_element(self, *body: str) -> list[str]:
        """Run the body for each element `e` that a thread keeps; `live` tells if it exists."""
        tiling = self.tiling
        live = "true" if tiling.is_even else f"{self._pixel()} < end"
        loops = unrolled_loops([("j", tiling.vector)], "const float e = wide(pack.v[j]);", *body)
        loops = [f"const {self._pack} pack = taken[i];", *loops]
        head = ["#pragma unroll", f"for (u32 i = 0; i < {tiling.turns}u; ++i) {{"]
        return [*head, f"const bool live = {live};", *loops, "}"]

    def _turns(self, row: str) -> str:
        """Return the number of pixels that the threads of a row have."""
        tiling = self.tiling
        if tiling.is_even:
            return f"{tiling.turns}u"
        left = f"end - begin + {tiling.rows - 1}u - {row}"
        return f"({left}) / {tiling.rows}u"

    def _thread_statistics(self) -> list[str]:
        """Compute for each group of a thread the mean of its elements, and squares around it.

        Both come from sums around one of the elements.
        """
        v, parts, m, mine = self.tiling.vector, self._parts, self._members, self._mine
        lines = [f"float sums[{v}], squares[{v}], around[{v}], mean_of[{parts}], squares_of[{parts}];"]
        lines += [f"const u32 first = own / {m}u;", f"const float turns = float({self._turns('row')});"]
        lines += [] if parts == 1 else [f"const int split = (first + 1u) * {m}u - own;"]
        lines.append(f"const {self._pack} start = taken[0u];")
        own = [f"mean_of[k] = wide(start.v[k == 0 ? 0 : {v - 1}]);"]
        if parts > 2:
            each = unrolled_loops([("j", v)], f"if (0 < k && k < {parts - 1} && {mine}) mean_of[k] = wide(start.v[j]);")
            own += each
        spread = unrolled_loops([("j", v)], f"if ({mine}) around[j] = mean_of[k];")
        lines += unrolled_loops([("k", parts)], *own, *spread)
        lines += unrolled_loops([("j", v)], "sums[j] = squares[j] = 0.0f;")
        added = "const float d = live ? e - around[j] : 0.0f;", "sums[j] += d;", "squares[j] += d * d;"
        lines += self._each_element(*added)
        count = [f"const float count = turns * {v}.0f;"]
        if parts > 1:
            low, high = f"k == 0 ? 0 : split + (k - 1) * {m}", f"k == {parts - 1} ? {v} : split + k * {m}"
            count = [f"const int low = {low}, high = {high};"]
            count.append(f"const float count = turns * float((high < {v} ? high : {v}) - (low < {v} ? low : {v}));")
        together = unrolled_loops([("j", v)], f"if ({mine}) {{ sum += sums[j]; square += squares[j]; }}")
        ended = [
            "const float mean = quick_div(sum, count), spread = less(square, sum * mean);",
            "mean_of[k] = count > 0.0f ? mean_of[k] + mean : 0.0f;",
            "squares_of[k] = count > 0.0f ? spread : 0.0f;",
        ]
        return [*lines, *unrolled_loops([("k", parts)], *count, "float sum = 0.0f, square = 0.0f;", *together, *ended)]

    @property
    def _mine(self) -> str:
        """Condition that channel `j` of a thread belongs to its group number `k`."""
        m, last = self._members, self._parts - 1
        return f"(k == 0 || j >= split + (k - 1) * {m}) && (k == {last} || j < split + k * {m})" if last else "true"

    def _merge_threads(self, arguments: Arguments, teams: int) -> list[str]:
        """Compute mean and factor of each group of a block, in `means` and `factors`."""
        tiling, groups = self.tiling, self._groups
        lines = ["cluster_is_there();"] if tiling.clustered else []  # all its blocks are there
        stored = "parts[0][k][threadIdx.x] = mean_of[k];", "parts[1][k][threadIdx.x] = squares_of[k];"
        lines += [*unrolled_loops([("k", self._parts)], *stored), "__syncthreads();"]
        scratch = arguments.scratch() if tiling.blocks > 1 and not tiling.clustered else ""
        if tiling.clustered:
            place = f"met + 2u * (chunk * {groups}u + g)"
            lines += self._merge_block(
                f"if (at < {tiling.blocks}u) send({place}, Pack<float, 2>{{{{mean, spread}}}}, door, at);"
            )
            lines += [*self._parameters(arguments), "wait_for_peers(door);"]
            return lines + self._merge_all(lambda c, n: f"met[2u * ({c} * {groups}u + g) + {n}u]")
        if tiling.blocks > 1:
            place = f"{scratch} + 2u * (blockIdx.x * {groups}u + g)"
            lines += self._merge_block(f"if (at == 0u) {{ ({place})[0] = mean; ({place})[1] = spread; }}")
            door = f"{arguments.doors(teams)} + team * DOOR"
            lines += [*self._parameters(arguments), f"meet({door}, {tiling.blocks}u);"]
            first = f"{scratch} + 2u * (team * {tiling.blocks * groups}u + g)"
            return lines + self._merge_all(lambda c, n: f"across({first} + {c} * {2 * groups} + {n})")
        lines += self._merge_block("if (at == 0u) { met[2u * g] = mean; met[2u * g + 1u] = spread; }")
        return [
            *lines,
            *self._parameters(arguments),
            "__syncthreads();",
            *self._merge_all(lambda _, n: f"met[2u * g + {n}u]"),
        ]

    def _merge_block(self, then: str) -> list[str]:
        """Merge each group of a block by one warp, which then runs `then`.

        `mean` and `spread` come from sums around the first thread's mean.
        """
        tiling, m, v = self.tiling, self._members, self.tiling.vector
        inside = "" if self._is_uniform else "if (low + s <= high)"
        entry = f"r * {tiling.lanes}u + low + s"

        each = f"1.0f / {tiling.each * m}.0f" if tiling.is_even else f"1.0f / float((end - begin) * {m}u)"
        return [
            f"for (u32 g = threadIdx.x / {WARP}u; g < {self._groups}u; g += {tiling.block // WARP}u) {{",
            f"const u32 at = threadIdx.x % {WARP}u, low = g * {m}u / {v}u, high = (g * {m}u + {m - 1}u) / {v}u;",
            f"const float near = parts[0][g - low * {v}u / {m}u][low];",
            "float sum = 0.0f, square = 0.0f;",
            *("#pragma unroll", f"for (u32 s = 0; s < {self._vectors}u; ++s) {inside} {{"),
            f"const u32 l = (low + s) * {v}u, k = g - l / {m}u, h = l + {v}u, o = g * {m}u;",
            f"const float channels = float((h < o + {m}u ? h : o + {m}u) - (l > o ? l : o));",
            *("#pragma unroll", f"for (u32 r = at; r < {tiling.rows}u; r += {WARP}u) {{"),
            f"const float d = parts[0][k][{entry}] - near, weight = float({self._turns('r')}) * channels;",
            f"sum += weight * d; square += parts[1][k][{entry}] + weight * d * d;",
            *("}", "}", "#pragma unroll", "for (int s = 16; s > 0; s /= 2) {"),
            "sum += __shfl_xor_sync(0xffffffffu, sum, s);",
            *("square += __shfl_xor_sync(0xffffffffu, square, s);", "}"),
            f"const float far = sum * ({each}), mean = near + far, spread = less(square, sum * far);",
            then,
            "}",
        ]

    @property
    def _is_uniform(self) -> bool:
        """Tell if all groups have channels in equally many vectors."""
        v, m = self.tiling.vector, self._members
        return len({(g * m + m - 1) // v - g * m // v for g in range(self._groups)}) == 1

    def _merge_all(self, part: Callable[[str, int], str]) -> list[str]:
        """Merge the statistics of blocks, for each channel by one thread.

        part: returns mean (0) or squares (1) of block `c` for group `g`.
        """
        tiling, m = self.tiling, self._members
        count, loops = f"{tiling.each * m}.0f", [("c", tiling.blocks)]
        if tiling.rest != tiling.each:
            count = f"(c == {tiling.blocks - 1}u ? {tiling.rest * m}.0f : {count})"
        return [
            f"if (threadIdx.x < {tiling.own}u) {{",
            f"const u32 g = threadIdx.x / {m}u;",
            f"float mean_of_block[{tiling.blocks}], squares_of_block[{tiling.blocks}], sum = 0.0f, spread = 0.0f;",
            *unrolled_loops(loops, f"mean_of_block[c] = {part('c', 0)};", f"squares_of_block[c] = {part('c', 1)};"),
            *unrolled_loops(loops, f"sum += {count} * (mean_of_block[c] - mean_of_block[0]);"),
            f"const float mean = mean_of_block[0] + sum * (1.0f / {tiling.pixels * m}.0f);",
            *unrolled_loops(
                loops,
                "const float d = mean_of_block[c] - mean;",
                f"spread += squares_of_block[c] + {count} * d * d;",
            ),
            f"const float variance = spread * (1.0f / {tiling.pixels * m}.0f);",
            f"const u32 of = threadIdx.x / {tiling.vector}u, j = threadIdx.x % {tiling.vector}u;",
            "means[of].v[j] = mean;",
            f"factors[of].v[j] = scale / sqrt(variance + {literal(self.op.epsilon, DType.F32)});",
            "shifts[of].v[j] = shift;",
            "}",
            "__syncthreads();",
        ]

    def _parameters(self, arguments: Arguments) -> list[str]:
        """Load scale and bias of a channel while blocks wait."""
        first = f"team % {self._columns}u * {self.tiling.own}u + threadIdx.x"
        pointers = zip(("scale", "shift"), (arguments.read(v) for v in self.anchor.operands[1:]), strict=True)
        mine = f"threadIdx.x < {self.tiling.own}u"
        return [f"const float {name} = {mine} ? wide({pointer}[{first}]) : 0.0f;" for name, pointer in pointers]

    def _write(self, arguments: Arguments) -> list[str]:
        tiling, code = self.tiling, PointwiseCode(self._space(), arguments, "w")
        pack = f"Pack<float, {tiling.vector}>"
        pairs = (("mean", "means"), ("factor", "factors"), ("shift_of", "shifts"))
        lines = [f"const {pack} {name} = {table}[lane];" for name, table in pairs]
        code.head.append(f"const {self._pack} pack = taken[i];")
        code.known[self._x] = "wide(pack.v[j])"
        code.define(self.anchor.result, "(wide(pack.v[j]) - mean.v[j]) * factor.v[j] + shift_of.v[j]")
        for node in self.epilogue:
            code.apply(node)
        for value in self.epilogue_outputs:
            code.store(value)
        lines += ["#pragma unroll", f"for (u32 i = 0; i < {tiling.turns}u; ++i) {{", f"const u32 p = {self._pixel()};"]
        return [*lines, *([] if tiling.is_even else ["if (p < end)"]), *code.lines(), "}"]
