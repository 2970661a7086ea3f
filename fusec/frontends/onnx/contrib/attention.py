"""Import Attention, QAttention and MultiHeadAttention of onnxruntime."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusec.frontends.onnx.contrib.heads import (
    Scoring,
    attended,
    joined,
    later_keys,
    merge_heads,
    padding_mask,
    split_heads,
    summed,
    windows,
)
from fusec.frontends.onnx.contrib.quantized_products import matmul_integer_to_float
from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.ops.matmul import matmul
from fusec.ir import Value
from fusec.ops import Concat, pw
from fusec.ops.spec import broadcasts_to, require
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class _Masks:
    """Terms of the scores: a padding mask with its value, a bias, and -infinity for later keys."""

    padding: Value | None
    fill: float
    bias: Value | None
    causal: bool

    def bias_of(self, g: Emitter, q: Value, k: Value, past: int) -> tuple[Value | None, bool]:
        """Return the bias for scores of q and k, and whether the attention op has to hide later keys."""
        (batch, heads, queries, _), keys, dtype = q.type.shape, k.type.shape[2], q.type.dtype
        padding = None
        if self.padding is not None:
            padding = padding_mask(g, self.padding, (batch, queries, keys), self.fill, dtype)
        if self.bias is not None:
            fits = broadcasts_to(self.bias.type.shape, (batch, heads, queries, keys))
            require(fits, f"a bias {self.bias.type} for scores {[batch, heads, queries, keys]}")
        later = later_keys(g, queries, keys, past, dtype) if self.causal and past else None
        return summed(g, padding, self.bias, later), self.causal and not past


def _scale(scale: float, q: Value) -> float:
    return scale or 1 / math.sqrt(q.type.shape[3])


# Attention -----------------------------------------------------------------------------------------------------


def attention(
    g: Emitter,
    x: Value,
    weights: Value,
    bias: Value | None = None,
    mask_index: Value | None = None,
    past: Value | None = None,
    attention_bias: Value | None = None,
    past_sequence_length: Value | None = None,
    /,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: Sequence[int] = (),
    rotary_embedding_dim: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Value, ...]:
    """Import Attention: project x to q, k and v by one product, attend. The second result is all keys and values."""
    _decline(do_rotary, past_present_share_buffer)
    projected = matmul(g, x, weights)
    projected = projected if bias is None else g(pw("add"), projected, bias)
    masks = _Masks(mask_index, mask_filter_value, attention_bias, bool(unidirectional))
    return _attend_packed(g, projected, num_heads, qkv_hidden_sizes, past, masks, scale)


def q_attention(
    g: Emitter,
    x: Value,
    weight: Value,
    bias: Value,
    x_scale: Value,
    weight_scale: Value,
    mask_index: Value | None = None,
    x_zero: Value | None = None,
    weight_zero: Value | None = None,
    past: Value | None = None,
    /,
    *,
    num_heads: int,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    past_present_share_buffer: int = 0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Value, ...]:
    """Import QAttention: an Attention whose projection is a product of integers."""
    _decline(do_rotary, past_present_share_buffer)
    projected = matmul_integer_to_float(g, x, weight, x_scale, weight_scale, x_zero, weight_zero, bias)
    masks = _Masks(mask_index, mask_filter_value, None, bool(unidirectional))
    return _attend_packed(g, projected, num_heads, (), past, masks, scale)


def _decline(do_rotary: int, shared: int) -> None:
    require(not do_rotary, "do_rotary=1 is not supported: the op's angles are those of one model family")
    require(not shared, "past_present_share_buffer=1 is not supported: past and present are separate tensors")


def _attend_packed(
    g: Emitter,
    projected: Value,
    heads: int,
    sizes: Sequence[int],
    past: Value | None,
    masks: _Masks,
    scale: float,
) -> tuple[Value, Value]:
    """Attend with q, k and v side by side in [B, S, features]. `past`: keys and values [2, B, heads, P, D]."""
    width = projected.type.shape[-1]
    require(projected.type.rank == 3, f"takes x[batch, length, features], a product {projected.type}")
    require(bool(sizes) or width % 3 == 0, f"{width} features do not divide into q, k and v")
    parts = windows(g, projected, 2, *(sizes or (width // 3,) * 3))
    require(len(parts) == 3, f"qkv_hidden_sizes {list(sizes)} are not three sizes")
    q, k, v = (split_heads(g, part, heads) for part in parts)
    before = 0
    if past is not None:
        require(past.type.rank == 5 and past.type.shape[0] == 2, f"past {past.type} is not [2, B, heads, length, D]")
        before = past.type.shape[3]
        k, v = (
            joined(g, g.reshape(part, past.type.shape[1:]), new)
            for part, new in zip(windows(g, past, 0, 1, 1), (k, v), strict=True)
        )
    bias, causal = masks.bias_of(g, q, k, before)
    y = merge_heads(g, attended(g, q, k, v, bias, Scoring(_scale(scale, q), causal)))
    if g.outputs == 1:
        return y, y
    require(k.type.shape == v.type.shape, f"keys {k.type} and values {v.type} do not fit into one result")
    return y, g(Concat(0), g.reshape(k, (1, *k.type.shape)), g.reshape(v, (1, *v.type.shape)))


# MultiHeadAttention --------------------------------------------------------------------------------------------


def multi_head_attention(
    g: Emitter,
    query: Value,
    key: Value | None = None,
    value: Value | None = None,
    bias: Value | None = None,
    key_padding_mask: Value | None = None,
    attention_bias: Value | None = None,
    past_key: Value | None = None,
    past_value: Value | None = None,
    past_sequence_length: Value | None = None,
    cache_indirection: Value | None = None,
    /,
    *,
    num_heads: int,
    mask_filter_value: float = -10000.0,
    scale: float = 0.0,
    unidirectional: int = 0,
) -> tuple[Value, ...]:
    """Import MultiHeadAttention. The second and third results are all keys and all values, [B, heads, T, D]."""
    unread = past_sequence_length is None and cache_indirection is None
    require(unread, "past_sequence_length and cache_indirection, of beam search in place, are not supported")
    require((past_key is None) == (past_value is None), "needs past_key and past_value together")
    q, k, v = _operands(g, query, key, value, num_heads)
    if bias is not None:
        q, k, v = _biased(g, bias, q, k, v, key is not None and key.type.rank == 4)
    before = 0
    if past_key is not None and past_value is not None:
        before = past_key.type.shape[2]
        k, v = joined(g, past_key, k), joined(g, past_value, v)
    masks = _Masks(key_padding_mask, mask_filter_value, attention_bias, bool(unidirectional))
    added, causal = masks.bias_of(g, q, k, before)
    return merge_heads(g, attended(g, q, k, v, added, Scoring(_scale(scale, q), causal))), k, v


def _operands(
    g: Emitter, query: Value, key: Value | None, value: Value | None, heads: int
) -> tuple[Value, Value, Value]:
    """Return q, k and v as [B, heads, length, D]. They come apart, or packed as [B, length, heads, 3 or 2, D]."""

    def unpacked(packed: Value, count: int) -> list[Value]:
        require(packed.type.rank == 5 and packed.type.shape[2:4] == (heads, count), f"{packed.type} for {heads} heads")
        batch, length, _, _, width = packed.type.shape
        parts = windows(g, packed, 3, *[1] * count)
        return [split_heads(g, g.reshape(part, (batch, length, heads * width)), heads) for part in parts]

    if key is None:
        require(value is None, "has a value and no key")
        q, k, v = unpacked(query, 3)
        return q, k, v
    q = split_heads(g, query, heads)
    if value is None:
        k, v = unpacked(key, 2)
        return q, k, v
    if key.type.rank == 4:  # keys and values of a cache that is not extended
        require(value.type.rank == 4, f"a value {value.type} for a key {key.type}")
        return q, key, value
    return q, split_heads(g, key, heads), split_heads(g, value, heads)


def _biased(g: Emitter, bias: Value, q: Value, k: Value, v: Value, cached: bool) -> tuple[Value, Value, Value]:
    """Add the parts of a bias [features of q, k and v] to them. Cached keys and values have it already."""
    sizes = [x.type.shape[1] * x.type.shape[3] for x in (q, k, v)]
    parts = windows(g, bias, 0, *sizes)

    def added(x: Value, part: Value) -> Value:
        return g(pw("add"), x, g.reshape(part, (1, x.type.shape[1], 1, x.type.shape[3])))

    if cached:
        return added(q, parts[0]), k, v
    return added(q, parts[0]), added(k, parts[1]), added(v, parts[2])


TABLE: Mapping[str, OpFunction] = {
    "Attention": attention,
    "QAttention": q_attention,
    "MultiHeadAttention": multi_head_attention,
}
