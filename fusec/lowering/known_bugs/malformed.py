"""Rules for graphs that are malformed, or that crash cuDNN.

Measured with cuDNN 9.19 and 9.28: a convolution that feeds a matmul, and a matmul of size 0, kill the process. cuDNN
accepts the others without an error, and their results are wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from fusec.lowering.cudnn_graph import CONVOLUTIONS, CudnnCall, CudnnGraph
from fusec.lowering.known_bugs.storage import is_channels_last, overlaps

MAX_ELEMENTS = 2**31 - 1
Dims = tuple[int, ...]


def deadly(graph: CudnnGraph) -> str | None:
    """Tell why cuDNN would crash on this graph, or accept it although it is malformed; None if no rule applies."""
    if len({t.uid for t in graph.tensors}) != len(graph.tensors):
        return "two tensors have one uid"
    if not graph.outputs:
        return "no output"
    reason = _malformed_tensor(graph)
    if reason is not None:
        return reason
    makers: dict[int, CudnnCall] = {uid: call for call in graph.calls for uid in call.outputs}
    for call in graph.calls:
        reason = _malformed_call(graph, call)
        if reason is not None:
            return reason
        if call.op == "matmul" and any(_comes_from_convolution(uid, makers) for uid in call.inputs):
            return "a convolution that feeds a matmul in one graph"
        if call.op in CONVOLUTIONS and _is_reordered(graph, call.inputs[0], makers):
            return "a convolution that reads, through other ops, an image that is not stored channels last"
    return None


def _malformed_tensor(graph: CudnnGraph) -> str | None:
    for tensor in graph.tensors:
        if any(d < 1 for d in tensor.dims):
            return f"a tensor of size zero, {list(tensor.dims)}"
        if any(s < 0 for s in tensor.strides):
            return f"negative strides {list(tensor.strides)}"
        if math.prod(tensor.dims) > MAX_ELEMENTS:
            return f"a tensor of {math.prod(tensor.dims)} elements; cuDNN indexes with 32 bits"
    for tensor in graph.outputs:
        if overlaps(tensor):
            return f"an output whose elements share memory, {list(tensor.dims)} by strides {list(tensor.strides)}"
    return None


def _comes_from_convolution(uid: int, makers: Mapping[int, CudnnCall]) -> bool:
    call = makers.get(uid)
    if call is None:
        return False
    return call.op in CONVOLUTIONS or any(_comes_from_convolution(i, makers) for i in call.inputs)


def _is_reordered(graph: CudnnGraph, uid: int, makers: Mapping[int, CudnnCall]) -> bool:
    """Tell if a convolution's image is computed in the graph from a tensor in another memory order.

    On an H200, engine 4 accepted a cast from NCHW before a convolution, and its kernel never ended.
    """
    call = makers.get(uid)
    if call is None:
        return False
    for source in (graph.tensor(i) for i in call.inputs if i not in makers):
        if source.value is None and not is_channels_last(source):
            return True
    return any(_is_reordered(graph, i, makers) for i in call.inputs)


# dims of one call's operands, by op ----------------------------------------------------------------------


def _malformed_call(graph: CudnnGraph, call: CudnnCall) -> str | None:
    check = _DIMS.get(call.op)
    operands = [graph.tensor(uid).dims for uid in call.inputs]
    return None if check is None else check(operands, graph.tensor(call.outputs[0]).dims)


def _convolution(operands: Sequence[Dims], result: Dims) -> str | None:
    image, weight = operands
    if image[1] % weight[1] or weight[0] % (image[1] // weight[1]):
        return f"a convolution of {image[1]} channels by filters {list(weight)}: no whole number of groups"
    return None


def _transposed_convolution(operands: Sequence[Dims], result: Dims) -> str | None:
    loss, weight = operands
    if loss[1] != weight[0] or result[1] % weight[1]:
        return f"a transposed convolution of {loss[1]} channels by filters {list(weight)}"
    return None


def _filter_gradient(operands: Sequence[Dims], result: Dims) -> str | None:
    image, loss = operands
    if image[1] % result[1] or loss[1] != result[0] or result[0] % max(1, image[1] // result[1]):
        return f"a filter gradient {list(result)} of {image[1]} channels and a loss of {loss[1]}"
    return None


def _pointwise(operands: Sequence[Dims], result: Dims) -> str | None:
    for dims in operands:
        if len(dims) != len(result) or any(d not in (1, r) for d, r in zip(dims, result, strict=True)):
            return f"a pointwise operand {list(dims)} for a result {list(result)}"
    if any(r != 1 and all(dims[axis] == 1 for dims in operands) for axis, r in enumerate(result)):
        return f"a pointwise result {list(result)} larger than its operands {[list(d) for d in operands]}"
    return None


def _reduction(operands: Sequence[Dims], result: Dims) -> str | None:
    (dims,) = operands
    if len(dims) != len(result) or any(r not in (1, d) for d, r in zip(dims, result, strict=True)):
        return f"a reduction of {list(dims)} to {list(result)}"
    return None


def _instance_norm(operands: Sequence[Dims], result: Dims) -> str | None:
    channels = (1, result[1], *(1 for _ in result[2:]))
    parameters = operands[1:-1]
    if any(dims != channels for dims in parameters):
        return f"an instance norm of {list(result)} with parameters {[list(d) for d in parameters]}"
    return None


_DIMS: Mapping[str, Callable[[Sequence[Dims], Dims], str | None]] = {
    "conv_fprop": _convolution,
    "conv_dgrad": _transposed_convolution,
    "conv_wgrad": _filter_gradient,
    "pointwise": _pointwise,
    "reduction": _reduction,
    "instancenorm": _instance_norm,
}
