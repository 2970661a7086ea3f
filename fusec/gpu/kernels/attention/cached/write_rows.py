"""Generate writes of rows by index, with the rotary embeddings that compute them, in one launch.

Each part of the work has blocks of its own: the results of embeddings that other steps read, and the new rows of each
write. An embedding is computed again for the rows that are a part of its result, because that takes less time than a
launch. Where the result of a write has the memory of its operand, as the cache of a decoder does, only new rows are
written. Else a warp copies each other row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import field, replace

from fusec.gpu.kernels.attention.cached.rotary import element_coordinates, neighbours, rotate
from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, VECTOR_BYTES, Arguments, Kernel, by_value, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode
from fusec.ir import Node, TensorType, Value
from fusec.ops import Rotary
from fusec.schedule.row_writes import RowWrite, match_row_writes
from fusec.system.dataclass import dataclass

_CUDA = cuda_template(__package__, "write_rows.cuh")


def write_rows(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of writes of rows by index; None for other steps."""
    writes = match_row_writes(nodes)
    if writes is None or any(v.type.dtype not in C_TYPES for node in nodes for v in node.operands):
        return None
    rotaries = [node for node in nodes if isinstance(node.op, Rotary) and node.result in outputs]
    writes = [write for write in writes if write.scatter.result in outputs]
    if len(rotaries) + len(writes) < len(outputs):  # a view within the step is read outside
        return None
    parts = _Parts()
    for node in rotaries:
        parts.embed(node)
    for write in writes:
        parts.write(write)
    most_rows = max((write.scatter.result.type.shape[0] for write in writes), default=0)
    blocks = max(parts.blocks, min(figures.processors, ceil_div(most_rows, BLOCK // 32)))
    lines = [*parts.lines, *(line for write in writes for line in parts.copy_rows(write, blocks))]
    arguments = parts.arguments
    launch = arguments.launch("write_rows", [*arguments.begin(), *lines], blocks)
    return Kernel("+".join(node.op.name for node in nodes), (replace(launch, dependent=True),))


@dataclass
class _Parts:
    """The parts of the work that are generated so far.

    blocks: those that they have together.
    """

    arguments: Arguments = field(default_factory=Arguments)
    lines: list[str] = field(default_factory=list[str])
    blocks: int = 0

    def _add(self, count: int, work: Sequence[str]) -> None:
        """Add a part with `count` packs."""
        first, self.blocks = self.blocks, self.blocks + ceil_div(count, BLOCK)
        ends = {"FIRST": by_value(first), "END": by_value(self.blocks), "COUNT": by_value(count)}
        self.lines += _CUDA("part", BLOCK=BLOCK, WORK=work, **ends)

    def embed(self, node: Node) -> None:
        """Add an embedding whose result is stored."""
        y, view = node.result, View.of(node.operands[0].type)
        vector = neighbours(node, view, [y])
        rotated = rotate(node, (node.operands[0], view), vector, self.arguments, lambda code: code.store(y))
        work = _CUDA("embed", VECTOR=vector, COORDINATES=element_coordinates(y.type), ROTATE=rotated)
        self._add(y.type.size // vector, work)

    def write(self, write: RowWrite) -> None:
        """Add the new rows of a write."""
        (_, indices, rows), result = write.scatter.operands, write.scatter.result
        width = math.prod(rows.type.shape[1:])
        vector = _widest(result.type, width)
        if write.rotary is not None:
            own = neighbours(write.rotary, View.of(write.rotary.operands[0].type), ())
            vector = math.gcd(vector, own, write.start)
        cuda = _CUDA.bind(
            TYPE=C_TYPES[result.type.dtype],
            RESULT=self.arguments.write(result),
            INDICES=self.arguments.read(indices),
            ROWS=result.type.shape[0],
            WIDTH=width,
            PACKS=width // vector,
            VECTOR=vector,
            START=write.start,
        )
        if write.rotary is None:
            work = cuda("copy", NEW=self.arguments.read(rows))
        else:
            work = cuda(
                "embed_row",
                COORDINATES=element_coordinates(write.rotary.result.type),
                ROTATE=self._rotated(write.rotary, result, vector, width),
            )
        self._add(rows.type.size // vector, cuda("write", NEIGHBOURS=work))

    def _rotated(self, node: Node, result: Value, vector: int, width: int) -> list[str]:
        """Return the statements that compute neighbours of an embedding and store them in row `place` of `result`."""
        kind = f"{C_TYPES[result.type.dtype]}, {vector}"
        place = f"{self.arguments.write(result)} + (place * {width} + column)"

        def store(code: PointwiseCode) -> None:
            code.head.append(f"Pack<{kind}> found;")
            code.body.append(f"found.v[j] = {code.as_stored(node.result)};")
            code.tail.append(f"store_pack<{kind}>({place}, found);")

        x = node.operands[0]
        return rotate(node, (x, View.of(x.type)), vector, self.arguments, store)

    def copy_rows(self, write: RowWrite, blocks: int) -> list[str]:
        """Return the statements of all blocks that copy the rows that a write leaves as they are."""
        (old, indices, _), result = write.scatter.operands, write.scatter.result
        width = math.prod(result.type.shape[1:])
        vector = _widest(result.type, width)
        return _CUDA(
            "copy_rows",
            TYPE=C_TYPES[result.type.dtype],
            VECTOR=vector,
            OLD=self.arguments.read(old),
            RESULT=self.arguments.write(result),
            INDICES=self.arguments.read(indices),
            PACKS=width // vector,
            WIDTH=width,
            COUNT=by_value(indices.type.size),
            ROWS=result.type.shape[0],
            WARPS=BLOCK // 32,
            BLOCKS=by_value(blocks),
        )


def _widest(type: TensorType, width: int) -> int:
    """Return how many neighbours of a row of this width one access moves."""
    return math.gcd(width, VECTOR_BYTES // type.dtype.itemsize)
