"""Generate the gradients of attention over short sequences: a block keeps a whole head in shared memory.

cuDNN's engines add the gradients of queries in fp32 in device memory, which takes launches and traffic of its own. Here
each warp first has keys and visits all queries, then has queries and visits all keys. It computes scores twice, but
adds in registers alone. The order of sums is fixed, so that every run gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.ir import Value
from fusec.ops import AttentionBackward

PACK = 8  # neighbours of a row that one copy moves: an octet
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
class _Side:
    """One side of the products of rows: queries with the gradients of results, or keys with values.

    names: of the rows in shared memory: those that scores are products of, and those that slopes are products of.
    pads: rows with the zeros after them.
    """

    names: tuple[str, str]
    rows: int
    pads: int


@dataclass(frozen=True, eq=False)
class _Half:
    """One half of the work: warps have rows of one side and visit those of the other.

    others: the first sixteen rows that are visited, and the end, as C.
    weigh: the fragment that computes weights and their gradients.
    load: the statements that it needs before all rows are visited.
    """

    own: _Side
    other: _Side
    others: tuple[str, str]
    weigh: str
    load: Sequence[str] = ()


@dataclass(frozen=True)
class _Gradient:
    """A result: the sum of rows of the other side, each times a weight or the gradient of a weight.

    place: among the results of the op.
    number: 0 for rows that scores are products of, 1 for those that slopes are products of.
    factors: `power` for weights, `change` for their gradients.
    """

    place: int
    name: str
    number: int
    factors: str


_OF_KEYS = (_Gradient(1, "of_keys", 0, "change"), _Gradient(2, "of_values", 1, "power"))
_OF_QUERIES = (_Gradient(0, "of_queries", 0, "change"),)


@dataclass(frozen=True, eq=False)
class AttentionBackwardSource:
    """The launch of a step: one block for each head.

    tiles: each warp has 16 times so many rows.
    most_warps: warps of a block, at most.
    """

    step: AttentionGradients
    tiles: int
    most_warps: int

    @property
    def own(self) -> int:
        """Rows that a warp has together."""
        return 16 * self.tiles

    def _side(self, operand: int, names: tuple[str, str]) -> _Side:
        rows = self.step.views[operand].shape[2]
        return _Side(names, rows, ceil_div(rows, self.own) * self.own)

    @property
    def queries(self) -> _Side:
        return self._side(1, ("queries", "losses"))

    @property
    def keys(self) -> _Side:
        return self._side(2, ("keys", "values"))

    @property
    def octets(self) -> tuple[int, int]:
        """Octets of a query or key, and of a value or result."""
        return self.step.views[1].shape[3] // PACK, self.step.views[3].shape[3] // PACK

    @property
    def pitches(self) -> tuple[int, int]:
        """Elements from one row to the next in shared memory. An odd number of octets avoids bank conflicts."""
        depth, width = ((octets + 1) * PACK for octets in self.octets)
        return depth, width

    @property
    def warps(self) -> int:
        """Warps of a block: as few as need no more turns than the most do."""
        parts = max(self.queries.pads, self.keys.pads) // self.own
        return ceil_div(parts, ceil_div(parts, self.most_warps))

    @property
    def shared_bytes(self) -> int:
        """Bytes of all rows of a head, and two numbers for each query."""
        return 2 * sum(self.pitches) * (self.queries.pads + self.keys.pads) + 8 * self.queries.pads

    @cached_property
    def _cuda(self) -> CudaTemplate:
        (depth, width), pitches = self.octets, self.pitches
        return _CUDA.bind(
            TYPE=C_TYPES[self.step.views[0].dtype],
            TILES=self.tiles,
            WARPS=self.warps,
            THREADS=self.warps * 32,
            QUERIES=self.queries.pads,
            QUERY_COUNT=self.queries.rows,
            QUERIES_FIT=c_bool(self.queries.rows % 16 == 0),
            KEYS=self.keys.pads,
            KEY_COUNT=self.keys.rows,
            KEYS_FIT=c_bool(self.keys.rows % 16 == 0),
            DEPTH_OCTETS=depth,
            WIDTH_OCTETS=width,
            DEPTH_PITCH=pitches[0],
            WIDTH_PITCH=pitches[1],
            SCALE=f"{self.step.op.scale * math.log2(math.e)!r}f",
            LOG2_E=f"{math.log2(math.e)!r}f",
            IS_CAUSAL=c_bool(self.step.op.causal),
        )

    def kernel(self) -> Kernel:
        """Return the kernel of this variant."""
        step, arguments, pointers = self.step, Arguments(), list[str]()
        for name, value, view in zip(("dy", "q", "k", "v", "y", "sums"), step.read, step.views, strict=True):
            at = f"image * {view.strides[0]}u + head * {view.strides[1]}u + {view.start}u"
            pointers.append(f"const {C_TYPES[view.dtype]}* {name} = {arguments.read(value)} + ({at});")
        batch, heads = step.views[1].shape[:2]
        lines = self._cuda(
            "kernel",
            BLOCK_COORDINATES=split_index("block", [("image", batch), ("head", heads)]),
            POINTERS=pointers,
            COPY_ROWS=self._copy_rows(),
            DY_STRIDE=step.views[0].strides[2],
            Y_STRIDE=step.views[4].strides[2],
            SUMS_STRIDE=step.views[5].strides[2],
            PARTS=self._parts(arguments),
        )
        launch = arguments.launch("attention_backward", lines, batch * heads, self.warps * 32, resident=1)
        return Kernel("attention_backward", (replace(launch, resident_bytes=self.shared_bytes),))

    def _copy_rows(self) -> list[str]:
        lines: list[str] = []
        for side, memory, places in ((self.queries, ("q", "dy"), (1, 0)), (self.keys, ("k", "v"), (2, 3))):
            for number, name in enumerate(side.names):
                lines += self._cuda(
                    "copy",
                    SHARED=name,
                    MEMORY=memory[number],
                    STRIDE=self.step.views[places[number]].strides[2],
                    OCTETS=self.octets[number],
                    PITCH=self.pitches[number],
                    PIECES=side.pads * self.octets[number],
                    COUNT=side.rows,
                    ROWS_FIT=c_bool(side.rows == side.pads),
                )
        return lines

    def _parts(self, arguments: Arguments) -> list[str]:
        """Return the code of both halves, without the gradients that are not stored."""
        # With a causal mask, a query visits no keys after it, and a key no queries before it.
        causal, tiles = self.step.op.causal, ceil_div(self.keys.rows, 16)
        begin = "first / 16u" if causal else "0u"
        reach = f"first / 16u + {self.tiles}u"
        end = f"({reach} < {tiles}u ? {reach} : {tiles}u)" if causal else f"{tiles}u"
        keys = _Half(self.keys, self.queries, (begin, f"{ceil_div(self.queries.rows, 16)}u"), "weigh_columns")
        queries = _Half(self.queries, self.keys, ("0u", end), "weigh_rows", load=self._cuda("load_offsets"))
        lines = self._half(keys, _OF_KEYS, arguments)
        return lines + self._half(queries, _OF_QUERIES, arguments)

    def _half(self, half: _Half, gradients: Sequence[_Gradient], arguments: Arguments) -> list[str]:
        written = {place: (value, view) for place, value, view in self.step.written}
        found = [each for each in gradients if each.place in written]
        if not found:
            return []
        declare, add, store = list(half.load), list[str](), list[str]()
        for each in found:
            cuda = self._cuda.bind(NAME=each.name, OCTETS=self.octets[each.number])
            declare += cuda("declare_sums")
            shared = half.other.names[each.number]
            add += cuda("accumulate", SHARED=shared, PITCH=self.pitches[each.number], FACTORS=each.factors)
            value, view = written[each.place]
            store += cuda(
                "store",
                RESULT=arguments.write(value),
                RESULT_IMAGE=view.strides[0],
                RESULT_HEAD=view.strides[1],
                RESULT_ROW=view.strides[2],
                RESULT_START=view.start,
                FACTOR="" if each.factors == "power" else f"* {self.step.op.scale!r}f",
            )
        return self._cuda(
            "part",
            OWN_PARTS=half.own.pads // self.own,
            OWN_COUNT=half.own.rows,
            FIRST_OTHER=half.others[0],
            LAST_OTHER=half.others[1],
            LOAD_SCORE_ROWS=self._rows("load_rows", half.own, 0),
            LOAD_SLOPE_ROWS=self._rows("load_rows", half.own, 1),
            DECLARE_OWN=declare,
            SCORE=self._rows("multiply_rows", half.other, 0),
            SLOPE=self._rows("multiply_rows", half.other, 1),
            WEIGH=self._cuda(half.weigh),
            ACCUMULATE=add,
            STORE=store,
        )

    def _rows(self, fragment: str, side: _Side, number: int) -> list[str]:
        """Return a fragment that reads the rows of a side: those for scores (0), or for slopes (1)."""
        kind = ("score", "slope")[number]
        names = {"ROWS": f"{kind}_rows", "PRODUCTS": f"{kind}s", "SHARED": side.names[number]}
        return self._cuda(fragment, OCTETS=self.octets[number], PITCH=self.pitches[number], **names)
