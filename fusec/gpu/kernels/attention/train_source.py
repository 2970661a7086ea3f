"""Generate attention in training over short sequences: warpgroups of 64 queries visit all keys of a head.

A block handles several heads, one after the other, and copies the next head to shared memory meanwhile. Scores of
some keys are in registers, and the sums are scaled where a larger score comes. Sums of weights have the digits of fp32,
because the gradients need their logarithms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from fusec.gpu.kernels.attention.short_rows import OCTET, of_head
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.ir import Value
from fusec.ops import AttentionTrain

TILE = 16  # keys of one product
GROUP = 64  # queries of a warpgroup
_CUDA = cuda_template(__package__, "attention_train.cuh")
_ROWS = cuda_template(__package__, "attention_backward.cuh")


@dataclass(frozen=True, eq=False)
class AttentionTrainSource:
    """The launch of an attention in training.

    read, views: queries, keys and values.
    written: by place among the results, the value that is stored, and the view of the result in it.
    processors: multiprocessors of the GPU, each of which has one block.
    part: keys that queries visit together.
    """

    op: AttentionTrain
    read: tuple[Value, ...]
    views: tuple[View, ...]
    written: dict[int, tuple[Value, View]]
    processors: int
    part: int

    @property
    def rows(self) -> tuple[int, int]:
        """Queries and keys in shared memory, with the zeros after them."""
        queries, keys = (view.shape[2] for view in self.views[:2])
        return ceil_div(queries, TILE) * TILE, ceil_div(keys, self.part) * self.part

    @property
    def octets(self) -> int:
        """Octets of a row."""
        return self.views[0].shape[3] // OCTET

    @property
    def octet_sizes(self) -> tuple[int, int]:
        """Elements from one octet to the next, of queries and of keys."""
        queries, keys = ((rows + wgmma.offset(self.octets)) * OCTET for rows in self.rows)
        return queries, keys

    @property
    def head_size(self) -> int:
        """Elements of the queries, keys and values of a head."""
        queries, keys = self.octet_sizes
        return (queries + 2 * keys) * self.octets

    @property
    def shared_bytes(self) -> int:
        """Bytes of two heads. Products of the last queries read up to 48 rows past their end, and do not use them."""
        return 2 * 2 * self.head_size + (GROUP - TILE) * 2 * OCTET

    @property
    def threads(self) -> int:
        return ceil_div(self.rows[0], GROUP) * 128

    @cached_property
    def _cuda(self) -> CudaTemplate:
        (queries, keys), (query_octet, key_octet) = self.rows, self.octet_sizes
        return _CUDA.bind(
            TYPE=C_TYPES[self.views[0].dtype],
            OCTETS=self.octets,
            QUERIES=queries,
            QUERY_COUNT=self.views[0].shape[2],
            QUERY_OCTET=query_octet,
            QUERIES_SIZE=query_octet * self.octets,
            KEYS=keys,
            PART=self.part,
            PART_OCTETS=self.part // OCTET,
            KEY_COUNT=self.views[1].shape[2],
            KEYS_FIT=c_bool(keys == self.views[1].shape[2]),
            KEY_OCTET=key_octet,
            KEYS_SIZE=key_octet * self.octets,
            STAGE_SIZE=self.head_size,
            SCALE=f"{self.op.scale * math.log2(math.e)!r}f",
        )

    def kernel(self) -> Kernel:
        """Return the kernel."""
        arguments = Arguments()
        batch, heads = self.views[0].shape[:2]
        grid = min(batch * heads, self.processors)
        copies = [self._copy(place, arguments) for place in range(3)]
        lines = self._cuda(
            "kernel",
            HEADS=batch * heads,
            BLOCKS=grid,
            HEAD_OF_BLOCK=split_index("block", [("image", batch), ("head", heads)]),
            HEAD_OF_NEXT=split_index("next", [("image", batch), ("head", heads)]),
            COPY=[line for copy in copies for line in copy],
            VISIT=self._cuda("visit"),
            STORE_RESULT=self._store_result(arguments),
            STORE_SUMS=self._store_sums(arguments),
        )
        kind, features = C_TYPES[self.views[0].dtype], self.octets * OCTET
        for hole, columns in (("ENTRY_PART", self.part), ("ENTRY_FEATURES", features)):
            lines = [line.replace(hole, f"ENTRY_{columns}") for line in lines]
        preamble = [*wgmma.product_of_tiles(kind, self.part), *wgmma.product(kind, features, by_rows=True)]
        launch = arguments.launch("attention_train", lines, grid, self.threads, preamble=preamble, resident=1)
        launch = replace(launch, resident_bytes=self.shared_bytes, architecture=wgmma.ARCHITECTURE)
        return Kernel("attention_train", (launch,))

    def _copy(self, place: int, arguments: Arguments) -> list[str]:
        """Return the code that begins to copy queries (0), keys or values."""
        of_keys = place > 0
        view, rows = self.views[place], self.rows[of_keys]
        holes: dict[str, Filling] = {
            "TYPE": C_TYPES[view.dtype],
            "THREADS": self.threads,
            "OCTETS": self.octets,
            "SHARED": ("queries", "keys", "values")[place],
            "MEMORY": of_head(arguments.read(self.read[place]), view),
            "STRIDE": view.strides[2],
            "OCTET_SIZE": self.octet_sizes[of_keys],
            "PIECES": rows * self.octets,
            "COUNT": view.shape[2],
            "ROWS_FIT": c_bool(rows == view.shape[2]),
        }
        return _ROWS("copy", **holes)

    def _store_result(self, arguments: Arguments) -> list[str]:
        """Return the code that stores sums of values, each divided by the sum of its weights."""
        if 0 not in self.written:
            return []
        value, view = self.written[0]
        return _ROWS(
            "store",
            TYPE=C_TYPES[view.dtype],
            NAME="of_values",
            OCTETS=self.octets,
            ROWS=self.rows[0],
            COUNT=view.shape[2],
            STAGE="(queries + own * 8u)",
            STAGE_OCTET=self.octet_sizes[0],
            RESULT=of_head(arguments.write(value), view),
            RESULT_ROW=view.strides[2],
            FACTOR="* share[h]",
        )

    def _store_sums(self, arguments: Arguments) -> list[str]:
        """Return the code that stores the logarithms of sums."""
        if 1 not in self.written:
            return []
        value, view = self.written[1]
        result = of_head(arguments.write(value), view)
        return self._cuda("store_sums", RESULT=result, RESULT_ROW=view.strides[2], LOG_2=f"{math.log(2.0)!r}f")
