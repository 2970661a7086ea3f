"""Sources of group norms in one launch: blocks keep their part of an image in registers, tell each other what it comes
to, and go on with what they kept.

Blocks that share an image's groups are a cluster, whose blocks write into each other's shared memory; on GPUs without
clusters they meet at a door, and all of them must be there at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.kernel import C_TYPES, CLUSTERS, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.mma_tiles import nested
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import Chain, Space
from fusec.ir import DType, Node, Value
from fusec.ops import GroupNorm

WARP = 32
DOOR_BYTES = 16  # in front of what the blocks of a cluster send each other


@dataclass(frozen=True)
class Share:
    """`blocks` share some groups of an image, of `own` channels: each goes through `rows` pixels at once."""

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
        """Those of the last one, if there is any for it."""
        return self.pixels - (self.blocks - 1) * self.each

    @property
    def turns(self) -> int:
        return ceil_div(self.each, self.rows)

    @property
    def is_even(self) -> bool:
        """Whether all threads have as much to do."""
        return self.each == self.turns * self.rows and self.rest == self.each


@dataclass(frozen=True)
class GroupSource:
    """The source for a norm, nodes before and behind it, and what is stored of these (early, late)."""

    anchor: Node
    op: GroupNorm
    before: Sequence[Node]
    behind: Sequence[Node]
    early: Sequence[Value]
    late: Sequence[Value]
    share: Share

    @property
    def _x(self) -> Value:
        return self.anchor.operands[0]

    @property
    def _members(self) -> int:
        """Channels of a group."""
        return self._x.type.shape[1] // self.op.groups

    @property
    def _groups(self) -> int:
        """Of a block."""
        return self.share.own // self._members

    @property
    def _columns(self) -> int:
        """Into which the channels of an image fall, each for other blocks."""
        return self._x.type.shape[1] // self.share.own

    @property
    def _parts(self) -> int:
        """Groups that a vector may have channels of."""
        v, m = self.share.vector, self._members
        return max((lane * v + v - 1) // m - lane * v // m + 1 for lane in range(self.share.lanes))

    @property
    def _vectors(self) -> int:
        """That a group may have channels in."""
        v, m = self.share.vector, self._members
        return max((g * m + m - 1) // v - g * m // v + 1 for g in range(self._groups))

    @property
    def shared_bytes(self) -> int:
        """That the source declares."""
        alone = 2 * self._groups if self.share.blocks == 1 else 0
        return 4 * (2 * self._parts * self.share.block + 3 * self.share.own + alone)

    def kernel(self) -> Kernel:
        share, arguments = self.share, Arguments()
        teams = self._x.type.shape[0] * self._columns
        lines = [*self._begun(), *self._taken(arguments), *self._summed(), *self._together(arguments, teams)]
        lines += self._written(arguments)
        cluster = share.blocks if share.clustered else 1
        launch = arguments.launch("group_norm_kept", lines, teams * share.blocks, share.block, cluster=cluster)
        if share.clustered:
            launch = replace(launch, architecture=CLUSTERS)
        else:
            launch = replace(launch, meets=share.blocks > 1)
        launch = replace(launch, resident_bytes=self._met_bytes)
        scratch_bytes = 8 * launch.grid * self._groups if launch.meets else 0
        name = "+".join(node.op.name for node in (*self.before, self.anchor, *self.behind))
        return Kernel(name, (launch,), scratch_bytes)

    def _begun(self) -> list[str]:
        """Which image, channels and pixels a thread is about."""
        share = self.share
        lines = ["RESIDENT(told);"] if share.clustered else []
        if share.clustered:
            lines.append("u64* door = reinterpret_cast<u64*>(told);")
            lines.append(f"float* met = reinterpret_cast<float*>(told + {DOOR_BYTES});")
        lines += [f"__shared__ float met[{2 * self._groups}];"] if share.blocks == 1 else []
        tables = ", ".join(f"{name}[{share.lanes}]" for name in ("means", "factors", "shifts"))
        lines += [
            f"__shared__ float parts[2][{self._parts}][{share.block}];",
            f"__shared__ Pack<float, {share.vector}> {tables};",
            f"const u32 lane = threadIdx.x % {share.lanes}u, row = threadIdx.x / {share.lanes}u;",
            f"const u32 team = blockIdx.x / {share.blocks}u, chunk = blockIdx.x % {share.blocks}u;",
            f"const u32 image = team / {self._columns}u, own = lane * {share.vector}u;",
            f"const u32 channel = team % {self._columns}u * {share.own}u + own;",
            f"const u32 begin = chunk * {share.each}u;",
        ]
        if not share.is_even:
            last = f"chunk == {share.blocks - 1}u ? {share.pixels}u : begin + {share.each}u"
            lines.append(f"const u32 end = {last};")
        if share.clustered:
            lines.append(f"cluster_begins(door, {8 * share.blocks * self._groups}u);")
        return lines

    @property
    def _met_bytes(self) -> int:
        sent = ceil_div(8 * self.share.blocks * self._groups, 16) * 16
        return DOOR_BYTES + sent if self.share.clustered else 0

    @property
    def _pack(self) -> str:
        return f"Pack<{C_TYPES[self._x.type.dtype]}, {self.share.vector}>"

    def _space(self) -> Space:
        x = self._x.type
        return Space(x.shape, ("image", "channel", *(None,) * (x.rank - 3), "p"), 1, self.share.vector)

    def _pixel(self) -> str:
        """Of turn `i`."""
        return f"begin + row + i * {self.share.rows}u"

    def _taken(self, arguments: Arguments) -> list[str]:
        """What a thread keeps, in `taken`: what lies beyond the end is the first pixel again."""
        share, chain, c_type = self.share, Chain(self._space(), arguments), C_TYPES[self._x.type.dtype]
        pack = f"{c_type}, {share.vector}"
        lines = [f"Pack<{pack}> taken[{share.turns}];", "#pragma unroll"]
        lines.append(f"for (u32 i = 0; i < {share.turns}u; ++i) {{")
        if share.is_even:
            lines.append(f"const u32 p = {self._pixel()};")
        else:
            lines.append(f"const u32 wanted = {self._pixel()}, p = wanted < end ? wanted : begin;")
        if not self.before:
            place = f"{arguments.read(self._x)} + ({chain.space.offset(self._x.type)})"
            return [*lines, f"taken[i] = load_pack<{pack}>({place});", "}"]
        for node in self.before:
            chain.apply(node)
        for value in self.early:
            chain.store(value)
        chain.inside.append(f"taken[i].v[j] = {chain.as_stored(self._x)};")
        return [*lines, *chain.lines(), "}"]

    def _each_element(self, *body: str) -> list[str]:
        """The body for each element `e` that a thread kept; it is `live` if it is there."""
        share = self.share
        live = "true" if share.is_even else f"{self._pixel()} < end"
        loops = nested([("j", share.vector)], "const float e = wide(pack.v[j]);", *body)
        loops = [f"const {self._pack} pack = taken[i];", *loops]
        head = ["#pragma unroll", f"for (u32 i = 0; i < {share.turns}u; ++i) {{"]
        return [*head, f"const bool live = {live};", *loops, "}"]

    def _turns(self, row: str) -> str:
        """Pixels that the threads of a row have."""
        share = self.share
        if share.is_even:
            return f"{share.turns}u"
        left = f"end - begin + {share.rows - 1}u - {row}"
        return f"({left}) / {share.rows}u"

    def _summed(self) -> list[str]:
        """Of each thread, for each group that it has channels of: the mean of its elements, and squares around that,
        both from sums around one of them."""
        v, parts, m, mine = self.share.vector, self._parts, self._members, self._mine
        lines = [f"float sums[{v}], squares[{v}], around[{v}], mean_of[{parts}], squares_of[{parts}];"]
        lines += [f"const u32 first = own / {m}u;", f"const float turns = float({self._turns('row')});"]
        lines += [] if parts == 1 else [f"const int split = (first + 1u) * {m}u - own;"]
        lines.append(f"const {self._pack} start = taken[0u];")
        own = [f"mean_of[k] = wide(start.v[k == 0 ? 0 : {v - 1}]);"]
        if parts > 2:
            each = nested([("j", v)], f"if (0 < k && k < {parts - 1} && {mine}) mean_of[k] = wide(start.v[j]);")
            own += each
        spread = nested([("j", v)], f"if ({mine}) around[j] = mean_of[k];")
        lines += nested([("k", parts)], *own, *spread)
        lines += nested([("j", v)], "sums[j] = squares[j] = 0.0f;")
        added = "const float d = live ? e - around[j] : 0.0f;", "sums[j] += d;", "squares[j] += d * d;"
        lines += self._each_element(*added)
        count = [f"const float count = turns * {v}.0f;"]
        if parts > 1:
            low, high = f"k == 0 ? 0 : split + (k - 1) * {m}", f"k == {parts - 1} ? {v} : split + k * {m}"
            count = [f"const int low = {low}, high = {high};"]
            count.append(f"const float count = turns * float((high < {v} ? high : {v}) - (low < {v} ? low : {v}));")
        together = nested([("j", v)], f"if ({mine}) {{ sum += sums[j]; square += squares[j]; }}")
        ended = [
            "const float mean = quick_div(sum, count), spread = less(square, sum * mean);",
            "mean_of[k] = count > 0.0f ? mean_of[k] + mean : 0.0f;",
            "squares_of[k] = count > 0.0f ? spread : 0.0f;",
        ]
        return [*lines, *nested([("k", parts)], *count, "float sum = 0.0f, square = 0.0f;", *together, *ended)]

    @property
    def _mine(self) -> str:
        """Whether channel `j` of a thread belongs to the group that is number `k` of the thread's."""
        m, last = self._members, self._parts - 1
        return f"(k == 0 || j >= split + (k - 1) * {m}) && (k == {last} || j < split + k * {m})" if last else "true"

    def _together(self, arguments: Arguments, teams: int) -> list[str]:
        """Mean and factor of each group of a block, in `means` and `factors`."""
        share, groups = self.share, self._groups
        lines = ["cluster_is_there();"] if share.clustered else []  # all its blocks are there
        stored = "parts[0][k][threadIdx.x] = mean_of[k];", "parts[1][k][threadIdx.x] = squares_of[k];"
        lines += [*nested([("k", self._parts)], *stored), "__syncthreads();"]
        scratch = arguments.scratch() if share.blocks > 1 and not share.clustered else ""
        if share.clustered:
            place = f"met + 2u * (chunk * {groups}u + g)"
            lines += self._of_block(
                f"if (at < {share.blocks}u) send({place}, Pack<float, 2>{{{{mean, spread}}}}, door, at);"
            )
            lines += [*self._parameters(arguments), "wait_for_peers(door);"]
            return lines + self._of_all(lambda c, n: f"met[2u * ({c} * {groups}u + g) + {n}u]")
        if share.blocks > 1:
            place = f"{scratch} + 2u * (blockIdx.x * {groups}u + g)"
            lines += self._of_block(f"if (at == 0u) {{ ({place})[0] = mean; ({place})[1] = spread; }}")
            door = f"{arguments.doors(teams)} + team * DOOR"
            lines += [*self._parameters(arguments), f"meet({door}, {share.blocks}u);"]
            first = f"{scratch} + 2u * (team * {share.blocks * groups}u + g)"
            return lines + self._of_all(lambda c, n: f"across({first} + {c} * {2 * groups} + {n})")
        lines += self._of_block("if (at == 0u) { met[2u * g] = mean; met[2u * g + 1u] = spread; }")
        return [
            *lines,
            *self._parameters(arguments),
            "__syncthreads();",
            *self._of_all(lambda _, n: f"met[2u * g + {n}u]"),
        ]

    def _of_block(self, then: str) -> list[str]:
        """A warp for each group, which goes on with its mean and the squares around that, `spread`; both from sums
        around the first thread's mean."""
        share, m, v = self.share, self._members, self.share.vector
        inside = "" if self._is_uniform else "if (low + s <= high)"
        entry = f"r * {share.lanes}u + low + s"

        each = f"1.0f / {share.each * m}.0f" if share.is_even else f"1.0f / float((end - begin) * {m}u)"
        return [
            f"for (u32 g = threadIdx.x / {WARP}u; g < {self._groups}u; g += {share.block // WARP}u) {{",
            f"const u32 at = threadIdx.x % {WARP}u, low = g * {m}u / {v}u, high = (g * {m}u + {m - 1}u) / {v}u;",
            f"const float near = parts[0][g - low * {v}u / {m}u][low];",
            "float sum = 0.0f, square = 0.0f;",
            *("#pragma unroll", f"for (u32 s = 0; s < {self._vectors}u; ++s) {inside} {{"),
            f"const u32 l = (low + s) * {v}u, k = g - l / {m}u, h = l + {v}u, o = g * {m}u;",
            f"const float channels = float((h < o + {m}u ? h : o + {m}u) - (l > o ? l : o));",
            *("#pragma unroll", f"for (u32 r = at; r < {share.rows}u; r += {WARP}u) {{"),
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
        """Whether all groups have channels in as many vectors."""
        v, m = self.share.vector, self._members
        return len({(g * m + m - 1) // v - g * m // v for g in range(self._groups)}) == 1

    def _of_all(self, part: Callable[[str, int], str]) -> list[str]:
        """What blocks came to together, for each channel by a thread of its own. part: mean or squares of block `c` for
        group `g`."""
        share, m = self.share, self._members
        count, loops = f"{share.each * m}.0f", [("c", share.blocks)]
        if share.rest != share.each:
            count = f"(c == {share.blocks - 1}u ? {share.rest * m}.0f : {count})"
        return [
            f"if (threadIdx.x < {share.own}u) {{",
            f"const u32 g = threadIdx.x / {m}u;",
            f"float mean_of_block[{share.blocks}], squares_of_block[{share.blocks}], sum = 0.0f, spread = 0.0f;",
            *nested(loops, f"mean_of_block[c] = {part('c', 0)};", f"squares_of_block[c] = {part('c', 1)};"),
            *nested(loops, f"sum += {count} * (mean_of_block[c] - mean_of_block[0]);"),
            f"const float mean = mean_of_block[0] + sum * (1.0f / {share.pixels * m}.0f);",
            *nested(
                loops,
                "const float d = mean_of_block[c] - mean;",
                f"spread += squares_of_block[c] + {count} * d * d;",
            ),
            f"const float variance = spread * (1.0f / {share.pixels * m}.0f);",
            f"const u32 of = threadIdx.x / {share.vector}u, j = threadIdx.x % {share.vector}u;",
            "means[of].v[j] = mean;",
            f"factors[of].v[j] = scale / sqrt(variance + {literal(self.op.epsilon, DType.F32)});",
            "shifts[of].v[j] = shift;",
            "}",
            "__syncthreads();",
        ]

    def _parameters(self, arguments: Arguments) -> list[str]:
        """Scale and bias of a channel, asked for while blocks wait."""
        first = f"team % {self._columns}u * {self.share.own}u + threadIdx.x"
        pointers = zip(("scale", "shift"), (arguments.read(v) for v in self.anchor.operands[1:]), strict=True)
        mine = f"threadIdx.x < {self.share.own}u"
        return [f"const float {name} = {mine} ? wide({pointer}[{first}]) : 0.0f;" for name, pointer in pointers]

    def _written(self, arguments: Arguments) -> list[str]:
        share, chain = self.share, Chain(self._space(), arguments, "w")
        pack = f"Pack<float, {share.vector}>"
        pairs = (("mean", "means"), ("factor", "factors"), ("shift_of", "shifts"))
        lines = [f"const {pack} {name} = {table}[lane];" for name, table in pairs]
        chain.before.append(f"const {self._pack} pack = taken[i];")
        chain.known[self._x] = "wide(pack.v[j])"
        chain.define(self.anchor.result, "(wide(pack.v[j]) - mean.v[j]) * factor.v[j] + shift_of.v[j]")
        for node in self.behind:
            chain.apply(node)
        for value in self.late:
            chain.store(value)
        lines += ["#pragma unroll", f"for (u32 i = 0; i < {share.turns}u; ++i) {{", f"const u32 p = {self._pixel()};"]
        return [*lines, *([] if share.is_even else ["if (p < end)"]), *chain.lines(), "}"]
