"""Generate the gradients of attention over short sequences: a block keeps a whole head in shared memory.

cuDNN's engines add the gradients of queries in fp32 in device memory, which takes launches and traffic of its own. Here
a warpgroup has 64 keys and visits all queries. It adds the gradients of keys and values in registers, and stores those
of scores in shared memory. Then a warpgroup has 64 queries, and multiplies these by all keys. The order of sums is
fixed, so that every run gives the same bits. A block handles several heads, one after the other, and copies the next
head meanwhile: its values while this head's keys visit queries, if there is room, and the rest later.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property

from fusec.gpu.kernels.attention.short_rows import OCTET, of_head
from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.ir import Value
from fusec.ops import AttentionBackward
from fusec.system.dataclass import dataclass

GROUP = 64  # rows of a warpgroup
VISITED = 32  # queries that keys visit together
SLACK_BYTES = 1024  # largest number of bytes past the end that products of the last rows read, and do not use
_CUDA = cuda_template(__package__, "attention_backward.cuh")


@dataclass(frozen=True, eq=False)
class AttentionGradients:
    """The gradients of an attention, with the views of what it reads and writes.

    read, views: dy, q, k, v, y and the logarithms of sums.
    written: for each gradient that is stored, its place among the results, the value, and the view of the gradient.
    """

    op: AttentionBackward
    read: tuple[Value, ...]
    views: tuple[View, ...]
    written: tuple[tuple[int, Value, View], ...]


@dataclass(frozen=True, eq=False)
class AttentionBackwardSource:
    """The launch of a step, whose blocks handle one head after the other.

    processors: multiprocessors of the GPU, each of which has one block.
    has_spare: the values of the next head have memory of their own, so that they are copied while a head is multiplied.
    """

    step: AttentionGradients
    processors: int
    has_spare: bool

    @property
    def counts(self) -> tuple[int, int]:
        """Queries and keys of a head."""
        return self.step.views[1].shape[2], self.step.views[2].shape[2]

    @property
    def rows(self) -> tuple[int, int]:
        """Queries and keys in shared memory, with the zeros after them."""
        queries, keys = (ceil_div(count, 2 * OCTET) * 2 * OCTET for count in self.counts)
        return queries, keys

    @property
    def octets(self) -> int:
        """Octets of a row."""
        return self.step.views[1].shape[3] // OCTET

    @property
    def octet_sizes(self) -> tuple[int, int, int]:
        """Elements from one octet to the next, of queries, of keys, and of gradients of scores.

        An octet of the latter has eight queries, and later stages gradients of queries.
        """
        queries, keys = ((rows + wgmma.offset(self.octets)) * OCTET for rows in self.rows)
        return queries, keys, max(self.rows[1], (self.octets + 1) * OCTET) * OCTET

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of queries, of keys, and of gradients of scores in shared memory."""
        queries, keys, changes = self.octet_sizes
        return queries * self.octets, keys * self.octets, changes * self.rows[0] // OCTET

    @property
    def shared_bytes(self) -> int:
        """Bytes of all rows of a head, of the gradients of its scores, and of two numbers for each query."""
        queries, keys, changes = self.sizes
        return 2 * (2 * queries + (2 + self.has_spare) * keys + changes) + 8 * self.rows[0] + SLACK_BYTES

    @property
    def threads(self) -> int:
        return ceil_div(max(self.rows), GROUP) * 128

    @cached_property
    def _cuda(self) -> CudaTemplate:
        (queries, keys), octets = self.rows, self.octets
        query_octet, key_octet, change_octet = self.octet_sizes
        queries_size, keys_size, changes_size = self.sizes
        return _CUDA.bind(
            TYPE=C_TYPES[self.step.views[0].dtype],
            THREADS=self.threads,
            TURNS=ceil_div(self.rows[0] * OCTET, self.threads),
            GROUPS_HAVE_KEYS=c_bool(self.threads // 128 == ceil_div(keys, GROUP)),
            GROUPS_HAVE_QUERIES=c_bool(self.threads // 128 == ceil_div(queries, GROUP)),
            OCTETS=octets,
            QUERIES=queries,
            QUERY_COUNT=self.counts[0],
            QUERIES_FIT=c_bool(queries == self.counts[0]),
            QUERY_OCTET=query_octet,
            QUERIES_SIZE=queries_size,
            KEYS=keys,
            KEY_COUNT=self.counts[1],
            KEYS_FIT=c_bool(keys == self.counts[1]),
            KEY_OCTET=key_octet,
            KEYS_SIZE=keys_size,
            HAS_SPARE=c_bool(self.has_spare),
            SPARE_SIZE=keys_size * self.has_spare,
            KEY_TILES=keys // (2 * OCTET),
            CHANGE_OCTET=change_octet,
            CHANGES_SIZE=changes_size,
            SCALE=f"{self.step.op.scale * math.log2(math.e)!r}f",
            LOG2_E=f"{math.log2(math.e)!r}f",
        )

    def kernel(self) -> Kernel:
        """Return the kernel."""
        arguments = Arguments()
        batch, heads = self.step.views[1].shape[:2]
        grid = min(batch * heads, self.processors)
        names = ("dy", "q", "k", "v", "y", "sums")
        read = zip(names, self.step.read, self.step.views, strict=True)
        memory = {name: of_head(arguments.read(value), view) for name, value, view in read}
        columns = self.octets * OCTET
        copy_part = self._copy("next_values", memory["v"], 3, "copy_part")
        lines = self._cuda.bind(COLUMNS=columns)(
            "kernel",
            HEADS=batch * heads,
            BLOCKS=grid,
            HEAD_OF_BLOCK=split_index("block", [("image", batch), ("head", heads)]),
            HEAD_OF_NEXT=split_index("next", [("image", batch), ("head", heads)]),
            COPY_QUERIES=self._copy("queries", memory["q"], 1),
            COPY_LOSSES=self._copy("losses", memory["dy"], 0),
            COPY_VALUES=self._copy("next_values", memory["v"], 3),
            COPY_KEYS=self._copy("keys", memory["k"], 2),
            PARTS=ceil_div(self.rows[1] * self.octets, self.threads),
            COPY_PART=copy_part,
            MEANS=self._cuda("means"),
            LOAD_RESULTS=self._cuda(
                "load_results",
                RESULTS=memory["y"],
                RESULT_STRIDE=self.step.views[4].strides[2],
                LOGARITHMS=memory["sums"],
                LOGARITHM_STRIDE=self.step.views[5].strides[2],
            ),
            VISIT_QUERIES=self._cuda(
                "visit_queries",
                PARTS=ceil_div(self.rows[1] * self.octets, self.threads),
                HEAD_OF_NEXT=split_index("next", [("image", batch), ("head", heads)]),
                COPY_PART=copy_part,
                VISIT=self._visit(VISITED),
                VISIT_REST=self._visit(self.rows[0] % VISITED),
                PIN_SUMS=self._cuda("pin_sums"),
            ),
            VISIT_KEYS=self._cuda("visit_keys"),
            STORE_OF_VALUES=self._store("of_values", 2, arguments),
            STORE_OF_KEYS=self._store("of_keys", 1, arguments),
            STORE_OF_QUERIES=self._store("of_queries", 0, arguments),
        )
        lines = [line.replace("ENTRY_COLUMNS", f"ENTRY_{columns}") for line in lines]
        kind = C_TYPES[self.step.views[0].dtype]
        products = [wgmma.product_of_tiles(kind, part) for part in (VISITED, VISITED // 2)]
        preamble = [*products[0], *products[1], *wgmma.product(kind, columns, by_rows=True)]
        launch = arguments.early_launch("attention_backward", lines, grid, self.threads, preamble=preamble, resident=1)
        launch = replace(launch, resident_bytes=self.shared_bytes, architecture=wgmma.ARCHITECTURE)
        return Kernel("attention_backward", (launch,))

    def _visit(self, part: int) -> list[str]:
        """Return the code in which keys visit a part of the queries."""
        if not part:
            return []
        cuda = self._cuda.bind(PART_OCTETS=part // OCTET, PART=part)
        lines = cuda("visit", SCORE=cuda("score"), SLOPE=cuda("slope"), PIN_SUMS=cuda("pin_sums"))
        return [line.replace("ENTRY_PART", f"ENTRY_{part}") for line in lines]

    def _copy(self, name: str, memory: str, operand: int, fragment: str = "copy") -> list[str]:
        of_keys = operand in (2, 3)
        rows, count = self.rows[of_keys], self.counts[of_keys]
        return self._cuda(
            fragment,
            SHARED=name,
            MEMORY=memory,
            STRIDE=self.step.views[operand].strides[2],
            OCTET_SIZE=self.octet_sizes[of_keys],
            PIECES=rows * self.octets,
            COUNT=count,
            ROWS_FIT=c_bool(rows == count),
        )

    def _store(self, name: str, place: int, arguments: Arguments) -> list[str]:
        """Return the code that stores a gradient; none if no step reads it."""
        found = next(((value, view) for at, value, view in self.step.written if at == place), None)
        if found is None:
            return []
        value, view = found
        _, key_octet, change_octet = self.octet_sizes
        staged: dict[str, Filling] = (
            {"STAGE": f"(changes + own / 8u * {change_octet}u)", "STAGE_OCTET": (2 * OCTET + 1) * OCTET}
            if place == 0
            else {"STAGE": "(values + own * 8u)", "STAGE_OCTET": key_octet}
        )
        return self._cuda(
            "store",
            NAME=name,
            ROWS=self.rows[place > 0],
            COUNT=self.counts[place > 0],
            RESULT=of_head(arguments.write(value), view),
            RESULT_ROW=view.strides[2],
            FACTOR="" if place == 2 else f"* {self.step.op.scale!r}f",
            **staged,
        )
