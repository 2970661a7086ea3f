"""Generate attention over a cache by warps that read keys and values as streams, one block for each sequence.

Warps take turns with the keys, sixteen at a time. A warp requests its next keys while it multiplies these. It needs no
other warp before the end, when sums are added up. Thus a long cache of many sequences takes about the time of its
bytes. Keys after the last one that the bias shows are not read, which are the places of a cache that no token has
filled yet.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from fusec.gpu.kernels.attention.cached.cached_source import BATCH, CUDA, CachedAttentionSource
from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import stride_along
from fusec.system.dataclass import dataclass

KEYS = 16  # of a warp at a time
HEADS = 16  # in a product
MAX_FEATURES = 128  # because sums are in registers
TILINGS = ((8, 3), (8, 2))  # warps, and stages of each
_CUDA = cuda_template(__package__, "streamed_attention.cuh")


@dataclass(frozen=True, eq=False)
class StreamedAttentionSource(CachedAttentionSource):
    """The launch of an attention.

    share: the keys that a warp has in shared memory, in stages of 16.
    """

    @property
    def stages(self) -> int:
        return self.share // KEYS

    @property
    def stage_size(self) -> int:
        """The elements of a stage."""
        return 2 * KEYS * self.pitch

    @property
    def shared_bytes(self) -> int:
        sums = 4 * self.warps * self.step.sharers * (self.step.features + 2)
        return max(2 * (self.warps * self.stages * self.stage_size + (HEADS + 2) * self.pitch), sums)

    @property
    def is_shared_bias(self) -> bool:
        """Tell if all heads have the same bias, so that keys which it hides can be left out."""
        bias = self.step.bias
        return bias is not None and stride_along(bias.type, 4, 1) == 0

    def fits(self, figures: GpuFigures) -> bool:
        """Tell if a block for each sequence occupies the GPU, and has room for its stages."""
        small = self.step.sharers <= HEADS and self.step.features <= MAX_FEATURES
        return small and 2 * self.step.sequences >= figures.processors and self.shared_bytes <= figures.dynamic_bytes

    def kernel(self, figures: GpuFigures) -> Kernel:
        step, arguments, threads = self.step, Arguments(), 32 * self.warps
        y, vector = step.attention.result.type, self.vector
        kind, turns = C_TYPES[y.dtype], ceil_div(step.keys, KEYS * self.warps)
        sizes: dict[str, str | int] = {
            "TYPE": kind,
            "VECTOR": vector,
            "PACK": f"Pack<{kind}, {vector}>",
            "PACKS": step.features // vector,
            "QUERY_PACKS": step.sharers * step.features // vector,
            "FEATURES": step.features,
            "SHARERS": step.sharers,
            "GROUPS": step.groups,
            "KEYS": step.keys,
            "ROWS": step.sequences * step.keys,
            "RESULTS": self.results,
            "WARPS": self.warps,
            "THREADS": threads,
            "PITCH": self.pitch,
            "STAGES": self.stages,
            "STAGE_SIZE": self.stage_size,
            "TURNS": turns,
            "ALL_THERE": c_bool(step.keys % (KEYS * self.warps) == 0),
            "PARTS": self.warps,
            "BATCH": min(self.warps, BATCH),
            "NEW": step.indices.type.size,
            "HIDES": c_bool(step.op.hides),
            "SCALE": f"{step.op.scale * math.log2(math.e)!r}f",
            "Y_IMAGE": y.strides[0],
            "Y_HEAD": y.strides[1],
            "ATTENDED": arguments.write(step.attention.result),
        }
        cuda, shared = _CUDA.bind(**sizes), CUDA.bind(**sizes)
        olds = [arguments.read(write.reads[0]) for write in step.writes]
        cuda = cuda.bind(REQUEST=cuda("request", OLD_KEYS=olds[0], OLD_VALUES=olds[1]))
        first = cuda("first_requests")
        stores = self._stores(shared, partial(cuda, "copy_rows"), arguments)
        cuda = cuda.bind(
            INDICES=arguments.read(step.indices),
            LOAD_BIAS=cuda("load_bias", BIAS=self._bias(arguments)),
            FIND_LAST=cuda("find_last", BIAS=self._bias(arguments)) if self.is_shared_bias else [],
            STOP_EARLY=cuda("stop_early", IN_PLACE=self._in_place(arguments)) if self.is_shared_bias else [],
            LOAD_QUERY=self._query(shared, arguments),
        )
        rows = {
            "NEW_KEY": self._new_row(shared, arguments, step.writes[0]),
            "NEW_VALUE": self._new_row(shared, arguments, step.writes[1]),
        }
        cuda = cuda.bind(
            **rows,
            WRITE_NEW=shared("write_new", OWN_ROW="own_key", STORE_NEW=stores["STORE_NEW"], **rows),
            COPY_ROWS=stores["COPY_ROWS"],
            ADD_UP=shared("add_up", LOAD_PART=cuda("load_part")),
        )
        lines = cuda(
            "kernel",
            COPY_EARLY=first if step.is_constant else [],
            BEGIN=arguments.begin(),  # after all pointers are named
            COPY_LATE=[] if step.is_constant else first,
        )
        launch = arguments.launch("streamed_attention", lines, step.sequences, threads, resident=1)
        launch = replace(launch, resident_bytes=self.shared_bytes, dependent=True)
        return Kernel("+".join(node.op.name for node in step.nodes), (launch,))

    def _in_place(self, arguments: Arguments) -> str:
        """Return the condition that no row has to be copied."""
        pairs = [(w.reads[0], y) for w, y in zip(self.step.writes, self.step.written, strict=True) if y is not None]
        same = [f"(const void*){arguments.read(old)} == (const void*){arguments.write(new)}" for old, new in pairs]
        return " && ".join(same) or "true"
