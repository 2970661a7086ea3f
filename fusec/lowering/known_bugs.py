"""Graphs that cuDNN accepts and computes wrongly: known by measurement, refused before they are asked for.

Measured on an H200 with cuDNN 9.19, every plan executed and compared (tests/gpu/test_device.py does it
again): broadcast operands beyond the forms below gave wrong numbers or a misaligned-address fault, and
boolean tensors in memory were not read as bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from fusec.ir import DType, TensorType, channels_last
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor

_PRODUCTS = ("conv_fprop", "conv_dgrad")
_ATTENTIONS = {"sdpa": 3, "sdpa_train": 3, "sdpa_backward": 6}  # operands before the bias
_GRID = 65535  # what CUDA allows in the second and third dim of a launch grid
_WIDEST_TILE = 128  # columns of the widest tile measured
# Engines that are compiled before they meet a graph. They hold one result: of a convolution with two, cuDNN offers
# them and the run fails ("vars.get_user_ptrs()[idx] != nullptr").
_ONE_RESULT = (0, 11, 12, 26, 29, 33, 44, 51, 53)
MAX_ELEMENTS = 2**31 - 1


def misread(graph: CudnnGraph) -> str | None:
    """Why cuDNN would compute this graph wrongly, or None if no known case applies."""
    for tensor in graph.tensors:
        if tensor.dtype is DType.BOOL and not tensor.virtual and tensor.value is None:
            return "a boolean tensor in memory: cuDNN does not read it as one byte per element"
    convolution = any(c.op in _PRODUCTS for c in graph.calls)
    matrix = any(c.op == "matmul" for c in graph.calls)
    if matrix and not graph.tensor_cores:
        return "a matmul in true fp32: the one engine that is offered rounds its operands to tf32"
    for call in graph.calls:
        if call.op == "reduction" and call.mode in ("max", "min"):
            return f"a reduction by {call.mode}: it starts from the largest finite number, and leaves NaN out"
        if call.op in _ATTENTIONS and _constant_in_each_head(graph, call):
            return "an attention bias with one number for each image and head: it is read from other places"
        if call.op == "matmul" and call.inputs[0] == call.inputs[1]:
            return "a matmul of one tensor with itself"
        if call.op == "matmul" and not _sources(graph, call.inputs[0]).isdisjoint(_sources(graph, call.inputs[1])):
            return "a matmul of a tensor with what its own prologue makes of it: the prologue is run on both"
        if call.op in _PRODUCTS and call.inputs[0] == call.inputs[1]:
            return "a convolution of one tensor with itself"
        if call.op == "conv_fprop" and not _usual_order(graph.tensor(call.inputs[1])):
            return "filters stored neither row-major nor channels last"
    if convolution and len(graph.outputs) > 1 and not all(_is_packed(t) for t in graph.outputs):
        return "a convolution with two results, one of them within a larger tensor: it is written as if it were alone"
    if all(c.op == "pointwise" for c in graph.calls):
        for matrices, _, columns in (t.dims for t in graph.outputs if len(t.dims) == 3):
            if matrices > _GRID or columns > _GRID * _WIDEST_TILE:
                return f"a pointwise graph of {matrices} times {columns} columns: more than a launch grid holds"
    uses = Counter(uid for call in graph.calls for uid in call.inputs)
    made = {uid for call in graph.calls for uid in call.outputs}
    for call in graph.calls:
        if call.op != "pointwise":
            continue
        result = graph.tensor(call.outputs[0])
        operands = [graph.tensor(uid) for uid in call.inputs]
        if call.mode.endswith("_backward") and any(t.dims != result.dims for t in operands):
            return f"{call.mode} with a broadcast operand"
        if convolution or matrix:
            if call.mode == "pow":
                return "pow beside a product: computed by logarithms, NaN for 0 to the power 0"
            if convolution and call.mode in ("tanh", "tanh_backward"):
                return f"{call.mode} beside a convolution: a quotient of exponentials, NaN where they overflow"
            (first, *_) = operands
            if call.mode == "identity" and not result.virtual and first.uid in made and uses[first.uid] > 1:
                return "a value stored by a copy and used by other ops too: the copy is not written"
        if convolution and result.dims[1] == 1 and call.mode == "add" and any(t.value is not None for t in operands):
            return "a number added to the result of a convolution with one filter: engines read it as a bias in memory"
        for uid in call.inputs:
            operand = graph.tensor(uid)
            if operand.value is not None:
                continue
            if convolution and not _rows_or_columns(operand, result):
                return (
                    f"a convolution's epilogue with an operand {list(operand.dims)} for {list(result.dims)}: only "
                    "full, per-channel and per-pixel operands are computed right"
                )
            if matrix and _is_broadcast_in_another_order(operand, result):
                return f"a matmul's epilogue with an operand {list(operand.dims)} by strides {list(operand.strides)}"
            if not convolution and not matrix and _memory_order(operand) != _memory_order(result, operand):
                return "a pointwise graph over operands of two memory orders"
            if not convolution and not matrix and two_of_three(operand.dims, result.dims):
                return (
                    f"an operand {list(operand.dims)} broadcast along two dims of {list(result.dims)}: a pointwise "
                    "graph of rank 3 computes it wrongly"
                )
    return None


def wrong_plan(graph: CudnnGraph, engine: int, knobs: Mapping[int, int]) -> str | None:
    """Why one of cuDNN's plans for a graph computes it wrongly, while others may be right; None if none is known.

    Measured by running every plan of 3,300 random graphs on an H200: see docs/hazards.md.
    """
    convolution = next((c for c in graph.calls if c.op == "conv_fprop"), None)
    if convolution is not None:
        image, weight = (graph.tensor(uid) for uid in convolution.inputs)
        grouped, rows = image.dims[1] != weight.dims[1], not _channels_last(image)
        if engine == 7 and rows and (knobs.get(_TILE) in _READ_AS_IS or (grouped and len(image.dims) == 5)):
            return "engine 7 reads an image that is not stored channels last as if it were"
        if engine in (7, 52) and knobs.get(_TILE) in _READ_AS_IS and not _channels_last(weight):
            return f"engine {engine} reads filters that are not stored channels last as if they were"
        if engine == 3:
            return "engine 3 convolves by transforms: its error is one of the largest element, not of each"
        if engine == 4 and rows:
            return "engine 4 copies an image that is not stored channels last into memory it does not fill"
        if engine == 52 and (rows or len(graph.outputs) > 1):
            return "engine 52 with an image that is not stored channels last, or two outputs"
        if engine in _ONE_RESULT and len(graph.outputs) > 1 and all(c.op != "genstats" for c in graph.calls):
            return f"engine {engine} with two results: it writes one"
        if engine == 8 and _has_side_chain(graph):
            return "engine 8 with an epilogue op that does not depend on the convolution"
        if engine == 8 and any(c.mode == "sigmoid_backward" for c in graph.calls):
            return "engine 8 makes NaN of a sigmoid's gradient"
        if engine == 8 and _has_other_strides(graph):
            return "engine 8 reads an epilogue's operand by the strides of its result"
    if engine == 25 and any(c.op == "conv_dgrad" for c in graph.calls):
        return "engine 25 sums in the storage type, in no fixed order"
    for call in graph.calls:
        if call.op == "conv_wgrad":
            reason = _wrong_filter_gradient(graph, call, engine)
            if reason is not None:
                return reason
    if any(c.op == "matmul" for c in graph.calls):
        if engine == 2:
            return "engine 2 computes matmuls wrongly"
        if engine == 0 and len(graph.calls) > 1 and any(_dots(t) for t in graph.outputs):
            return "engine 0 with something behind a batch of dot products"
        unlike = next((c.mode for c in graph.calls if _is_unlike_cublas(c)), None)
        if engine == 0 and unlike is not None:
            return f"engine 0 computes another function than {unlike}"
    return None


def _wrong_filter_gradient(graph: CudnnGraph, call: CudnnCall, engine: int) -> str | None:
    """Tell why an engine computes the gradient of a convolution's filters wrongly; None if it does not."""
    image, loss, filters = (graph.tensor(uid) for uid in (*call.inputs, *call.outputs))
    if engine in (1, 20) and image.dims[1] != filters.dims[1]:
        return f"engine {engine} with the gradient of a grouped convolution's filters"
    if engine == 20 and filters.dtype.itemsize == 2:
        return "engine 20 sums the gradient of filters in the storage type, in no fixed order"
    if engine == 70 and not (_channels_last(image) and _channels_last(loss)):
        return "engine 70 reads an image or a loss that is not stored channels last as if it were"
    return None


