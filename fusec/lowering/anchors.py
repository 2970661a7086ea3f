"""Lower convolutions, products, attention, norms and reductions to cuDNN calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fusec.errors import LoweringError
from fusec.ir import HALVES, DType, Literal, Node, TensorType, Value, quote
from fusec.lowering.attention_heads import attention_folding, require_aligned
from fusec.lowering.cudnn_graph import Attribute
from fusec.lowering.dim_folding import DimFolding, spatial_folding, trace
from fusec.lowering.graph_builder import ConstantBinding, CudnnBuilder
from fusec.ops import (
    ATTENTION_OPS,
    IMAGE_CONVOLUTIONS,
    AttentionBackward,
    Conv,
    ConvTranspose,
    ConvWgrad,
    FlippedConv,
    InstanceNorm,
    LayerNorm,
    MatMul,
    Reduce,
    RmsNorm,
)


def _require_float(node: Node) -> None:
    dtype = node.results[0].type.dtype
    if dtype not in (DType.F32, DType.F16, DType.BF16):
        raise LoweringError(f"{node.op.name} in {dtype.value} is not lowered")


def _require_product(node: Node) -> DType:
    """Return the type in which a product is summed. Raises LoweringError for types that cuDNN does not multiply."""
    if node.operands[0].type.dtype is DType.I8:
        return DType.I32
    _require_float(node)
    return DType.F32


def _convolution(b: CudnnBuilder, node: Node) -> None:
    assert isinstance(node.op, IMAGE_CONVOLUTIONS)
    compute = _require_product(node)
    x, w = node.operands
    image = b.operand(x, spatial_folding(x.type.shape))
    weight = b.operand(w, spatial_folding(w.type.shape))
    b.images.update(uid for uid in (image, weight) if uid not in b.uids.values())
    name = "conv_dgrad" if isinstance(node.op, ConvTranspose) else "conv_fprop"
    attributes = _window(node.op)
    if isinstance(node.op, FlippedConv):
        attributes["flipped"] = True
    b.call(name, (image, weight), b.result(node.result, b.foldings[node]), "", compute, attributes)


def _filter_gradient(b: CudnnBuilder, node: Node) -> None:
    assert isinstance(node.op, ConvWgrad)
    _require_float(node)
    x, dy = node.operands
    image, loss = (b.operand(v, spatial_folding(v.type.shape)) for v in (x, dy))
    if image == loss and image not in b.uids.values():
        loss = b.alias(image)
    b.images.update(uid for uid in (image, loss) if uid not in b.uids.values())
    b.call("conv_wgrad", (image, loss), b.result(node.result, b.foldings[node]), attributes=_window(node.op))


def _window(op: Conv | FlippedConv | ConvTranspose | ConvWgrad) -> dict[str, Attribute]:
    """Return the attributes of a convolution; one spatial dim gets a dim of 1 before it."""
    n = len(op.strides)
    unit, none = ((1,), (0,)) if n == 1 else ((), ())
    return {
        "pre_padding": (*none, *op.pads[:n]),
        "post_padding": (*none, *op.pads[n:]),
        "stride": (*unit, *op.strides),
        "dilation": (*unit, *op.dilations),
    }


def _matmul(b: CudnnBuilder, node: Node) -> None:
    compute = _require_product(node)
    _, foldings = b.anchor_foldings(node)
    left, right = (b.operand(value, folding) for value, folding in foldings)
    if left == right and left not in b.uids.values():
        right = b.alias(left)
    attributes = {"fast_sums": True} if node.op == MatMul(fast_sums=True) else None
    b.call("matmul", (left, right), b.result(node.result, b.foldings[node]), "", compute, attributes)


def _attention(b: CudnnBuilder, node: Node) -> None:
    """Lower attention, its form for training, or its gradient."""
    op = node.op
    assert isinstance(op, ATTENTION_OPS)
    calls = {"attention": ("sdpa", 3), "attention_train": ("sdpa_train", 3), "attention_backward": ("sdpa_backward", 5)}
    call, heads = calls[op.name]
    if node.results[0].type.dtype not in HALVES:
        raise LoweringError(f"{op.name} in {node.results[0].type.dtype.value}: only 16 bits are lowered")
    uids: list[int] = []
    for place, value in enumerate(node.operands):
        if place < heads:
            require_aligned(quote(value.name), trace(value))
        uid = b.operand(value, attention_folding(value.type.shape))
        uids.append(b.alias(uid) if uid in uids else uid)
    results: list[int] = []
    for value in node.results:
        if value not in b.stored:
            raise LoweringError(f"{op.name}: its result may not feed another op of the graph")
        name, strides = b.stored[value]
        if value.type.shape[-1] != 1 and strides[-1] != 1:
            raise LoweringError(f"{quote(name)}: the last dim of an attention's result must be contiguous in memory")
        results.append(b.result(value, attention_folding(value.type.shape)))
    attributes: dict[str, Attribute] = {"attn_scale": op.scale, "use_causal_mask": op.causal}
    if isinstance(op, AttentionBackward) and op.ordered:
        attributes["use_deterministic_algorithm"] = True
    b.call(call, tuple(uids), tuple(results), attributes=attributes)


def _row_norm(b: CudnnBuilder, node: Node) -> None:
    """Lower a layer norm or RMS norm over rows."""
    op = node.op
    assert isinstance(op, (LayerNorm, RmsNorm))
    _require_float(node)
    folding, x = b.foldings[node], node.operands[0]
    normal = x.type.shape[op.axis % x.type.rank :]
    for parameter in node.operands[1:]:
        if math.prod(parameter.type.shape) != math.prod(normal):
            raise LoweringError(
                f"{op.name}: {quote(parameter.name)} must have the whole normalised shape {list(normal)}"
            )
    image = b.operand(x, folding)
    parameters: list[int] = []
    for operand in node.operands[1:]:
        uid = _parameter(b, operand, normal, folding)
        # an alias, because a plan with one tensor for scale and bias fails when it runs
        parameters.append(b.alias(uid) if uid in parameters else uid)
    if isinstance(op, LayerNorm) and len(parameters) == 1:
        zero = Literal.of(np.zeros(normal, x.type.dtype.numpy))
        uid = b.tensor(folding.place("zero bias", normal, TensorType(normal, x.type.dtype).strides), x.type.dtype)
        b.constants.append(ConstantBinding(uid, zero, zero.type))
        parameters.append(uid)
    name = "layernorm" if isinstance(op, LayerNorm) else "rmsnorm"
    epsilon = b.scalar(op.epsilon, len(folding.groups))
    b.call(name, (image, *parameters, epsilon), b.result(node.result, folding))


def _parameter(b: CudnnBuilder, value: Value, shape: tuple[int, ...], folding: DimFolding) -> int:
    """Return the tensor of a norm's scale or bias, also for one element, because norms take no number by value."""
    if value.scalar() is None or value.literal is None:
        return b.operand(value, folding)
    dims = (1,) * len(folding.groups)
    uid = b.tensor((dims, dims), value.type.dtype)
    b.constants.append(ConstantBinding(uid, value.literal, value.type))
    return uid


