"""Build what attention ops share: heads, masks, caches, rotary embedding."""

from __future__ import annotations

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter
from fusec.frontends.onnx.movement.gather_scatter import along, spread
from fusec.ir import DType, Value
from fusec.ops import Attention, Concat, Gather, MatMul, Rotary, Softmax, Transpose, pw
from fusec.ops.spec import require
from fusec.system.dataclass import dataclass


def split_heads(g: Emitter, x: Value, heads: int) -> Value:
    """Reshape [B, S, heads * D] to [B, heads, S, D]."""
    require(x.type.rank == 3, f"takes [batch, length, features], not {x.type}")
    batch, length, width = x.type.shape
    require(heads >= 1 and width % heads == 0, f"{width} features do not divide into {heads} heads")
    return g(Transpose((0, 2, 1, 3)), g.reshape(x, (batch, length, heads, width // heads)))


def merge_heads(g: Emitter, y: Value) -> Value:
    """Reshape [B, heads, S, D] to [B, S, heads * D]."""
    batch, heads, length, width = y.type.shape
    return g.reshape(g(Transpose((0, 2, 1, 3)), y), (batch, length, heads * width))


def windows(g: Emitter, x: Value, axis: int, *sizes: int) -> tuple[Value, ...]:
    """Slice x along an axis into consecutive parts."""
    starts = np.cumsum((0, *sizes)).tolist()
    require(starts[-1] == x.type.shape[axis], f"parts of {list(sizes)} of axis {axis} of {x.type}")
    return tuple(g.window(x, axis, start, size) for start, size in zip(starts, sizes, strict=False))


def joined(g: Emitter, past: Value | None, new: Value) -> Value:
    """Append the new keys or values to those of earlier calls, [B, heads, length, D]."""
    return new if past is None or not past.type.shape[2] else g(Concat(2), past, new)


def summed(g: Emitter, *biases: Value | None) -> Value | None:
    """Add the biases that are given."""
    total: Value | None = None
    for bias in biases:
        total = bias if total is None else total if bias is None else g(pw("add"), total, bias)
    return total


# masks ---------------------------------------------------------------------------------------------------------


def later_keys(g: Emitter, queries: int, keys: int, past: int, dtype: DType) -> Value:
    """Make a constant [queries, keys] of -infinity where key j comes after query past + i, else 0."""
    return g.indexed((queries, keys), lambda i: np.where(i % keys > past + i // keys, -np.inf, 0.0), dtype)


def filtered(g: Emitter, visible: Value, fill: float, dtype: DType) -> Value:
    """Return 0 where `visible`, else `fill`."""
    zero = g.constant(np.zeros((), dtype.numpy))
    return g(pw("where"), visible, zero, g.scalar(fill, zero))


def padding_mask(g: Emitter, mask: Value, scores: tuple[int, int, int], fill: float, dtype: DType) -> Value:
    """Turn a mask of an attention op into a bias that broadcasts to the scores [B, heads, S, T].

    mask: [B, T] or [B, S, T] of 0 and 1, [B] lengths, or [2 * B] ends and starts.
    scores: B, S, T.
    """
    batch, queries, keys = scores
    shape = mask.type.shape
    require(mask.type.dtype.is_int, f"a mask of {mask.type.dtype.value}, not of integers")
    if shape in ((batch, keys), (batch, queries, keys)):
        visible = g.reshape(
            g(pw("cmp_gt"), mask, g.scalar(0, mask)), (batch, 1, shape[1] if mask.type.rank > 2 else 1, keys)
        )
        return filtered(g, visible, fill, dtype)
    known = "known are [B], [2 * B], [B, T] and [B, S, T]"
    require(shape in ((batch,), (2 * batch,)), f"a mask of shape {list(shape)} for scores {list(scores)}: {known}")
    at = g.cast(along(g, keys, 3, 4), mask.type.dtype)
    visible = g(pw("cmp_lt"), at, g.reshape(g.window(mask, 0, 0, batch), (batch, 1, 1, 1)))
    if shape == (2 * batch,) != (batch,):
        start = g.reshape(g.window(mask, 0, batch, batch), (batch, 1, 1, 1))
        visible = g(pw("logical_and"), visible, g(pw("cmp_ge"), at, start))
    return filtered(g, visible, fill, dtype)


# attention -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scoring:
    """Options of the scores. softcap: scores become softcap * tanh(scores / softcap); 0 for none."""

    scale: float
    causal: bool = False
    softcap: float = 0.0


def attended(g: Emitter, q: Value, k: Value, v: Value, bias: Value | None, how: Scoring) -> Value:
    """Attend from q[B, H, S, D] to k[B, G, T, D] and v[B, G, T, E]."""
    require(k.type.shape[2] > 0, "attends to no keys")
    if not how.softcap:
        operands = (q, k, v) if bias is None else (q, k, v, bias)
        return g(Attention(how.scale, how.causal), *operands)
    (b, h, s, _), (_, groups, t, d) = q.type.shape, k.type.shape

    def repeated(x: Value) -> Value:
        """Repeat each head of k or v for the heads of q that share it."""
        width = x.type.shape[3]
        wide = g.reshape(x, (b, groups, 1, t, width))
        return g.reshape(spread(g, wide, (b, groups, h // groups, t, width)), (b, h, t, width))

    require(h % groups == 0 and q.type.shape[3] == d, f"q {q.type} does not fit k {k.type}")
    scores = g(MatMul(), q, g(Transpose((0, 1, 3, 2)), repeated(k)))
    capped = g(pw("tanh"), g(pw("mul"), scores, g.scalar(how.scale / how.softcap, scores)))
    scores = g(pw("mul"), capped, g.scalar(how.softcap, scores))
    causal = later_keys(g, s, t, 0, q.type.dtype) if how.causal else None
    for added in (bias, causal):
        scores = scores if added is None else g(pw("add"), scores, added)
    return g(MatMul(), g(Softmax(3), scores), repeated(v))


# rotary embedding ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Angles:
    """cos and sin of rotary embedding, [positions, D / 2] each, and the positions [B or 1, S] to take."""

    cos: Value
    sin: Value
    positions: Value
    interleaved: bool


def rotated(g: Emitter, x: Value, angles: Angles) -> Value:
    """Apply rotary embedding to x[B, H, S, D]; features beyond twice the width of the caches stay as they are."""
    (batch, _, length, width), half = x.type.shape, angles.cos.type.shape[-1]
    require(angles.cos.type.rank == 2, f"a cache {angles.cos.type}, not [positions, half the width]")
    require(angles.cos.type.shape == angles.sin.type.shape, f"caches {angles.cos.type} and {angles.sin.type}")
    require(2 * half <= width, f"caches of {half} angles for heads of {width}")
    at = angles.positions
    require(at.type.shape in ((1, length), (batch, length)), f"positions {at.type} for {batch} x {length}")

    def taken(cache: Value) -> Value:
        rows = g.reshape(g(Gather(0), cache, at), (at.type.shape[0], 1, length, half))
        return g.cast(g(Concat(3), rows, rows), x.type.dtype)

    halves = g.window(x, 3, 0, 2 * half)
    shape = halves.type.shape
    if angles.interleaved:  # pairs of neighbours are the two halves
        halves = g.reshape(g(Transpose((0, 1, 2, 4, 3)), g.reshape(halves, (*shape[:3], half, 2))), shape)
    halves = g(Rotary(), halves, taken(angles.cos), taken(angles.sin))
    if angles.interleaved:
        halves = g.reshape(g(Transpose((0, 1, 2, 4, 3)), g.reshape(halves, (*shape[:3], 2, half))), shape)
    return halves if 2 * half == width else g(Concat(3), halves, g.window(x, 3, 2 * half, width - 2 * half))