def _is_unlike_cublas(call: CudnnCall) -> bool:
    """Tell if engine 0, which calls cuBLASLt, runs another activation in place of this one.

    It runs relu without its bounds, relu in place of leaky relu, and gelu by tanh.
    """
    if call.op != "pointwise":
        return False
    return call.mode in ("leaky_relu", "gelu") or (call.mode == "relu" and bool(call.attributes))


def _sources(graph: CudnnGraph, uid: int) -> set[int]:
    """Find the tensors in memory that an operand is, or is computed from in the graph; numbers by value are none."""
    makers = [call for call in graph.calls if uid in call.outputs]
    if not makers:
        return {uid} if graph.tensor(uid).value is None else set()
    return {source for call in makers for each in call.inputs for source in _sources(graph, each)}


def _constant_in_each_head(graph: CudnnGraph, call: CudnnCall) -> bool:
    """Tell if the bias of an attention has dims [batch, heads, 1, 1]."""
    biases = [graph.tensor(uid).dims for uid in call.inputs[_ATTENTIONS[call.op] :]]
    return any(dims[0] > 1 and dims[1] > 1 and dims[2:] == (1, 1) for dims in biases)


def _dots(tensor: CudnnTensor) -> bool:
    """Whether a product is a batch of 1x1 matrices."""
    return len(tensor.dims) == 3 and tensor.dims[0] > 1 and tensor.dims[1:] == (1, 1)


