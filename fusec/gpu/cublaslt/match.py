"""Match cuDNN graphs that are one call of cuBLASLt: act(alpha A·B + C + bias).

This module needs no CUDA, because a graph and a call are plain data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor

DTYPES = (DType.F16, DType.BF16, DType.F32)
CONVOLUTIONS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
# cuBLASLt's gelu is the one with tanh; the one with erf runs as a kernel after it
Epilogue = tuple[float, CudnnTensor | None, CudnnTensor | None, str]  # alpha, residual, bias, activation
ACTIVATIONS = {"relu": "relu", "gelu_approx_tanh": "gelu"}


@dataclass(frozen=True)
class Matrices:
    """Stack of matrices stored by columns.

    ld: elements from one column to the next; step: from one matrix to the next, 0 if one serves all
    """

    uid: int
    dtype: DType
    rows: int
    columns: int
    ld: int
    step: int


@dataclass(frozen=True)
class Product:
    """Call d = activation(alpha op(a) op(b) + c + bias) for each matrix of a stack.

    The bias is added to every column of d. Where the graph's result is stored by rows, d is its transpose.
    """

    a: Matrices
    b: Matrices
    d: Matrices
    transpose_a: bool
    transpose_b: bool
    batch: int
    alpha: float = 1.0
    c: Matrices | None = None
    bias: int | None = None  # its uid
    activation: str = ""
    tf32: bool = False  # operands in fp32 may be rounded to tf32


def product_of(graph: CudnnGraph) -> Product | None:
    """Return the graph as one call of cuBLASLt; None if it is not one.

    The call rounds where the graph does: sums and epilogue are in fp32 up to the one result.
    """
    if not graph.calls or len(graph.outputs) != 1 or any(0 in t.dims for t in graph.tensors):
        return None
    anchor, *epilogue = graph.calls
    image = anchor.op in CONVOLUTIONS
    if image and not _is_pixelwise(graph, anchor):
        return None
    if anchor.op not in ("matmul", *CONVOLUTIONS) or anchor.compute is not DType.F32:
        return None
    epilogue_parts = _epilogue(graph, anchor.outputs[0], epilogue)
    if epilogue_parts is None:
        return None
    _, residual, bias, _ = epilogue_parts
    left, right = (graph.tensor(uid) for uid in anchor.inputs)
    (result,) = graph.outputs
    types = left.dtype in DTYPES and left.dtype is right.dtype and result.dtype in (left.dtype, DType.F32)
    if not types or any(t is not None and t.dtype is not result.dtype for t in (residual, bias)):
        return None
    if left.virtual or right.virtual:  # made by a prologue
        return None
    found: tuple[_Stack | None, _Stack | None, _Stack | None]
    if anchor.op == "conv_wgrad":  # filters by channels: the transposed loss times the image
        loss = _stacked(right, True)
        found = None if loss is None else loss.transposed, _stacked(left, True), _filters(result).transposed
    elif anchor.op == "conv_dgrad":
        found = _stacked(left, True), _filters(right).transposed, _stacked(result, True)
    else:
        found = _stacked(left, image), _filters(right) if image else _stacked(right), _stacked(result, image)
    c = None if residual is None else _stacked(residual, image)
    if None in found or (residual is not None and (c is None or anchor.op == "conv_wgrad")):
        return None
    if bias is not None and anchor.op == "conv_wgrad":
        return None
    tf32 = graph.tensor_cores and left.dtype is DType.F32
    a, b, d = (stack for stack in found if stack is not None)
    return _as_columns(a, b, d, c, epilogue_parts, tf32)


@dataclass(frozen=True)
class _Stack:
    """Tensor with dims [batch, rows, columns] and its strides."""

    tensor: CudnnTensor
    dims: tuple[int, int, int]
    strides: tuple[int, int, int]

    @property
    def transposed(self) -> _Stack:
        (n, rows, columns), (step, down, right) = self.dims, self.strides
        return _Stack(self.tensor, (n, columns, rows), (step, right, down))

    def by_columns(self) -> Matrices | None:
        """Return the matrices if they are stored by columns; else None."""
        (n, rows, columns), (step, down, right) = self.dims, self.strides
        ld = right if columns > 1 else max(rows, 1)
        if (down != 1 and rows > 1) or ld < rows:
            return None
        return Matrices(self.tensor.uid, self.tensor.dtype, rows, columns, ld, step if n > 1 else 0)

    def operand(self) -> tuple[Matrices, bool] | None:
        """Return the matrices as stored, and True if those are transposed."""
        straight = self.by_columns()
        if straight is not None:
            return straight, False
        transposed = self.transposed.by_columns()
        return None if transposed is None else (transposed, True)


def _as_columns(
    a: _Stack,
    b: _Stack,
    d: _Stack,
    c: _Stack | None,
    epilogue: Epilogue,
    tf32: bool,
) -> Product | None:
    """Return the call; a result stored by rows is computed as the transposed product, as a bias of one row needs."""
    alpha, _, bias, activation = epilogue
    stored = d.transposed.by_columns()
    if stored is not None:
        left, right = b.transposed.operand(), a.transposed.operand()
        residual = None if c is None else c.transposed.by_columns()
    else:
        if bias is not None:
            return None
        stored, left, right = d.by_columns(), a.operand(), b.operand()
        residual = None if c is None else c.by_columns()
    if stored is None or left is None or right is None or (c is not None and residual is None):
        return None
    if bias is not None and (math.prod(bias.dims) != stored.rows or not _is_row(bias, d.tensor)):
        return None
    batch = d.dims[0]
    return Product(
        left[0],
        right[0],
        stored,
        left[1],
        right[1],
        batch,
        alpha,
        residual,
        None if bias is None else bias.uid,
        activation,
        tf32,
    )


def _epilogue(graph: CudnnGraph, uid: int, calls: list[CudnnCall]) -> Epilogue | None:
    """Return the epilogue of a product if cuBLASLt has its ops, in this order; else None."""
    alpha, activation = 1.0, ""
    residual: CudnnTensor | None = None
    bias: CudnnTensor | None = None
    for call in calls:
        before = graph.tensor(uid)
        if call.op != "pointwise" or activation or not before.virtual or before.dtype is not DType.F32:
            return None
        if call.compute is not DType.F32 or call.attributes or call.inputs.count(uid) != 1:
            return None
        others = [graph.tensor(other) for other in call.inputs if other != uid]
        uid = call.outputs[0]
        result = graph.tensor(uid)
        if result.dims != before.dims:
            return None
        if call.mode in ACTIVATIONS:
            activation = ACTIVATIONS[call.mode]
        elif call.mode == "mul" and others[0].value is not None and residual is bias is None:
            alpha *= others[0].value
        elif call.mode == "add" and others[0].value is None and not others[0].virtual:
            (other,) = others
            if bias is None and _is_row(other, result):
                bias = other
            elif residual is None and other.dims[1:] == result.dims[1:] and other.dims[0] in (1, result.dims[0]):
                residual = other
            else:
                return None
        elif call.mode != "identity":
            return None
    return alpha, residual, bias, activation


def _is_row(tensor: CudnnTensor, result: CudnnTensor) -> bool:
    """Return True if a tensor holds one number for each column of a result (channel of an image), contiguous."""
    axis = 2 if len(result.dims) == 3 else 1
    if tensor.dims[axis] != result.dims[axis] or math.prod(tensor.dims) != tensor.dims[axis]:
        return False
    return tensor.strides[axis] == 1 or tensor.dims[axis] == 1


def _stacked(tensor: CudnnTensor, image: bool = False) -> _Stack | None:
    """View a matmul's tensor as it is, and an image as a matrix with a row per pixel, if pixels are evenly spaced."""
    if not image:
        if len(tensor.dims) != 3 or len(tensor.strides) != 3:
            return None
        return _Stack(
            tensor, (tensor.dims[0], tensor.dims[1], tensor.dims[2]), (*tensor.strides[:2], tensor.strides[2])
        )
    pixels = [axis for axis in (0, *range(2, len(tensor.dims))) if tensor.dims[axis] != 1]
    for outer, inner in pairwise(pixels):
        if tensor.strides[outer] != tensor.strides[inner] * tensor.dims[inner]:
            return None
    count, channels = math.prod(tensor.dims) // tensor.dims[1], tensor.dims[1]
    apart = tensor.strides[pixels[-1]] if pixels else channels
    return _Stack(tensor, (1, count, channels), (0, apart, tensor.strides[1]))


def _filters(tensor: CudnnTensor) -> _Stack:
    """View filters of one pixel as a matrix [channels, filters]."""
    return _Stack(tensor, (1, tensor.dims[1], tensor.dims[0]), (0, tensor.strides[1], tensor.strides[0]))


def _is_pixelwise(graph: CudnnGraph, call: CudnnCall) -> bool:
    """Return True if a convolution is a matrix product: filters of one pixel, stride 1, no padding, no groups."""
    first, second, result = (graph.tensor(uid) for uid in (*call.inputs, *call.outputs))
    image, weight, loss = {
        "conv_fprop": (first, second, result),
        "conv_dgrad": (result, second, first),
        "conv_wgrad": (first, result, second),
    }[call.op]
    ones = [*weight.dims[2:], *call.attribute("stride", ())]
    none = [*call.attribute("pre_padding", ()), *call.attribute("post_padding", ())]
    right = weight.dims[:2] == (loss.dims[1], image.dims[1]) and loss.dims[2:] == image.dims[2:]
    return all(d == 1 for d in ones) and not any(none) and right
