"""Import GroupQueryAttention, the attention of decoders with a cache, and RotaryEmbedding."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fusec.frontends.onnx.contrib.heads import (
    Angles,
    Scoring,
    attended,
    filtered,
    merge_heads,
    rotated,
    split_heads,
    windows,
)
from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.emission.host_values import HostValueError
from fusec.frontends.onnx.movement.gather_scatter import along, spread, tensor_scatter
from fusec.ir import DType, TensorType, Value
from fusec.ops import Concat, Pad, RmsNorm, pw
from fusec.ops.spec import broadcasts_to, require


def group_query_attention(
    g: Emitter,
    query: Value,
    key: Value | None,
    value: Value | None,
    past_key: Value | None,
    past_value: Value | None,
    seqlens_k: Value,
    total_sequence_length: Value,
    cos_cache: Value | None = None,
    sin_cache: Value | None = None,
    position_ids: Value | None = None,
    attention_bias: Value | None = None,
    head_sink: Value | None = None,
    k_scale: Value | None = None,
    v_scale: Value | None = None,
    q_norm_weight: Value | None = None,
    k_norm_weight: Value | None = None,
    /,
    *,
    num_heads: int,
    kv_num_heads: int,
    causal: int = 1,
    do_rotary: int = 0,
    k_quant_type: str = "NONE",
    kv_cache_bit_width: int = 0,
    local_window_size: int = -1,
    qk_norm_epsilon: float = 1e-6,
    qk_output: int = 0,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    sliding_window_cache: int = 0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
) -> tuple[Value, ...]:
    """Import GroupQueryAttention: write the new keys and values into the cache at the place of each sequence, attend.

    A query sees the keys of its sequence up to its own position. The second and third results are the cache.
    """
    require(causal == 1, "causal=0 is not supported")
    require(
        {k_quant_type, v_quant_type} == {"NONE"} and k_scale is None and v_scale is None,
        "a quantised cache is not supported",
    )
    require(qk_output == 0, "qk_output is not supported: fusec does not store the scores")
    require(not sliding_window_cache, "sliding_window_cache=1, a cache that wraps around, is not supported")
    require((past_key is None) == (past_value is None), "needs past_key and past_value together")
    q, k, v = _heads(g, query, key, value, num_heads, kv_num_heads)
    batch, _, length, width = q.type.shape
    require(seqlens_k.type.size == batch, f"lengths {seqlens_k.type} for {batch} sequences")
    if q_norm_weight is not None and k_norm_weight is not None:
        q, k = (g(RmsNorm(3, qk_norm_epsilon), x, w) for x, w in ((q, q_norm_weight), (k, k_norm_weight)))
    room = past_key.type.shape[2] if past_key is not None else 0
    first = _first_positions(g, seqlens_k, length, room)
    positions = g(pw("add"), first, along(g, length, 1, 2))
    if do_rotary:
        require(cos_cache is not None and sin_cache is not None, "do_rotary=1 needs cos_cache and sin_cache")
        assert cos_cache is not None
        assert sin_cache is not None
        at = position_ids if position_ids is not None else positions
        angles = Angles(cos_cache, sin_cache, at, bool(rotary_interleaved))
        q, k = rotated(g, q, angles), rotated(g, k, angles)
    total = _total(g, total_sequence_length, room)
    require(total >= length, f"total_sequence_length {total} for {length} new tokens")
    k, v = (_stored(g, past, new, first, max(total, room)) for past, new in ((past_key, k), (past_value, v)))
    seen = [g.window(x, 2, 0, total) for x in (k, v)]
    bias: Value | None = None
    plain = not room and total == length and not local_window_size > 0 and attention_bias is None
    sink = head_sink is not None or bool(smooth_softmax)
    if not plain or sink:
        bias = _visible(g, positions, total, local_window_size, q.type.dtype)
    if attention_bias is not None:
        fits = broadcasts_to(attention_bias.type.shape, (batch, num_heads, length, total))
        require(fits, f"a bias {attention_bias.type} for scores {[batch, num_heads, length, total]}")
        bias = attention_bias if bias is None else g(pw("add"), attention_bias, bias)
    if sink and bias is not None:
        seen, bias = _with_sink(g, seen, bias, head_sink, num_heads)
    how = Scoring(scale or 1 / math.sqrt(width), causal=bias is None, softcap=softcap)
    return merge_heads(g, attended(g, q, seen[0], seen[1], bias, how)), k, v


def _heads(
    g: Emitter, query: Value, key: Value | None, value: Value | None, heads: int, groups: int
) -> tuple[Value, Value, Value]:
    """Return q[B, heads, S, D] and k and v[B, groups, S, D]. Without a key, all three are in the query."""
    require((key is None) == (value is None), "needs a key and a value together")
    require(groups >= 1 and heads % groups == 0, f"{heads} heads of q do not divide among {groups} of k and v")
    if key is None or value is None:
        width = query.type.shape[-1]
        require(width % (heads + 2 * groups) == 0, f"{width} features are not {heads} + 2 * {groups} heads")
        each = width // (heads + 2 * groups)
        query, key, value = windows(g, query, query.type.rank - 1, heads * each, groups * each, groups * each)
    q, k, v = split_heads(g, query, heads), split_heads(g, key, groups), split_heads(g, value, groups)
    require(k.type.shape == v.type.shape, f"keys {k.type} and values {v.type}")
    new = k.type.shape[2]
    require(
        new == q.type.shape[2], f"{new} new keys for {q.type.shape[2]} queries: keys of another call are not supported"
    )
    return q, k, v


def _first_positions(g: Emitter, seqlens: Value, length: int, room: int) -> Value:
    """Return the position of the first new token of each sequence, i64[B, 1]. `seqlens`: length - 1 after this call."""
    if not room:
        return g.full(TensorType((seqlens.type.size, 1), DType.I64), np.zeros((), np.int64))
    ends = g.reshape(g.cast(seqlens, DType.I64), (seqlens.type.size, 1))
    first = g(pw("sub"), ends, g.scalar(length - 1, ends))
    return g(pw("max"), first, g.scalar(0, first))


def _total(g: Emitter, given: Value, room: int) -> int:
    """Return the length of the longest sequence after this call, the size of the cache if it is not known."""
    try:
        return int(g.number(given, "total_sequence_length"))
    except HostValueError:
        if not room:
            raise
        g.note("total_sequence_length is computed at run time; fusec assumes that the cache has room for all tokens")
        return room


def _stored(g: Emitter, past: Value | None, new: Value, first: Value, room: int) -> Value:
    """Write the new keys or values into the cache, which grows to `room` positions."""
    if past is None or not past.type.shape[2]:
        more = room - new.type.shape[2]
        return g(Pad((0, 0, 0, 0, 0, 0, more, 0)), new) if more else new
    batch, groups, length, width = past.type.shape
    fits = (batch, groups, width) == (*new.type.shape[:2], new.type.shape[3])
    require(fits, f"a cache {past.type} for new keys {new.type}")
    cache = past if length >= room else g(Pad((0, 0, 0, 0, 0, 0, room - length, 0)), past)
    return tensor_scatter(g, cache, new, g.reshape(first, (batch,)), axis=2)


def _visible(g: Emitter, positions: Value, keys: int, window: int, dtype: DType) -> Value:
    """Return 0 for the keys up to each position, and -infinity for others, [B, 1, S, keys].

    window: number of keys that a query sees, itself included; no limit if not positive.
    """
    batch, length = positions.type.shape
    at = g.reshape(positions, (batch, 1, length, 1))
    keys_at = along(g, keys, 3, 4)
    visible = g(pw("cmp_le"), keys_at, at)
    if window > 0:
        visible = g(pw("logical_and"), visible, g(pw("cmp_gt"), keys_at, g(pw("sub"), at, g.scalar(window, at))))
    return filtered(g, visible, -math.inf, dtype)


def _with_sink(g: Emitter, seen: list[Value], bias: Value, sink: Value | None, heads: int) -> tuple[list[Value], Value]:
    """Add a key whose score is the sink of the head (0 without one) and whose value is 0."""

    def padded(x: Value) -> Value:
        return g(Pad((0, 0, 0, 0, 0, 0, 1, 0)), x)

    require(sink is None or sink.type.shape == (heads,), "head_sink has not one number a head")
    column = (
        g.reshape(sink, (1, heads, 1, 1))
        if sink is not None
        else g.full(TensorType((1, 1, 1, 1), bias.type.dtype), np.zeros((), bias.type.dtype.numpy))
    )
    batch, count, length, keys = bias.type.shape
    count = max(count, column.type.shape[1])
    wide = spread(g, bias, (batch, count, length, keys))
    last = spread(g, g.cast(column, bias.type.dtype), (batch, count, length, 1))
    return [padded(x) for x in seen], g(Concat(3), wide, last)


def rotary_embedding(
    g: Emitter,
    x: Value,
    position_ids: Value,
    cos_cache: Value,
    sin_cache: Value,
    /,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Value:
    """Import RotaryEmbedding of x[B, S, features] or x[B, heads, S, D]. One position id is that of the first token."""
    require(not is_packed_batching, "is_packed_batching=1 is not supported")
    require(scale == 1.0, f"scale={scale} is not supported, only 1")
    half = cos_cache.type.shape[-1]
    require(rotary_embedding_dim in (0, 2 * half), f"rotary_embedding_dim {rotary_embedding_dim}, {half} angles")
    flat = x.type.rank == 3
    if flat:
        require(bool(num_heads) or not rotary_embedding_dim, "rotary_embedding_dim needs num_heads")
        require(bool(num_heads) or x.type.shape[2] % (2 * half) == 0, f"x {x.type} for {half} angles")
        x = split_heads(g, x, num_heads or x.type.shape[2] // (2 * half))
    require(x.type.rank == 4, f"takes x of rank 3 or 4, not {x.type}")
    length, at = x.type.shape[2], g.cast(position_ids, DType.I64)
    if at.type.size == 1 and at.type.rank == 1:
        at = g(pw("add"), g.reshape(at, (1, 1)), along(g, length, 1, 2))
    y = rotated(g, x, Angles(cos_cache, sin_cache, at, bool(interleaved)))
    return merge_heads(g, y) if flat else y


TABLE: Mapping[str, OpFunction] = {
    "GroupQueryAttention": group_query_attention,
    "RotaryEmbedding": rotary_embedding,
}
