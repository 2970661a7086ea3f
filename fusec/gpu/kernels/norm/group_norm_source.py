"""Generate group norms in one launch: blocks keep their part of an image in registers and exchange its statistics.

Blocks that share the groups of an image form a cluster and write into each other's shared memory. On GPUs without
clusters they wait for each other at a barrier counter in memory, so all must run at the same time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, CLUSTERS, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space
from fusec.gpu.kernels.norm.resident_norm import ResidentNorm, meet_at_counter
from fusec.gpu.kernels.norm.row_step import RowStep
from fusec.ir import DType
from fusec.ops import GroupNorm
from fusec.system.dataclass import dataclass

WARP = 32
MBARRIER_BYTES = 16  # for the barrier, before the numbers that the blocks of a cluster send each other
_CUDA = cuda_template(__package__, "group_norm.cuh")


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
class GroupSource(ResidentNorm):
    """The source of a norm with a prologue and an epilogue."""

    step: RowStep
    tiling: GroupTiling

    @property
    def _op(self) -> GroupNorm:
        assert isinstance(self.step.op, GroupNorm)
        return self.step.op

    @property
    def _members(self) -> int:
        """Channels of a group."""
        return self.step.x.type.shape[1] // self._op.groups

    @property
    def _groups(self) -> int:
        """Groups of a block."""
        return self.tiling.own // self._members

    @property
    def _columns(self) -> int:
        """Blocks for all channels of a pixel."""
        return self.step.x.type.shape[1] // self.tiling.own

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

    @cached_property
    def _cuda(self) -> CudaTemplate:
        tiling = self.tiling
        return _CUDA.bind(
            BLOCK=tiling.block,
            BLOCKS=tiling.blocks,
            GROUPS=self._groups,
            IN_PART=self._in_part,
            LANES=tiling.lanes,
            LAST_PART=self._parts - 1,
            MEMBERS=self._members,
            OWN=tiling.own,
            PACK=self._pack,
            PARTS=self._parts,
            PIXEL=f"begin + row + i * {tiling.rows}u",
            ROWS=tiling.rows,
            TURNS=tiling.turns,
            VECTOR=tiling.vector,
        )

    def kernel(self) -> Kernel:
        tiling, arguments, grid = self.tiling, Arguments(), self._teams * self.tiling.blocks
        cluster = tiling.blocks if tiling.clustered else 1
        lines = self.resident_body(arguments)
        launch = arguments.launch("group_norm_resident", lines, grid, tiling.block, cluster=cluster)
        if tiling.clustered:
            launch = replace(
                launch, architecture=CLUSTERS, resident_bytes=MBARRIER_BYTES + ceil_div(self._sent, 16) * 16
            )
        else:
            launch = replace(launch, cooperative=tiling.blocks > 1)
        scratch_bytes = 8 * grid * self._groups if launch.cooperative else 0
        return Kernel(self.step.name, (launch,), scratch_bytes)

    @property
    def _teams(self) -> int:
        return self.step.x.type.shape[0] * self._columns

    @property
    def _sent(self) -> int:
        """Bytes that a block of a cluster is sent: mean and squares of each group by each block."""
        return 8 * self.tiling.blocks * self._groups

    @property
    def _pack(self) -> str:
        return f"Pack<{C_TYPES[self.step.x.type.dtype]}, {self.tiling.vector}>"

    def _space(self) -> Space:
        x = self.step.x.type
        return Space(x.shape, ("image", "channel", *(None,) * (x.rank - 3), "p"), 1, self.tiling.vector)

    def sum_elements(self, arguments: Arguments) -> list[str]:
        return [*self._place(), *self._load_elements(arguments), *self._thread_statistics()]

    def _place(self) -> list[str]:
        """Declare shared memory, and which image, channels and pixels a thread handles."""
        tiling, shared, after = self.tiling, list[str](), list[str]()
        if tiling.clustered:
            shared = self._cuda("cluster_memory", MBARRIER_BYTES=MBARRIER_BYTES)
            after = [f"cluster_begins(mbarrier, {self._sent}u);"]
        elif tiling.blocks == 1:
            shared = [f"__shared__ float statistics[{2 * self._groups}];"]
        last = f"chunk == {tiling.blocks - 1}u ? {tiling.pixels}u : begin + {tiling.each}u"
        end = [] if tiling.is_even else [f"const u32 end = {last};"]
        return [*self._cuda("place", SHARED=shared, COLUMNS=self._columns, EACH=tiling.each, END=end), *after]

    def _load_elements(self, arguments: Arguments) -> list[str]:
        """Load the elements that a thread keeps into `taken`. Past the end it loads the first pixel again."""
        code, kind = PointwiseCode(self._space(), arguments), C_TYPES[self.step.x.type.dtype]
        if self.step.prologue:
            code.compute(self.step.prologue, self.step.prologue_outputs)
            code.body.append(f"taken[i].v[j] = {code.as_stored(self.step.x)};")
            load = code.lines()
        else:
            place = f"{arguments.read(self.step.x)} + ({code.space.offset(self.step.x.type)})"
            load = [f"taken[i] = load_pack<{kind}, {self.tiling.vector}>({place});"]
        pixel = self._cuda.holes["PIXEL"]
        place = f"const u32 wanted = {pixel}, p = wanted < end ? wanted : begin;"
        place = f"const u32 p = {pixel};" if self.tiling.is_even else place
        return self._cuda("load_elements", KIND=kind, PLACE=place, LOAD=load)

    def _turns(self, row: str) -> str:
        """Return the number of pixels that the threads of a row have."""
        tiling = self.tiling
        if tiling.is_even:
            return f"{tiling.turns}u"
        return f"(end - begin + {tiling.rows - 1}u - {row}) / {tiling.rows}u"

    def _thread_statistics(self) -> list[str]:
        """Compute for each group of a thread the mean of its elements, and squares around it."""
        v, parts, m = self.tiling.vector, self._parts, self._members
        return self._cuda(
            "thread_statistics",
            ROW_TURNS=self._turns("row"),
            SPLIT=[] if parts == 1 else [f"const int split = (first + 1u) * {m}u - own;"],
            LAST_CHANNEL=v - 1,
            INNER_PARTS=self._cuda("inner_parts") if parts > 2 else [],
            LIVE="true" if self.tiling.is_even else f"{self._cuda.holes['PIXEL']} < end",
            COUNT_ELEMENTS=self._cuda("count_part") if parts > 1 else [f"const float count = turns * {v}.0f;"],
        )

    @property
    def _in_part(self) -> str:
        """Condition that channel `j` of a thread belongs to its group number `k`."""
        m, last = self._members, self._parts - 1
        return f"(k == 0 || j >= split + (k - 1) * {m}) && (k == {last} || j < split + k * {m})" if last else "true"

    def store_sums(self, arguments: Arguments) -> list[str]:
        """Merge mean and squares of each group of the block, and store or send them."""
        tiling, groups = self.tiling, self._groups
        before = ["cluster_is_there();"] if tiling.clustered else []
        if tiling.clustered:
            place = f"statistics + 2u * (chunk * {groups}u + g)"
            store = f"if (at < {tiling.blocks}u) send({place}, Pack<float, 2>{{{{mean, spread}}}}, mbarrier, at);"
        elif tiling.blocks > 1:
            place = f"{arguments.scratch()} + 2u * (blockIdx.x * {groups}u + g)"
            store = f"if (at == 0u) {{ ({place})[0] = mean; ({place})[1] = spread; }}"
            arguments.barrier_counters(self._teams)
        else:
            store = "if (at == 0u) { statistics[2u * g] = mean; statistics[2u * g + 1u] = spread; }"
        return [*before, *self._cuda("store_statistics"), *self._merge_block(store)]

    def _merge_block(self, store: str) -> list[str]:
        """Merge each group of a block by one warp, which then runs `store`."""
        tiling, m = self.tiling, self._members
        count = f"{tiling.each * m}.0f" if tiling.is_even else f"float((end - begin) * {m}u)"
        return self._cuda(
            "merge_block",
            WARP=WARP,
            WARPS=tiling.block // WARP,
            LAST_MEMBER=m - 1,
            VECTORS=self._vectors,
            IF_INSIDE="" if self._is_uniform else "if (low + s <= high)",
            R_TURNS=self._turns("r"),
            PER_ELEMENT=f"1.0f / {count}",
            STORE=store,
        )

    @property
    def _is_uniform(self) -> bool:
        """Tell if all groups have channels in equally many vectors."""
        v, m = self.tiling.vector, self._members
        return len({(g * m + m - 1) // v - g * m // v for g in range(self._groups)}) == 1

    def load_early(self, arguments: Arguments) -> list[str]:
        """Load scale and bias of a channel."""
        first = f"team % {self._columns}u * {self.tiling.own}u + threadIdx.x"
        pointers = zip(("scale", "shift"), (arguments.read(v) for v in self.step.anchor.operands[1:]), strict=True)
        mine = f"threadIdx.x < {self.tiling.own}u"
        return [f"const float {name} = {mine} ? wide({pointer}[{first}]) : 0.0f;" for name, pointer in pointers]

    def meet(self, arguments: Arguments) -> list[str]:
        if self.tiling.clustered:
            return ["wait_for_peers(mbarrier);"]
        return meet_at_counter(arguments, self._teams, "team", self.tiling.blocks, "chunk")

    def merge_sums(self, arguments: Arguments) -> list[str]:
        tiling, m, groups = self.tiling, self._members, self._groups
        if tiling.clustered:
            mean, squares = (f"statistics[2u * (c * {groups}u + g) + {n}u]" for n in (0, 1))
        elif tiling.blocks > 1:
            first = f"{arguments.scratch()} + 2u * (team * {tiling.blocks * groups}u + g)"
            mean, squares = (f"load_fresh({first} + c * {2 * groups} + {n})" for n in (0, 1))
        else:
            mean, squares = (f"statistics[2u * g + {n}u]" for n in (0, 1))
        count = f"{tiling.each * m}.0f"
        if tiling.rest != tiling.each:
            count = f"(c == {tiling.blocks - 1}u ? {tiling.rest * m}.0f : {count})"
        epsilon, size = literal(self._op.epsilon, DType.F32), tiling.pixels * m
        return self._cuda("merge_team", MEAN=mean, SQUARES=squares, COUNT=count, SIZE=size, EPSILON=epsilon)

    def write_elements(self, arguments: Arguments) -> list[str]:
        code = PointwiseCode(self._space(), arguments, "w")
        code.head.append(f"const {self._pack} pack = taken[i];")
        code.known[self.step.x] = "wide(pack.v[j])"
        code.define(self.step.y, "(wide(pack.v[j]) - mean.v[j]) * factor.v[j] + shift_of.v[j]")
        code.compute(self.step.epilogue, self.step.epilogue_outputs)
        store = code.lines() if self.tiling.is_even else ["if (p < end)", *code.lines()]
        return self._cuda("write_elements", STORE=store)
