"""Transpose through tiles in shared memory, so that both reads and writes are coalesced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.indexing import Strided, View
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index, stride_along
from fusec.ir import Value
from fusec.system.dataclass import dataclass

SIDE = 32  # of a tile: a warp reads or writes one row
_CUDA = cuda_template(__package__, "transpose_tiles.cuh")


class SinkLike(Protocol):
    """A value, the output it is stored as, and the view of that."""

    @property
    def value(self) -> Value: ...
    @property
    def output(self) -> Value: ...
    @property
    def view(self) -> View: ...


@dataclass(frozen=True)
class TransposedDims:
    """The innermost dims of what is read, and of what is written."""

    read: int
    written: int


def transposed(shape: tuple[int, ...], views: Sequence[Strided]) -> TransposedDims | None:
    """Return the two dims if tensors have different innermost ones; None otherwise.

    views: memory of the tensor that is written, then of those that are read.
    """
    rank = len(shape)

    def innermost(view: Strided) -> int | None:
        return next((d for d in range(rank) if shape[d] != 1 and stride_along(view, rank, d) == 1), None)

    written = innermost(views[0])
    whole = [view for view in views[1:] if all(stride_along(view, rank, d) for d in range(rank) if shape[d] != 1)]
    for view in whole:
        read = innermost(view)
        if written is not None and read is not None and read != written:
            return TransposedDims(read, written)
    return None


def tiled(
    shape: tuple[int, ...],
    tile: TransposedDims,
    c_type: str,
    code_of: Callable[[Space], PointwiseCode],
    sinks: Sequence[SinkLike],
) -> tuple[list[str], int]:
    """Generate the statements of block `b`; return the number of blocks, too.

    Results are computed along the rows that are read, stored in the tile, and then written along the other dim.
    """
    r, w = tile.read, tile.written
    others = [d for d in range(len(shape)) if d not in (r, w) and shape[d] != 1]
    across, down = ceil_div(shape[r], SIDE), ceil_div(shape[w], SIDE)
    names = tuple(f"c{d}" if d in (*others, r, w) else None for d in range(len(shape)))
    code = code_of(Space(shape, names))
    lines = split_index(
        "b", [*((f"c{d}", shape[d]) for d in others), ("down", down), ("across", across)], c_type == "u64"
    )
    tiles: list[str] = []
    for number, sink in enumerate(sinks):
        tiles.append(f"__shared__ {C_TYPES[sink.output.type.dtype]} tile{number}[{SIDE}][{SIDE + 1}];")
        code.body.append(f"tile{number}[line][column] = {code.as_stored(sink.value)};")
    fill, places = code.lines(), [code.space.offset(sink.view) for sink in sinks]
    lines += _CUDA(
        "transpose",
        DECLARE_TILES=tiles,
        SIDE=SIDE,
        ROWS=BLOCK // SIDE,
        INDEX=c_type,
        READ_DIM=f"c{r}",
        READ_SIZE=shape[r],
        WRITTEN_DIM=f"c{w}",
        WRITTEN_SIZE=shape[w],
        FILL_TILES=fill,
        STORE_TILES=[
            f"{code.arguments.write(sink.output)}[{place}] = tile{number}[column][line];"
            for number, (sink, place) in enumerate(zip(sinks, places, strict=True))
        ],
    )
    return lines, across * down * math.prod(shape[d] for d in others)
