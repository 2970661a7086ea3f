"""Import ops that change the shape: Reshape, Transpose, Expand, Tile, DepthToSpace."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.frontends.onnx.emission.emit import Emitter, Table, axes_of
from fusec.ir import Value
from fusec.ops import Expand, Transpose
from fusec.ops.spec import broadcast, require


def identity(g: Emitter, x: Value, /) -> Value:
    return x


def dropout_7(g: Emitter, x: Value, /, *, ratio: float = 0.5) -> Value:
    return x


def reshape(g: Emitter, x: Value, shape: Value, /, *, allowzero: int = 0) -> Value:
    """Import Reshape. 0 copies the dim of x at that index (unless allowzero); one -1 is computed."""
    wanted = list(g.ints(shape, "the new shape"))
    if not allowzero:
        for i, size in enumerate(wanted):
            copied = f"dim {i} of {wanted} copies that of x, which has shape {list(x.type.shape)}"
            require(size != 0 or i < x.type.rank, copied)
            wanted[i] = size or x.type.shape[i]
    require(all(size >= -1 for size in wanted), f"negative dimension in the new shape {wanted}")
    require(wanted.count(-1) <= 1, f"more than one -1 in the new shape {wanted}")
    if -1 in wanted:
        rest = math.prod(size for size in wanted if size != -1)
        require(
            rest > 0 and x.type.size % rest == 0,
            f"{list(x.type.shape)} has {x.type.size} elements, no {wanted} fits them",
        )
        wanted[wanted.index(-1)] = x.type.size // rest
    return g.reshape(x, wanted)


def flatten(g: Emitter, x: Value, /, *, axis: int = 1) -> Value:
    rank = x.type.rank
    require(-rank <= axis <= rank, f"axis {axis} is out of range for rank {rank}")
    first = axis + rank if axis < 0 else axis
    return g.reshape(x, (math.prod(x.type.shape[:first]), math.prod(x.type.shape[first:])))


def squeeze_1(g: Emitter, x: Value, /, *, axes: Sequence[int] = ()) -> Value:
    return _squeeze(g, x, axes or None)


def squeeze(g: Emitter, x: Value, axes: Value | None = None, /) -> Value:
    return _squeeze(g, x, None if axes is None else g.ints(axes, "axes"))


def _squeeze(g: Emitter, x: Value, axes: Sequence[int] | None) -> Value:
    shape = x.type.shape
    removed = [i for i, d in enumerate(shape) if d == 1] if axes is None else axes_of(axes, len(shape))
    for axis in removed:
        require(shape[axis] == 1, f"dim {axis} of {list(shape)} is not 1")
    return g.reshape(x, [d for i, d in enumerate(shape) if i not in removed])


def unsqueeze_1(g: Emitter, x: Value, /, *, axes: Sequence[int]) -> Value:
    new = axes_of(axes, x.type.rank + len(axes))
    sizes = iter(x.type.shape)
    return g.reshape(x, [1 if i in new else next(sizes) for i in range(x.type.rank + len(new))])


def unsqueeze(g: Emitter, x: Value, axes: Value, /) -> Value:
    return unsqueeze_1(g, x, axes=g.ints(axes, "axes"))


def transpose(g: Emitter, x: Value, /, *, perm: Sequence[int] = ()) -> Value:
    order = tuple(perm) or tuple(reversed(range(x.type.rank)))
    return x if order == tuple(range(x.type.rank)) else g(Transpose(order), x)


def expand(g: Emitter, x: Value, shape: Value, /) -> Value:
    """Import Expand. x and the shape broadcast with each other, so a 1 in the shape has the dim of x."""
    wanted = g.ints(shape, "the shape")
    require(all(d >= 0 for d in wanted), f"negative dimension in {list(wanted)}")
    target = broadcast([x.type.shape, wanted])
    return x if target == x.type.shape else g(Expand(target), x)


def tile(g: Emitter, x: Value, repeats: Value, /) -> Value:
    """Import Tile: reshape each repeated dim d to (1, d), expand it to (count, d), and reshape to count * d.

    A dim of size 1 is expanded directly, so that later passes recognise the repeated heads of attention.
    """
    counts = g.ints(repeats, "repeats")
    shape = x.type.shape
    require(len(counts) == len(shape), f"{len(counts)} repeats for {len(shape)} dims")
    require(all(c >= 0 for c in counts), f"negative repeats {list(counts)}")
    if all(c == 1 for c in counts):
        return x
    parts = [(1, d) if c != 1 and d != 1 else (d,) for c, d in zip(counts, shape, strict=True)]
    split = g.reshape(x, [size for part in parts for size in part])
    repeated = [(c, *part[1:]) if c != 1 else part for c, part in zip(counts, parts, strict=True)]
    expanded = g(Expand(tuple(size for part in repeated for size in part)), split)
    return g.reshape(expanded, [c * d for c, d in zip(counts, shape, strict=True)])


def depth_to_space(g: Emitter, x: Value, /, *, blocksize: int, mode: str = "DCR") -> Value:
    n, c, h, w = _image(x, blocksize, mode)
    b = blocksize
    require(c % (b * b) == 0, f"{c} channels do not divide into blocks of {b}x{b}")
    if mode == "DCR":
        split, perm = (n, b, b, c // (b * b), h, w), (0, 3, 4, 1, 5, 2)
    else:
        split, perm = (n, c // (b * b), b, b, h, w), (0, 1, 4, 2, 5, 3)
    return g.reshape(g(Transpose(perm), g.reshape(x, split)), (n, c // (b * b), h * b, w * b))


def space_to_depth(g: Emitter, x: Value, /, *, blocksize: int, mode: str = "DCR") -> Value:
    n, c, h, w = _image(x, blocksize, mode)
    b = blocksize
    require(h % b == 0 and w % b == 0, f"{h}x{w} does not divide into blocks of {b}x{b}")
    perm = (0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4)
    blocks = g(Transpose(perm), g.reshape(x, (n, c, h // b, b, w // b, b)))
    return g.reshape(blocks, (n, c * b * b, h // b, w // b))


def _image(x: Value, blocksize: int, mode: str) -> tuple[int, ...]:
    require(x.type.rank == 4, f"takes [N, C, H, W], not {list(x.type.shape)}")
    require(blocksize >= 1, f"blocksize is {blocksize}")
    require(mode in ("DCR", "CRD"), f"knows no mode {mode!r}")
    return x.type.shape


TABLE: Table = {
    ("Identity", 1): identity,
    ("Dropout", 7): dropout_7,
    ("Reshape", 5): reshape,
    ("Flatten", 1): flatten,
    ("Squeeze", 1): squeeze_1,
    ("Squeeze", 13): squeeze,
    ("Unsqueeze", 1): unsqueeze_1,
    ("Unsqueeze", 13): unsqueeze,
    ("Transpose", 1): transpose,
    ("Expand", 8): expand,
    ("Tile", 6): tile,
    ("DepthToSpace", 1): depth_to_space,
    ("SpaceToDepth", 1): space_to_depth,
}
