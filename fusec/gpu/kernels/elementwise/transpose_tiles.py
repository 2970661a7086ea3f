"""Tensors that lie transposed to each other: both are touched in rows, through a tile of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from fusec.gpu.kernels.codegen.indexing import Laid, View
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import Chain, Space, decoded, step
from fusec.ir import Value

SIDE = 32  # of a tile: a warp reads or writes one row


class Sunk(Protocol):
    """A value, the output it is written as, and where."""

    @property
    def value(self) -> Value: ...
    @property
    def output(self) -> Value: ...
    @property
    def view(self) -> View: ...


@dataclass(frozen=True)
class Tile:
    """The dims along which what is read, and what is written, has its neighbours."""

    read: int
    written: int


def transposed(shape: tuple[int, ...], views: Sequence[Laid]) -> Tile | None:
    """The two dims, if the first of the tensors (which is written) and a whole one that is read have different
    innermost ones; None if all lie alike."""
    rank = len(shape)

    def innermost(view: Laid) -> int | None:
        return next((d for d in range(rank) if shape[d] != 1 and step(view, rank, d) == 1), None)

    written = innermost(views[0])
    whole = [view for view in views[1:] if all(step(view, rank, d) for d in range(rank) if shape[d] != 1)]
    for view in whole:
        read = innermost(view)
        if written is not None and read is not None and read != written:
            return Tile(read, written)
    return None


def tiled(
    shape: tuple[int, ...], tile: Tile, c_type: str, chain_of: Callable[[Space], Chain], sinks: Sequence[Sunk]
) -> tuple[list[str], int]:
    """Statements of block `b`, and how many blocks there are: compute along the rows that are read, keep what comes out
    as it will be stored, then write along the others."""
    r, w = tile.read, tile.written
    others = [d for d in range(len(shape)) if d not in (r, w) and shape[d] != 1]
    across, down = ceil_div(shape[r], SIDE), ceil_div(shape[w], SIDE)
    names = tuple(f"c{d}" if d in (*others, r, w) else None for d in range(len(shape)))
    chain = chain_of(Space(shape, names))
    lines = decoded("b", [*((f"c{d}", shape[d]) for d in others), ("down", down), ("across", across)], c_type == "u64")
    lines += ["const u32 column = threadIdx.x % 32u, row = threadIdx.x / 32u;"]
    for number, sink in enumerate(sinks):
        kind = C_TYPES[sink.output.type.dtype]
        lines.append(f"__shared__ {kind} tile{number}[{SIDE}][{SIDE + 1}];")
        chain.inside.append(f"tile{number}[line][column] = {chain.as_stored(sink.value)};")
    head = [f"for (u32 line = row; line < {SIDE}u; line += {BLOCK // SIDE}u) {{"]
    read = [f"  const {c_type} c{r} = across * {SIDE}u + column, c{w} = down * {SIDE}u + line;"]
    write = [f"  const {c_type} c{r} = across * {SIDE}u + line, c{w} = down * {SIDE}u + column;"]
    guard = f"  if (c{r} >= {shape[r]}u || c{w} >= {shape[w]}u) continue;"
    lines += [
        *head,
        *read,
        guard,
        *(f"  {line}" for line in chain.lines()),
        "}",
        "__syncthreads();",
        *head,
        *write,
        guard,
    ]
    for number, sink in enumerate(sinks):
        at = chain.space.offset(sink.view)
        lines.append(f"  {chain.arguments.write(sink.output)}[{at}] = tile{number}[column][line];")
    total = across * down
    for d in others:
        total *= shape[d]
    return [*lines, "}"], total