def _instance_norm(b: CudnnBuilder, node: Node) -> None:
    assert isinstance(node.op, InstanceNorm)
    _require_float(node)
    folding, (x, scale, bias) = b.foldings[node], node.operands
    channels = (1, x.type.shape[1], *([1] * (x.type.rank - 2)))
    image = b.operand(x, folding)
    uids: list[int] = []
    for value in (scale, bias):
        placed = folding.place(quote(value.name), channels, tuple(1 for _ in channels))
        uid = b.tensor(placed, value.type.dtype)
        if value.literal is not None:
            b.constants.append(ConstantBinding(uid, value.literal, value.type))
        elif value.node is None:
            b.inputs.append((uid, value.name))
        else:
            raise LoweringError(f"{quote(value.name)}: a computed parameter of instance_norm")
        uids.append(uid)
    epsilon = b.scalar(node.op.epsilon, len(folding.groups))
    b.call("instancenorm", (image, *uids, epsilon), b.result(node.result, folding))


def _reduction(b: CudnnBuilder, node: Node) -> None:
    """Lower a reduction, whose result is stored in fp32."""
    op = node.op
    assert isinstance(op, Reduce)
    modes = {"sum": "add", "max": "max", "min": "min"}
    if op.kind not in modes:
        raise LoweringError(f"reduce {op.kind}: cuDNN reduces by add, max, min only")
    if node.result.type.dtype is not DType.F32:
        raise LoweringError("reduce: cuDNN stores its result in fp32 only")
    if node.result not in b.stored:
        raise LoweringError("reduce: its result may not feed another op of the graph")
    folding, x = b.foldings[node], node.operands[0].type
    image = b.operand(node.operands[0], folding)
    stored_type = TensorType(tuple(1 if i in op.axes else d for i, d in enumerate(x.shape)), DType.F32, x.order)
    name, strides = b.stored[node.result]
    wide = [d for d in range(x.rank) if stored_type.shape[d] != 1]
    written = [s for s, d in zip(strides, node.result.type.shape, strict=True) if d != 1]
    if written != [stored_type.strides[d] for d in wide]:
        raise LoweringError("reduce: the result's memory order differs from the operand's")
    uid = b.tensor(folding.place(quote(node.result.name), stored_type.shape, stored_type.strides), DType.F32)
    b.outputs.append((uid, name))
    b.uids[node.result] = uid
    b.call("reduction", (image,), uid, modes[op.kind])


def _channel_sums(b: CudnnBuilder, node: Node) -> None:
    """Lower the sums of channels after a convolution to genstats; the result of the convolution is stored, too."""
    (x,) = node.operands
    if x.node is None or not isinstance(x.node.op, Conv) or x not in b.uids:
        raise LoweringError("channel_sums: cuDNN computes them after a convolution only")
    if any(value not in b.stored for value in (x, *node.results)):
        raise LoweringError("channel_sums: cuDNN stores them and their image, but not all are outputs of the graph")
    shape = (1, x.type.shape[1], *(1,) * (x.type.rank - 2))
    stored_type = TensorType(shape, DType.F32, x.type.order)
    uids: list[int] = []
    for value in node.results:
        name, _ = b.stored[value]
        uid = b.uids[value] = b.tensor(
            b.foldings[node].place(quote(value.name), stored_type.shape, stored_type.strides), DType.F32
        )
        b.outputs.append((uid, name))
        uids.append(uid)
    b.call("genstats", (b.uids[x],), tuple(uids))


ANCHORED: Mapping[str, Callable[[CudnnBuilder, Node], None]] = {
    "conv": _convolution,
    "conv_flipped": _convolution,
    "conv_transpose": _convolution,
    "conv_wgrad": _filter_gradient,
    "matmul": _matmul,
    **dict.fromkeys(("attention", "attention_train", "attention_backward"), _attention),
    "layer_norm": _row_norm,
    "rms_norm": _row_norm,
    "instance_norm": _instance_norm,
    "reduce": _reduction,
    "channel_sums": _channel_sums,
}
