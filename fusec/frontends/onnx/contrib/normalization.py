"""Import layer norms with a residual, a bias or an embedding before them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.ir import DType, TensorType, Value
from fusec.ops import Gather, LayerNorm, Reduce, RmsNorm, pw
from fusec.ops.spec import broadcast, normalize_axis, require


def skip_layer_norm(
    g: Emitter,
    x: Value,
    skip: Value,
    gamma: Value,
    beta: Value | None = None,
    bias: Value | None = None,
    /,
    *,
    epsilon: float = 1e-12,
) -> tuple[Value, ...]:
    """Import SkipLayerNormalization: the layer norm of x + skip + bias; the fourth result is the sum."""
    total = _sum(g, x, skip, bias)
    mean, inverse = _statistics(g, total, epsilon)
    return _normed(g, total, gamma, beta, epsilon), mean, inverse, total


def skip_simplified_layer_norm(
    g: Emitter, x: Value, skip: Value, gamma: Value, bias: Value | None = None, /, *, epsilon: float = 1e-12
) -> tuple[Value, ...]:
    """Import SkipSimplifiedLayerNormalization: the RMS norm of x + skip + bias; the fourth result is the sum."""
    total = _sum(g, x, skip, bias)
    y = g(RmsNorm(total.type.rank - 1, epsilon), total, g.cast(gamma, total.type.dtype))
    inverse = _inverse_rms(g, total, (total.type.rank - 1,), epsilon)
    return y, _mean(g, total), inverse, total


def simplified_layer_norm(
    g: Emitter, x: Value, scale: Value, /, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Value, ...]:
    """Import SimplifiedLayerNormalization, an RMS norm. Its result has the type of the scale."""
    require(stash_type == 1, f"stash_type={stash_type} is not supported: half precision is computed in f32")
    axis = normalize_axis(axis, x.type.rank)
    wide = max((x.type.dtype, scale.type.dtype), key=lambda d: d.itemsize)
    y = g(RmsNorm(axis, epsilon), g.cast(x, wide), g.cast(scale, wide))
    return g.cast(y, scale.type.dtype), _inverse_rms(g, x, tuple(range(axis, x.type.rank)), epsilon)


def embed_layer_norm(
    g: Emitter,
    input_ids: Value,
    segment_ids: Value | None,
    word: Value,
    position: Value,
    segment: Value | None,
    gamma: Value,
    beta: Value,
    mask: Value | None = None,
    position_ids: Value | None = None,
    /,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 1,
) -> tuple[Value, ...]:
    """Import EmbedLayerNormalization: the layer norm of the sum of word, position and segment embeddings.

    The second result counts the ones in each row of the mask, the third is the sum.
    """
    require(input_ids.type.rank == 2, f"takes ids [batch, length], not {input_ids.type}")
    require(mask_index_type in (0, 1), f"mask_index_type {mask_index_type} is not supported, only the mask's length")
    require((segment_ids is None) == (segment is None), "needs segment ids and segment embedding together")
    batch, length = input_ids.type.shape
    known = length <= position.type.shape[0]
    require(position_ids is not None or known, f"{length} positions, the position embedding is {position.type}")
    places = g.constant(np.arange(length, dtype=np.int64)) if position_ids is None else position_ids
    total = g(pw("add"), g(Gather(0), word, input_ids), g(Gather(0), position, places))
    if segment is not None and segment_ids is not None:
        total = g(pw("add"), total, g(Gather(0), segment, segment_ids))
    y = _normed(g, total, gamma, beta, epsilon)
    if mask is None:
        counts = g.full(TensorType((batch,), DType.I32), np.zeros((), np.int32))
    else:
        ones = g.cast(g(pw("cmp_eq"), mask, g.scalar(1, mask)), DType.I32)
        counts = g(Reduce("sum", (1,), False), ones)
    return y, counts, total


def _sum(g: Emitter, x: Value, skip: Value, bias: Value | None) -> Value:
    """Add the residual, which may lack or repeat the batch, and the bias."""
    whole = broadcast([x.type.shape, skip.type.shape])
    require(whole == x.type.shape, f"a residual {skip.type} does not broadcast to {x.type}")
    total = x if bias is None else g(pw("add"), x, bias)
    return g(pw("add"), total, skip)


def _normed(g: Emitter, x: Value, gamma: Value, beta: Value | None, epsilon: float) -> Value:
    """Apply a layer norm to the last dim, with parameters in the type of x."""
    parameters = [g.cast(v, x.type.dtype) for v in (gamma, beta) if v is not None]
    return g(LayerNorm(x.type.rank - 1, epsilon), x, *parameters)


def _mean(g: Emitter, x: Value) -> Value:
    return g(Reduce("mean", (x.type.rank - 1,)), g.cast(x, DType.F32))


def _statistics(g: Emitter, x: Value, epsilon: float) -> tuple[Value, Value]:
    """Return the mean and the inverse deviation of the last dim, in f32."""
    mean = _mean(g, x)
    return mean, _inverse_rms(g, g(pw("sub"), g.cast(x, DType.F32), mean), (x.type.rank - 1,), epsilon)


def _inverse_rms(g: Emitter, x: Value, axes: tuple[int, ...], epsilon: float) -> Value:
    """Return 1 / sqrt(mean(x * x) + epsilon) in f32."""
    wide = g.cast(x, DType.F32)
    square = g(Reduce("mean", axes), g(pw("mul"), wide, wide))
    return g(pw("rsqrt"), g(pw("add"), square, g.scalar(epsilon, square)))


TABLE: Mapping[str, OpFunction] = {
    "SkipLayerNormalization": skip_layer_norm,
    "SkipSimplifiedLayerNormalization": skip_simplified_layer_norm,
    "EmbedLayerNormalization": embed_layer_norm,
}
