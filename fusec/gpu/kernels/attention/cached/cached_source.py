"""Generate the CUDA C of attention over a cache that the same launch writes into."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fusec.gpu.kernels.attention.cached.match_cached import CachedAttention
from fusec.gpu.kernels.attention.cached.rotary import element_coordinates, neighbours, rotate
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import C_TYPES, CLUSTERS, Arguments, Kernel, Launch, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, stride_along
from fusec.ir import Node
from fusec.schedule.row_writes import RowWrite
from fusec.system.dataclass import dataclass

MOST_TOGETHER = 8  # blocks of a cluster, which every GPU with clusters can start
OCTET = 8  # heads in a product, and elements of a pack
TILE = 16  # keys, or features, in a product
BATCH = 8  # parts whose sums a thread adds up at a time
ALONE_BYTES = 1 << 17  # of shared memory: more than half of a multiprocessor's, so that each has one block
MAX_THREADS = 1024  # of a multiprocessor: at most 64 registers each, so that other launches have room next to it
CUDA = cuda_template(__package__, "cached_attention.cuh")


@dataclass(frozen=True, eq=False)
class CachedAttentionSource:
    """The launch of an attention.

    warps: warps of a block. share: keys of a block.
    clusters: the blocks of a sequence are a cluster; else the last one to finish adds up the parts.
    """

    step: CachedAttention
    warps: int
    share: int
    clusters: bool

    @property
    def may_cluster(self) -> bool:
        """Tell if such clusters can start, and each of their blocks has a share of the results."""
        return not self.clusters or (self.parts <= MOST_TOGETHER and self.results % (4 * self.parts) == 0)

    @property
    def results(self) -> int:
        """The results of a sequence."""
        return self.step.sharers * self.step.features

    @property
    def box_size(self) -> int:
        """The numbers from what one block of a cluster sends to what the next one sends, in whole packs."""
        return self.results // self.parts + ceil_div(2 * self.step.sharers, 4) * 4

    @property
    def pitch(self) -> int:
        """The elements from one row in shared memory to the next, so that eight rows are in different banks."""
        return self.step.features + OCTET

    @property
    def heads(self) -> int:
        """The heads of a block, in whole products."""
        return ceil_div(self.step.sharers, OCTET) * OCTET

    @property
    def shared_bytes(self) -> int:
        return self.own_bytes + (16 + 4 * self.parts * self.box_size if self.clusters else 0)

    @property
    def own_bytes(self) -> int:
        """The shared memory of rows, and of weights."""
        rows = 2 * self.share + self.heads + 2
        return 2 * (rows * self.pitch + self.heads * (self.share + OCTET))

    @property
    def parts(self) -> int:
        """The blocks that share the keys of a sequence, in whole batches."""
        return ceil_div(self.step.keys, self.share)

    @property
    def blocks(self) -> int:
        return self.step.sequences * self.parts

    @property
    def vector(self) -> int:
        """The neighbours that a thread loads or embeds at a time."""
        found = OCTET
        for node, start in self.step.embeddings:
            found = math.gcd(found, start, neighbours(node, View.of(node.operands[0].type), ()))
        return found

    def kernel(self, figures: GpuFigures) -> Kernel:
        step, arguments, threads = self.step, Arguments(), 32 * self.warps
        y, vector = step.attention.result.type, self.vector
        kind = C_TYPES[y.dtype]
        cuda = CUDA.bind(
            TYPE=kind,
            VECTOR=vector,
            PACK=f"Pack<{kind}, {vector}>",
            PACKS=step.features // vector,
            QUERY_PACKS=step.sharers * step.features // vector,
            FEATURES=step.features,
            SHARERS=step.sharers,
            HEADS=self.heads,
            OCTETS=self.heads // OCTET,
            GROUPS=step.groups,
            KEYS=step.keys,
            ROWS=step.sequences * step.keys,
            SHARE=self.share,
            PARTS=self.parts,
            BATCH=min(self.parts, BATCH),
            BLOCKS=self.blocks,
            RESULTS=self.results,
            TILES=self.share // (TILE * self.warps),
            WARPS=self.warps,
            THREADS=threads,
            PITCH=self.pitch,
            WEIGHT_PITCH=self.share + OCTET,
            NEW=step.indices.type.size,
            HIDES=c_bool(step.op.hides),
            SCALE=f"{step.op.scale * math.log2(math.e)!r}f",
            Y_IMAGE=y.strides[0],
            Y_HEAD=y.strides[1],
            ATTENDED=arguments.write(step.attention.result),
        )
        copies = self._copies(cuda, arguments)
        holes: dict[str, Filling] = {
            "INDICES": arguments.read(step.indices),
            "BIAS": self._bias(arguments),
            "LOAD_QUERY": self._query(cuda, arguments),
            "NEW_KEY": self._new_row(cuda, arguments, step.writes[0]),
            "NEW_VALUE": self._new_row(cuda, arguments, step.writes[1]),
            **self._stores(cuda, partial(cuda, "copy_rows"), arguments),
            **self._merge(cuda, arguments),
        }
        holes["WRITE_NEW"] = cuda("write_new", OWN_ROW="place", **holes)
        lines = cuda(
            "kernel",
            COPY_EARLY=copies if step.is_constant else [],
            BEGIN=arguments.begin(),  # after all pointers are named
            COPY_LATE=[] if step.is_constant else copies,
            **holes,
        )
        cluster = self.parts if self.clusters else 1
        launch = arguments.launch(
            "cached_attention", lines, self.blocks, threads, resident=self.resident, cluster=cluster
        )
        least = min(ALONE_BYTES, figures.dynamic_bytes) if self.clusters else 0
        return self._kernel(replace(launch, resident_bytes=max(self.shared_bytes, least)))

    @property
    def resident(self) -> int:
        return MAX_THREADS // (32 * self.warps)

    def _kernel(self, launch: Launch) -> Kernel:
        shares = self.parts > 1 and not self.clusters
        scratch = 4 * self.blocks * self.step.sharers * (self.step.features + 2) if shares else 0
        name = "+".join(node.op.name for node in self.step.nodes)
        architecture = CLUSTERS if self.clusters else ""
        launch = replace(launch, dependent=True, architecture=architecture)
        return Kernel(name, (launch,), scratch)

    def _merge(self, cuda: CudaTemplate, arguments: Arguments) -> dict[str, list[str]]:
        """Store the sums of a block, and add up those of a sequence."""
        if self.parts == 1:
            return {"BEGIN_CLUSTER": [], "STORE": cuda("store_result"), "ADD_PARTS": []}
        if self.clusters:
            cuda = cuda.bind(
                BOX_AT=self.own_bytes + 16,
                MBARRIER_AT=self.own_bytes,
                BOX_SIZE=self.box_size,
                SENT=self.results // self.parts + 2 * self.step.sharers,
                EACH=self.results // self.parts,
            )
            record = cuda("record", RECORDS=f"(staged + {self.results}u)")
            merge = cuda("merge_in_cluster", RECORD=record, ADD_UP=cuda("add_up", LOAD_PART=cuda("load_sent")))
            return {"BEGIN_CLUSTER": cuda("begin_cluster"), "STORE": cuda("store_staged"), "ADD_PARTS": merge}
        cuda = cuda.bind(SCRATCH=arguments.scratch(), COUNTERS=arguments.barrier_counters(self.step.sequences))
        record = cuda("record", RECORDS=f"(records + blockIdx.x * {2 * self.step.sharers}u)")
        add = cuda("add_parts", RECORD=record, ADD_UP=cuda("add_up", LOAD_PART=cuda("load_part")))
        return {"BEGIN_CLUSTER": [], "STORE": cuda("store_part"), "ADD_PARTS": add}

    def _copies(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Request the block's rows of keys, then of values."""
        pieces = self.share * self.step.features // OCTET
        turns = ceil_div(pieces, 32 * self.warps)
        cuda = cuda.bind(
            TURNS=turns,
            PIECES_FIT=c_bool(turns * 32 * self.warps == pieces),
            ALL_THERE=c_bool(self.step.keys % self.share == 0),
        )
        names = zip(("keys", "values"), self.step.writes, strict=True)
        copies = (cuda("copy", SHARED=name, OLD=arguments.read(write.reads[0])) for name, write in names)
        return [*(line for lines in copies for line in lines), "copied();"]

    def _bias(self, arguments: Arguments) -> str:
        """Return what is added to the score of a key; zero without a bias."""
        if self.step.bias is None:
            return "0.0f"
        type = self.step.bias.type
        places = " + ".join(f"{n} * {stride_along(type, 4, d)}u" for d, n in ((0, "image"), (1, "head"), (3, "key")))
        return f"wide({arguments.read(self.step.bias)}[{places}])"

    def _query(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Load, or embed, neighbours of a query."""
        view, memory = self.step.query_view, self.step.query
        place = f"image * {view.strides[0]} + head * {view.strides[1]} + {view.start} + column"
        if self.step.query_embedding is None:
            return cuda("load", FROM=arguments.read(memory), AT=place)
        return self._embedded(cuda, arguments, self.step.query_embedding, place)

    def _new_row(self, cuda: CudaTemplate, arguments: Arguments, write: RowWrite) -> list[str]:
        """Load, or embed, neighbours of the new row of a write."""
        place = f"{write.start} + row * {self.step.features}u + column"
        if write.rotary is None:
            return cuda("load", FROM=arguments.read(write.scatter.operands[2]), AT=place)
        return self._embedded(cuda, arguments, write.rotary, place)

    def _embedded(self, cuda: CudaTemplate, arguments: Arguments, node: Node, place: str) -> list[str]:
        """Embed the neighbours at a place of the embedding's result."""
        y, x = node.result, node.operands[0]

        def store(code: PointwiseCode) -> None:
            code.head.append(f"Pack<{C_TYPES[y.type.dtype]}, {self.vector}> found;")
            code.body.append(f"found.v[j] = {code.as_stored(y)};")
            code.tail.append(f"*(Pack<{C_TYPES[y.type.dtype]}, {self.vector}>*)to = found;")

        rotated = rotate(node, (x, View.of(x.type)), self.vector, arguments, store)
        return cuda("embed", AT=place, COORDINATES=element_coordinates(y.type), ROTATE=rotated)

    def _stores(
        self, cuda: CudaTemplate, copy_rows: Callable[..., list[str]], arguments: Arguments
    ) -> dict[str, list[str]]:
        """Store new rows. Where the result has memory of its own, `copy_rows` stores the other rows."""
        new, copy = list[str](), list[str]()
        for name, row, write, result in zip(
            ("keys", "values"), ("key", "value"), self.step.writes, self.step.written, strict=True
        ):
            if result is not None:
                holes = {"RESULT": arguments.write(result), "OLD": arguments.read(write.reads[0])}
                new += cuda("store_new", SHARED_ROW=row, **holes)
                copy += copy_rows(SHARED=name, **holes)
        return {"STORE_NEW": new, "COPY_ROWS": copy}
