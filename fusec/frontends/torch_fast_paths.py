"""Write torch's fused calls of transformer layers by ops that its ONNX exporter knows.

In eval mode without gradients `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call one native op each. The
exporter writes masked attention so that a query without keys gets the mean of all values, or NaN; torch gives zeros.
It leaves out the smoothing of labels in a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked
from torch.nn import functional  # pyright: ignore[reportMissingImports] - as above

from fusec.frontends.torch_precise_ops import precise_ops

_OF_KEYS = 1  # the mask type of a mask of batch x keys; others are of queries x keys, or have all four dims


def without_fast_paths(program: Any) -> Any:
    """Return an ExportedProgram in which plain ops stand for the fused calls; the same one if it has none."""
    fused: dict[Any, Callable[..., Any]] = {
        torch.ops.aten._transformer_encoder_layer_fwd.default: encoder_layer,
        torch.ops.aten._native_multi_head_attention.default: multi_head_attention,
    }
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    attention = torch.ops.aten.scaled_dot_product_attention.default
    if any(node.target is attention and _is_rewritten(node) for node in calls):
        fused[attention] = dot_product_attention
    loss = torch.ops.aten.cross_entropy_loss.default
    if any(node.target is loss and _smooths_labels(node) for node in calls):
        fused[loss] = smoothed_cross_entropy
    unsqueeze = torch.ops.aten.unsqueeze.default
    if any(node.target is unsqueeze and node.meta["val"].is_complex() for node in calls):
        fused[unsqueeze] = complex_unsqueeze
    fused |= precise_ops()
    for node in calls:
        _require_exact(node)
    return program.run_decompositions(fused) if {node.target for node in calls} & fused.keys() else program


def _is_rewritten(node: Any) -> bool:
    """Tell if a call of attention has a mask, or operands without four dims, which the exporter refuses."""
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return mask is not None or node.args[0].meta["val"].dim() != 4


def _smooths_labels(node: Any) -> bool:
    """Tell if a loss smooths its labels, which the exporter leaves out."""
    return bool(node.args[5] if len(node.args) > 5 else node.kwargs.get("label_smoothing", 0.0))


def _require_exact(node: Any) -> None:
    """Check that torch's exporter leaves out no argument of a call.

    Raises ValueError if it does.
    """
    pools = (torch.ops.aten.avg_pool2d.default, torch.ops.aten.avg_pool3d.default)
    divisor = node.args[6] if len(node.args) > 6 else node.kwargs.get("divisor_override")
    if node.target in pools and divisor is not None:
        raise ValueError(f"{node.name}: `divisor_override` of an average pool is not supported")
    if node.target is torch.ops.aten.scatter_reduce.two and "mean" in (*node.args[4:], *node.kwargs.values()):
        raise ValueError(f"{node.name}: the mean of what is scattered is not supported")


def complex_unsqueeze(x: Any, dim: int) -> Any:
    """Compute `torch.unsqueeze` of complex numbers, for which the exporter has no function; it has one for views."""
    if not x.is_complex():
        return NotImplemented
    shape = list(x.shape)
    shape.insert(dim if dim >= 0 else dim + x.dim() + 1, 1)
    return x.view(shape)


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Compute `functional.scaled_dot_product_attention`.

    attn_mask: bools that are true where a key is seen, or numbers that are added to the scores.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = (query @ key.transpose(-2, -1)) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        hides = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hides else scores + attn_mask
    weights = torch.softmax(scores, -1)
    weights = torch.where(torch.isnan(weights), 0.0, weights)  # because a query that sees no key has zeros
    return functional.dropout(weights, dropout_p) @ value


def smoothed_cross_entropy(
    scores: Any,
    target: Any,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Compute `functional.cross_entropy`.

    target: the number of a class for each row, or the probability of every class.
    reduction: 0 for no reduction, 1 for the mean, 2 for the sum.
    """
    axis = min(scores.dim() - 1, 1)
    logs, count = torch.log_softmax(scores, axis), scores.shape[axis]
    shape = [count if dim == axis else 1 for dim in range(scores.dim())]
    weights = torch.ones_like(logs) if weight is None else weight.reshape(shape).expand_as(logs)
    if target.is_floating_point():
        mixed = target * (1 - label_smoothing) + label_smoothing / count
        loss = -(logs * weights * mixed).sum(axis)
        total: Any = loss.numel()
    else:
        known = target != ignore_index
        place = torch.where(known, target, 0).unsqueeze(axis)
        own = weights.gather(axis, place).squeeze(axis) * known
        loss = -(1 - label_smoothing) * logs.gather(axis, place).squeeze(axis) * own
        loss = loss - label_smoothing / count * (logs * weights).sum(axis) * known
        total = own.sum()
    return loss if reduction == 0 else loss.sum() / total if reduction == 1 else loss.sum()


def encoder_layer(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """Compute a layer of `nn.TransformerEncoder`: attention and two linear layers, each with a norm and an addition."""

    def attend(x: Any) -> Any:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return multi_head_attention(x, x, x, embed_dim, num_heads, *weights, mask, False, True, mask_type)[0]

    def feed_forward(x: Any) -> Any:
        inner = functional.linear(x, ffn_weight_1, ffn_bias_1)
        return functional.linear(
            functional.gelu(inner) if use_gelu else functional.relu(inner), ffn_weight_2, ffn_bias_2
        )

    def first_norm(x: Any) -> Any:
        return functional.layer_norm(x, [embed_dim], norm_weight_1, norm_bias_1, eps)

    def second_norm(x: Any) -> Any:
        return functional.layer_norm(x, [embed_dim], norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(first_norm(src))
        return x + feed_forward(second_norm(x))
    x = first_norm(src + attend(src))
    return second_norm(x + feed_forward(x))


def multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Any, Any]:
    """Compute the attention of `nn.MultiheadAttention`.

    mask: an element that is not 0 hides a key, as in torch's op.
    """
    width = embed_dim // num_head

    def heads(x: Any, part: int) -> Any:
        rows = slice(part * embed_dim, (part + 1) * embed_dim)
        projected = functional.linear(x, qkv_weight[rows], qkv_bias[rows])
        return projected.reshape(x.shape[0], x.shape[1], num_head, width).transpose(1, 2)

    q, k, v = heads(query, 0), heads(key, 1), heads(value, 2)
    scores = (q / math.sqrt(width)) @ k.transpose(-2, -1)
    if mask is not None:
        hidden = mask if mask.dtype == torch.bool else mask != 0
        if mask_type == _OF_KEYS:
            hidden = hidden.reshape(hidden.shape[0], 1, 1, hidden.shape[1])
        scores = scores.masked_fill(hidden, -math.inf)
    weights = torch.softmax(scores, -1)
    result = (weights @ v).transpose(1, 2).reshape(query.shape)
    if not need_weights:
        shown = torch.empty(0, dtype=query.dtype)
    else:
        shown = weights.mean(1) if average_attn_weights else weights
    return functional.linear(result, proj_weight, proj_bias), shown
