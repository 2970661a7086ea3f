"""Run a CudnnGraph in NumPy from dims, strides, dtypes and virtual flags alone.

The simulator does not see the model, so a wrong stride, a lost pad or a misplaced operand gives a wrong answer.
Arithmetic is fp32, cuDNN's compute type. Sums of products are added in float64 and rounded to fp32 once. No engine
promises an order, and the result must not depend on the order of NumPy's BLAS. A value is rounded where it is stored,
or where a virtual tensor has another type than fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.ir import BYTES, DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.ops import Attention, AttentionBackward, AttentionTrain, BatchNormBackward, Conv, ConvTranspose, ConvWgrad
from fusec.ops.convolution import correlate, flipped, scatter
from fusec.ops.pointwise import CLASSES
from fusec.ops.training import correlate_batch

Buffer = np.ndarray[Any, Any]

# How cuDNN rounds floats to integers (benchmarks/checks/quantized_rounding.py).
ROUND: Callable[[Buffer], Buffer] = np.rint


def extent(tensor: CudnnTensor) -> int:
    """Count elements of memory that a tensor spans, from its first to its last."""
    if 0 in tensor.dims:
        return 0
    return 1 + sum((d - 1) * s for d, s in zip(tensor.dims, tensor.strides, strict=True))


def view(tensor: CudnnTensor, buffer: Buffer) -> Buffer:
    """View a flat buffer as the strided tensor. Raises ExecutionError if dtype or size do not fit."""
    if buffer.ndim != 1 or buffer.dtype != tensor.dtype.numpy or buffer.size < extent(tensor):
        raise ExecutionError(
            f"tensor {tensor.uid} needs {extent(tensor)} elements of {tensor.dtype.value}, "
            f"the buffer is {buffer.dtype}{list(buffer.shape)}"
        )
    strides = tuple(s * buffer.itemsize for s in tensor.strides)
    return np.lib.stride_tricks.as_strided(buffer, tensor.dims, strides)


def simulate(graph: CudnnGraph, buffers: Mapping[int, Buffer]) -> None:
    """Run a graph: read its inputs from flat buffers, by uid, and write its outputs into theirs."""
    values: dict[int, Buffer] = {}
    for tensor in graph.tensors:
        if tensor.value is not None:
            values[tensor.uid] = np.full(tensor.dims, tensor.value, np.float32)
    written = [_buffer(buffers, tensor) for tensor in graph.outputs]
    for tensor in graph.inputs:
        buffer = _buffer(buffers, tensor)
        if any(np.may_share_memory(buffer, other) for other in written):
            buffer = buffer.copy()  # a kernel reads each element before it is written
        values[tensor.uid] = _compute_type(view(tensor, buffer))
    with np.errstate(all="ignore"):
        for call in graph.calls:
            made = _CALLS[call.op](graph, call, [values[uid] for uid in call.inputs])
            for uid, result in zip(call.outputs, made if isinstance(made, tuple) else (made,), strict=True):
                tensor = graph.tensor(uid)
                if result.shape != tensor.dims:
                    shapes = f"{list(result.shape)}, declared {list(tensor.dims)}"
                    raise ExecutionError(f"{call.op} {call.mode}: gives {shapes}")
                if tensor.virtual:
                    # later calls read the register, which is rounded only if the tensor is declared so
                    values[uid] = _compute_type(result.astype(tensor.dtype.numpy, copy=False))
                else:
                    view(tensor, _buffer(buffers, tensor))[...] = converted(result, tensor.dtype)
                    values[uid] = _compute_type(result)


def converted(result: Buffer, dtype: DType) -> Buffer:
    """Convert floats to 8-bit integers as cuDNN's outputs do; other conversions are NumPy's.

    They round half to even and saturate; NaN becomes 0.
    """
    if dtype not in BYTES or result.dtype.kind != "f":
        return result
    info = np.iinfo(dtype.numpy)
    return np.nan_to_num(np.clip(ROUND(result), info.min, info.max), nan=0.0).astype(dtype.numpy)


def _buffer(buffers: Mapping[int, Buffer], tensor: CudnnTensor) -> Buffer:
    if tensor.uid not in buffers:
        raise ExecutionError(f"no buffer for tensor {tensor.uid}")
    return buffers[tensor.uid]


def _compute_type(array: Buffer) -> Buffer:
    return array if array.dtype == np.bool_ else array.astype(np.float32, copy=False)


def _window(call: CudnnCall) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    pads = (*call.attribute("pre_padding"), *call.attribute("post_padding"))
    return tuple(call.attribute("stride")), pads, tuple(call.attribute("dilation"))


def _conv_fprop(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    x, w = (array.astype(np.float64) for array in inputs)
    if call.attribute("flipped", False):
        w = flipped(w)
    strides, pads, dilations = _window(call)
    return _sums(call, correlate(np, x, w, Conv(strides, pads, dilations, x.shape[1] // w.shape[1])))


def _conv_dgrad(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    loss, w = (array.astype(np.float64) for array in inputs)
    strides, pads, dilations = _window(call)
    dims, n = graph.tensor(call.outputs[0]).dims, len(strides)
    groups = dims[1] // w.shape[1]
    bare = [
        s * (i - 1) + d * (k - 1) + 1 - p0 - p1
        for i, k, s, d, p0, p1 in zip(loss.shape[2:], w.shape[2:], strides, dilations, pads[:n], pads[n:], strict=True)
    ]
    extra = tuple(want - have for want, have in zip(dims[2:], bare, strict=True))
    return _rounded(scatter(np, loss, w, ConvTranspose(strides, pads, dilations, extra, groups)))


def _conv_wgrad(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    x, loss = (array.astype(np.float64) for array in inputs)
    strides, pads, dilations = _window(call)
    dims = graph.tensor(call.outputs[0]).dims
    op = ConvWgrad(dims[2:], strides, pads, dilations, x.shape[1] // dims[1])
    return _rounded(correlate_batch(np, x, loss, op))


def _matmul(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    return _sums(call, np.matmul(*(array.astype(np.float64) for array in inputs)))


def _sums(call: CudnnCall, sums: Buffer) -> Buffer:
    """Round sums of products to fp32; those of integers are exact, and wrap around in 32 bits."""
    return sums.astype(np.int64).astype(np.int32) if call.compute is DType.I32 else _rounded(sums)


def _sdpa(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    """Run attention. A query whose scores are all -infinity gets zeros, as from cuDNN (docs/hazards.md)."""
    op = Attention(call.attribute("attn_scale"), call.attribute("use_causal_mask"))
    q, k, v, *bias = (array.astype(np.float64) for array in inputs)
    (result,) = op.reference(np, q, k, v, *bias)
    return _rounded(np.where(_hidden(op, q, k, *bias), 0.0, result))


def _sdpa_train(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> tuple[Buffer, ...]:
    scale, causal = call.attribute("attn_scale"), call.attribute("use_causal_mask")
    result, sums = _several(AttentionTrain(scale, causal), inputs)
    q, k, _, *bias = inputs
    return np.where(_hidden(Attention(scale, causal), q, k, *bias), np.float32(0.0), result), sums


def _sdpa_backward(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> tuple[Buffer, ...]:
    """Run the gradients of attention. A query whose scores are all -infinity gets zeros and adds zeros."""
    scale, causal = call.attribute("attn_scale"), call.attribute("use_causal_mask")
    dy, q, k, v, y, sums, *bias = inputs
    # then the weight of each key is exp(-infinity - infinity), which is 0
    sums = np.where(_hidden(Attention(scale, causal), q, k, *bias), np.inf, sums)
    return _several(AttentionBackward(scale, causal), [dy, q, k, v, y, sums, *bias])


def _hidden(op: Attention, q: Buffer, k: Buffer, *bias: Buffer) -> Buffer:
    """Find the queries whose scores are all -infinity, as a mask [B,H,S,1]."""
    return np.isneginf(op.scores(np, q, k, *bias)).all(axis=-1, keepdims=True)


def _several(op: AttentionTrain | AttentionBackward, inputs: list[Buffer]) -> tuple[Buffer, ...]:
    return tuple(map(_rounded, op.reference(np, *(array.astype(np.float64) for array in inputs))))


def _rounded(sums: Buffer) -> Buffer:
    return sums.astype(np.float32)


_MODES = {"gelu_approx_tanh": "gelu_tanh", "gelu_approx_tanh_backward": "gelu_tanh_backward"}


def _pointwise(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    a = dict(call.attributes)
    if call.mode == "relu" and a:
        return _clipped_relu(a, inputs[0])
    if call.mode in _UNLIKE_REFERENCE:
        return _UNLIKE_REFERENCE[call.mode](*inputs)
    names = {"negative_slope": "alpha"}
    op = CLASSES[_MODES.get(call.mode, call.mode)](**{names.get(k, k): v for k, v in a.items()})
    (result,) = op.reference(np, *inputs)
    dims = graph.tensor(call.outputs[0]).dims
    return result if result.shape == dims else np.broadcast_to(result, dims)


def _quick_quotient(x: Buffer, y: Buffer) -> Buffer:
    """Divide as CUDA's __fdividef: a divisor beyond 2**126 gives 0, or NaN for an infinite dividend."""
    return np.where(np.abs(y) > np.float32(2.0**126), x * np.copysign(np.float32(0), y), x / y)