_READ_AS_IS = (29, 30)  # variants that bring no workspace for a copy in their order
_TILE = 12  # the knob type in which engine 7's variants differ


def _channels_last(tensor: CudnnTensor) -> bool:
    wide = _wide(tensor.dims)
    return 1 not in wide or all(tensor.strides[d] >= tensor.strides[1] for d in wide)


def _has_side_chain(graph: CudnnGraph) -> bool:
    """Whether some call neither leads to the convolution nor comes from it."""
    product = next(c for c in graph.calls if c.op in _PRODUCTS)
    after, before = set(product.outputs), set(product.inputs)
    for call in graph.calls:
        if not after.isdisjoint(call.inputs):
            after.update(call.outputs)
    for call in reversed(graph.calls):
        if not before.isdisjoint(call.outputs):
            before.update(call.inputs)
    return any((after | before).isdisjoint(call.outputs) for call in graph.calls)


def _has_other_strides(graph: CudnnGraph) -> bool:
    """Tell if an op after the convolution reads a tensor of its result's dims, stored with other strides."""
    for call in graph.calls:
        if call.op == "pointwise":
            result = graph.tensor(call.outputs[0])
            wide = _wide(result.dims)
            for operand in (graph.tensor(uid) for uid in call.inputs):
                if operand.dims == result.dims and any(operand.strides[d] != result.strides[d] for d in wide):
                    return True
    return False


def _memory_order(tensor: CudnnTensor, like: CudnnTensor | None = None) -> list[int]:
    """The dims from outermost to innermost in memory; those of 1 (in `like`, too) do not count."""
    wide = [d for d in _wide(tensor.dims) if like is None or like.dims[d] != 1]
    return sorted(wide, key=lambda d: -tensor.strides[d])


def _is_broadcast_in_another_order(operand: CudnnTensor, result: CudnnTensor) -> bool:
    """Tell if an operand is broadcast along one dim, and its other dims are not stored row-major."""
    wide = _wide(operand.dims)
    return len(wide) < len(_wide(result.dims)) and _memory_order(operand) != wide


def _usual_order(tensor: CudnnTensor) -> bool:
    """Whether a tensor is stored row-major or channels last."""
    wide = _wide(tensor.dims)
    return _memory_order(tensor) in (wide, [d for d in wide if d != 1] + [1] * (1 in wide))


def _wide(result: tuple[int, ...]) -> list[int]:
    return [axis for axis, size in enumerate(result) if size != 1]


def _rows_or_columns(operand: CudnnTensor, result: CudnnTensor) -> bool:
    """Whether an operand is full, one element, per channel (1,C,1,1) or per pixel (N,1,H,W)."""
    wide = _wide(result.dims)
    full = [axis for axis in wide if operand.dims[axis] != 1]
    return not full or full == wide or full == [1] or full == [axis for axis in wide if axis != 1]


def _is_packed(tensor: CudnnTensor) -> bool:
    """Whether the elements of a tensor follow each other without gaps, in some order."""
    step = 1
    for stride, dim in sorted((s, d) for s, d in zip(tensor.strides, tensor.dims, strict=True) if d != 1):
        if stride != step:
            return False
        step *= dim
    return True


