"""Generate attention in training over short sequences: a warp has all scores of sixteen queries in registers.

Then the largest score of a row is known before the first weight. No sum is scaled again, and the logarithms of sums
have the digits of fp32. A block has the keys and values of a head in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.attention.short_rows import OCTET, has_short_rows, stored_view
from fusec.gpu.kernels.codegen.cuda_template import c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS, View, source
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.ir import Node, Value
from fusec.ops import AttentionTrain

MOST_KEYS = 256  # whose scores fit into the registers of a warp
VARIANTS = ((4, 3), (8, 2), (16, 1))  # warps of a block, at most, and blocks that a multiprocessor must have room for
_CUDA = cuda_template(__package__, "attention_train.cuh")
_COPY = cuda_template(__package__, "attention_backward.cuh")


def attention_train(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of attention in training without a bias, of up to 256 keys; None for other steps.

    Its operands and its results may be views.
    """
    found = match_attention_train(nodes, outputs)
    if found is None:
        return None
    fit = [variant for variant in VARIANTS if found.shared_bytes * variant[1] <= figures.dynamic_bytes]
    return with_variants(found.kernel(*variant) for variant in fit)


def match_attention_train(nodes: Sequence[Node], outputs: Sequence[Value]) -> AttentionTrainSource | None:
    """Return the attention of a step; None if the kernel cannot run it."""
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, AttentionTrain)), None)
    if at is None or any(not isinstance(n.op, VIEW_OPS) for n in nodes if n is not nodes[at]):
        return None
    node = nodes[at]
    op = node.op
    assert isinstance(op, AttentionTrain)
    if len(node.operands) != 3 or node.results[0].type.dtype not in HALVES or not node.results[0].type.size:
        return None
    read = [found for value in node.operands if (found := source(value, nodes[:at])) is not None]
    stored = [stored_view(node, nodes[at + 1 :], value) for value in outputs]
    if len(read) < 3 or None in stored:
        return None
    written = {place: (value, view) for place, value, view in filter(None, stored)}
    q, k, v = (view for _, view in read)
    rows = [q, k, v, *(view for place, (_, view) in written.items() if place == 0)]
    sums = [view for place, (_, view) in written.items() if place == 1]
    if not all(map(has_short_rows, rows)) or any(s < 0 for view in sums for s in view.strides):
        return None
    if q.shape[1] != k.shape[1] or not 0 < k.shape[2] <= MOST_KEYS or len(written) != len(outputs):
        return None
    return AttentionTrainSource(op, tuple(value for value, _ in read), (q, k, v), written)


@dataclass(frozen=True, eq=False)
class AttentionTrainSource:
    """An attention in training.

    read, views: queries, keys and values.
    written: by place among the results, the value that is stored, and the view of the result in it.
    """

    op: AttentionTrain
    read: tuple[Value, ...]
    views: tuple[View, ...]
    written: dict[int, tuple[Value, View]]

    @property
    def tiles(self) -> int:
        """Tiles of sixteen keys."""
        return ceil_div(self.views[1].shape[2], 16)

    def _pitch(self, operand: int) -> int:
        """Return the elements from one row to the next. An odd number of octets avoids bank conflicts."""
        return self.views[operand].shape[3] + OCTET

    @property
    def shared_bytes(self) -> int:
        """Bytes of the keys and values of a head."""
        return 2 * 16 * self.tiles * (self._pitch(1) + self._pitch(2))

    def kernel(self, most_warps: int, resident: int) -> Kernel:
        """Return the kernel of one variant.

        most_warps: warps of a block, at most.
        resident: blocks that a multiprocessor must have room for.
        """
        q, k, v = self.views
        batch, heads, queries, depth = q.shape
        parts = ceil_div(ceil_div(queries, 16), most_warps)
        warps = ceil_div(ceil_div(queries, 16), parts)
        arguments, pointers = Arguments(), list[str]()
        for name, value, view in zip("qkv", self.read, self.views, strict=True):
            at = f"image * {view.strides[0]}u + head * {view.strides[1]}u + {view.start}u"
            pointers.append(f"const {C_TYPES[view.dtype]}* {name} = {arguments.read(value)} + ({at});")
        cuda = _CUDA.bind(TYPE=C_TYPES[q.dtype], WIDTH_OCTETS=v.shape[3] // OCTET)
        lines = cuda(
            "kernel",
            BLOCK_COORDINATES=split_index("block", [("image", batch), ("head", heads), ("part", parts)]),
            POINTERS=pointers,
            COPY_ROWS=[*self._copy("keys", "k", 1, warps), *self._copy("values", "v", 2, warps)],
            WARPS=warps,
            KEYS=16 * self.tiles,
            KEY_TILES=self.tiles,
            KEY_COUNT=k.shape[2],
            KEYS_FIT=c_bool(k.shape[2] % 16 == 0),
            QUERY_COUNT=queries,
            QUERY_STRIDE=q.strides[2],
            DEPTH_OCTETS=depth // OCTET,
            DEPTH_PITCH=self._pitch(1),
            WIDTH_PITCH=self._pitch(2),
            SCALE=f"{self.op.scale * math.log2(math.e)!r}f",
            IS_CAUSAL=c_bool(self.op.causal),
            STORE=[line for place in sorted(self.written) for line in self._store(place, arguments)],
        )
        grid = batch * heads * parts
        launch = arguments.launch("attention_train", lines, grid, warps * 32, resident=resident)
        return Kernel("attention_train", (replace(launch, resident_bytes=self.shared_bytes),))

    def _copy(self, name: str, memory: str, operand: int, warps: int) -> list[str]:
        _, _, rows, features = self.views[operand].shape
        return _COPY(
            "copy",
            TYPE=C_TYPES[self.views[operand].dtype],
            SHARED=name,
            MEMORY=memory,
            STRIDE=self.views[operand].strides[2],
            OCTETS=features // OCTET,
            PITCH=self._pitch(operand),
            PIECES=16 * self.tiles * (features // OCTET),
            COUNT=rows,
            ROWS_FIT=c_bool(rows % 16 == 0),
            THREADS=warps * 32,
        )

    def _store(self, place: int, arguments: Arguments) -> list[str]:
        """Return the code that stores a result: that of attention (0), or the logarithms of sums (1)."""
        value, view = self.written[place]
        image, head, row, _ = view.strides
        to = f"{arguments.write(value)} + (image * {image}u + head * {head}u + at * {row}u + {view.start}u)"
        cuda = _CUDA.bind(TYPE=C_TYPES[view.dtype], WIDTH_OCTETS=self.views[2].shape[3] // OCTET)
        return cuda("store_result" if place == 0 else "store_sums", TO=to, LOG_2=f"{math.log(2.0)!r}f")