# Modes of cuDNN that treat NaN and infinities in another way than the ops that are lowered to them (docs/hazards.md).
_UNLIKE_REFERENCE: Mapping[str, Callable[..., Buffer]] = {
    "binary_select": lambda x, y, mask: np.where(mask.astype(bool), x, y),
    "div": _quick_quotient,
    "max": np.fmax,
    "min": np.fmin,
    "relu_backward": lambda dy, x: np.where(x <= 0, np.float32(0), dy),
}


def _clipped_relu(a: Mapping[str, Any], x: Buffer) -> Buffer:
    low, high = a.get("lower_clip", 0.0), a.get("upper_clip", math.inf)
    return np.minimum(np.maximum(x, np.float32(low)), np.float32(high))


def _reduction(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    (x,) = inputs
    dims = graph.tensor(call.outputs[0]).dims
    axes = tuple(i for i, (d, full) in enumerate(zip(dims, x.shape, strict=True)) if d == 1 and full != 1)
    reduce: dict[str, Callable[..., Buffer]] = {"add": np.sum, "max": np.max, "min": np.min, "mul": np.prod}
    if call.mode == "amax":
        return np.max(np.abs(x), axis=axes, keepdims=True)
    return reduce[call.mode](x, axis=axes, keepdims=True)


def _genstats(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> tuple[Buffer, ...]:
    x = inputs[0].astype(np.float64)
    axes = (0, *range(2, x.ndim))
    return tuple(_rounded(v.sum(axis=axes, keepdims=True)) for v in (x, x * x))


def _standardize(x: Buffer, axes: tuple[int, ...], epsilon: Buffer) -> Buffer:
    centred = x - x.mean(axis=axes, keepdims=True)
    variance = np.square(centred).mean(axis=axes, keepdims=True)
    return centred / np.sqrt(variance + np.float32(epsilon.reshape(-1)[0]))


def _normalised_axes(x: Buffer, scale: Buffer) -> tuple[int, ...]:
    """List the dims that cuDNN normalises: those where the scale has another size than 1."""
    return tuple(i for i, d in enumerate(scale.shape) if d != 1)


def _layernorm(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    x, scale, bias, epsilon = inputs
    return _standardize(x, _normalised_axes(x, scale), epsilon) * scale + bias


def _rmsnorm(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    x, scale, *bias, epsilon = inputs
    mean = np.square(x).mean(axis=_normalised_axes(x, scale), keepdims=True)
    result = x / np.sqrt(mean + np.float32(epsilon.reshape(-1)[0])) * scale
    return result + bias[0] if bias else result


def _instancenorm(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> Buffer:
    x, scale, bias, epsilon = inputs
    return _standardize(x, tuple(range(2, x.ndim)), epsilon) * scale + bias


def _batchnorm(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> tuple[Buffer, ...]:
    """Run batch norm in training. The next running variance is that of a sample: one less than the count divides it."""
    x, scale, bias, *running = (array.astype(np.float64) for array in inputs[:5])
    epsilon, momentum = (float(array.reshape(-1)[0]) for array in inputs[5:])
    axes = (0, *range(2, x.ndim))
    mean, variance = x.mean(axis=axes, keepdims=True), x.var(axis=axes, keepdims=True)
    inverse, count = 1.0 / np.sqrt(variance + epsilon), x.size // x.shape[1]
    batch = (mean, variance * count / (count - 1))
    updated = [(1.0 - momentum) * old + momentum * new for old, new in zip(running, batch, strict=True)]
    return tuple(map(_rounded, ((x - mean) * inverse * scale + bias, mean, inverse, *updated)))


def _batchnorm_backward(graph: CudnnGraph, call: CudnnCall, inputs: list[Buffer]) -> tuple[Buffer, ...]:
    dy, x, *numbers = (array.astype(np.float64) for array in inputs)
    dx, *sums = BatchNormBackward().reference(np, dy, x, *(v.reshape(-1) for v in numbers))
    return (_rounded(dx), *(_rounded(v).reshape(numbers[0].shape) for v in sums))


_CALLS: Mapping[str, Callable[[CudnnGraph, CudnnCall, list[Buffer]], Buffer | tuple[Buffer, ...]]] = {
    "conv_fprop": _conv_fprop,
    "conv_dgrad": _conv_dgrad,
    "conv_wgrad": _conv_wgrad,
    "matmul": _matmul,
    "sdpa": _sdpa,
    "sdpa_train": _sdpa_train,
    "sdpa_backward": _sdpa_backward,
    "pointwise": _pointwise,
    "genstats": _genstats,
    "reduction": _reduction,
    "layernorm": _layernorm,
    "rmsnorm": _rmsnorm,
    "instancenorm": _instancenorm,
    "batchnorm": _batchnorm,
    "batchnorm_backward": _batchnorm_backward,
}