def two_of_three(operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether an operand is broadcast along exactly two of three dims that are not 1."""
    wide = _wide(result)
    return len(wide) == 3 and sum(operand[axis] == 1 for axis in wide) == 2


def deadly(graph: CudnnGraph) -> str | None:
    """Why cuDNN would die of this graph, or take it although it is malformed; None if no case applies.

    Measured with cuDNN 9.19 and 9.28: a convolution that feeds a matmul, and a matmul of size 0, kill the
    process; the others are accepted silently with results that are not the graph's.
    """
    made: dict[int, CudnnCall] = {uid: call for call in graph.calls for uid in call.outputs}
    if len({t.uid for t in graph.tensors}) != len(graph.tensors):
        return "two tensors have one uid"
    if not graph.outputs:
        return "no output"
    for tensor in graph.tensors:
        if any(d < 1 for d in tensor.dims):
            return f"a tensor of size zero, {list(tensor.dims)}"
        if any(s < 0 for s in tensor.strides):
            return f"negative strides {list(tensor.strides)}"
        if math.prod(tensor.dims) > MAX_ELEMENTS:
            return f"a tensor of {math.prod(tensor.dims)} elements; cuDNN indexes with 32 bits"
    for tensor in graph.outputs:
        if _overlaps(tensor):
            return f"an output whose elements share memory, {list(tensor.dims)} by strides {list(tensor.strides)}"
    for call in graph.calls:
        reason = _malformed(graph, call)
        if reason:
            return reason
        if call.op == "matmul" and any(_comes_from_convolution(uid, made) for uid in call.inputs):
            return "a convolution that feeds a matmul in one graph"
        if call.op in _PRODUCTS and _reordered_in_front(graph, call.inputs[0], made):
            return "a convolution that reads, through other ops, an image that is not stored channels last"
    return None


def _reordered_in_front(graph: CudnnGraph, uid: int, made: dict[int, CudnnCall]) -> bool:
    """Whether a convolution's image is computed in the graph from one in another memory order: engine 4
    took a cast from NCHW in front of a convolution on an H200, and its kernel never ended."""
    call = made.get(uid)
    if call is None:
        return False
    for source in (graph.tensor(i) for i in call.inputs if i not in made):
        if source.value is None and not _image_order(source):
            return True
    return any(_reordered_in_front(graph, i, made) for i in call.inputs)


def _image_order(tensor: CudnnTensor) -> bool:
    """Whether a tensor is stored channels last, packed or as some of a larger one's channels."""
    order = channels_last(len(tensor.dims))
    wide = [d for d in order if tensor.dims[d] != 1]
    outer = [d for d in wide if d != 1]
    pitch = tensor.strides[outer[-1]] if outer else tensor.dims[1]
    whole = tuple(max(pitch, size) if d == 1 else size for d, size in enumerate(tensor.dims))
    strides = TensorType(whole, tensor.dtype, order).strides
    return all(tensor.strides[d] == strides[d] for d in wide)


def _overlaps(tensor: CudnnTensor) -> bool:
    """Whether two indices may name one element: a stride smaller than what lies inside it."""
    inside = 0
    for dim, stride in sorted(zip(tensor.dims, tensor.strides, strict=True), key=lambda pair: pair[1]):
        if dim > 1:
            if stride <= inside:
                return True
            inside += (dim - 1) * stride
    return False


def _malformed(graph: CudnnGraph, call: CudnnCall) -> str | None:
    operands = [graph.tensor(uid).dims for uid in call.inputs]
    result = graph.tensor(call.outputs[0]).dims
    if call.op == "conv_fprop":
        image, weight = operands
        if image[1] % weight[1] or weight[0] % (image[1] // weight[1]):
            return f"a convolution of {image[1]} channels by filters {list(weight)}: no whole number of groups"
    if call.op == "conv_dgrad":
        loss, weight = operands
        if loss[1] != weight[0] or result[1] % weight[1]:
            return f"a transposed convolution of {loss[1]} channels by filters {list(weight)}"
    if call.op == "conv_wgrad":
        image, loss = operands
        if image[1] % result[1] or loss[1] != result[0] or result[0] % max(1, image[1] // result[1]):
            return f"a filter gradient {list(result)} of {image[1]} channels and a loss of {loss[1]}"
    if call.op == "pointwise":
        for dims in operands:
            if len(dims) != len(result) or any(d not in (1, r) for d, r in zip(dims, result, strict=True)):
                return f"a pointwise operand {list(dims)} for a result {list(result)}"
        if any(r != 1 and all(dims[axis] == 1 for dims in operands) for axis, r in enumerate(result)):
            return f"a pointwise result {list(result)} larger than its operands {[list(d) for d in operands]}"
    if call.op == "reduction":
        (dims,) = operands
        if len(dims) != len(result) or any(r not in (1, d) for d, r in zip(dims, result, strict=True)):
            return f"a reduction of {list(dims)} to {list(result)}"
    if call.op == "instancenorm":
        channels = (1, result[1], *(1 for _ in result[2:]))
        if any(dims != channels for dims in operands[1:-1]):
            return f"an instance norm of {list(result)} with parameters {[list(d) for d in operands[1:-1]]}"
    return None


def _comes_from_convolution(uid: int, made: dict[int, CudnnCall]) -> bool:
    call = made.get(uid)
    if call is None:
        return False
    return call.op in _PRODUCTS or any(_comes_from_convolution(i, made) for i in call.inputs)
