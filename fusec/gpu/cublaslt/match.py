"""Which cuDNN graphs are one call of cuBLASLt, act(alpha A·B + C + bias), and which matrices it reads and writes.

Nothing of CUDA is needed here: a graph is data, and so is the call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor

DTYPES = (DType.F16, DType.BF16, DType.F32)
CONVOLUTIONS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
# cuBLASLt's gelu is the tanh form; the erf form is a kernel behind it
ACTIVATIONS = {"relu": "relu", "gelu_approx_tanh": "gelu"}


@dataclass(frozen=True)
class Matrices:
    """A stack of matrices in memory, column by column: `ld` elements from one column to the next, `step` from one
    matrix to the next (0: it is one for all)."""

    uid: int
    dtype: DType
    rows: int
    columns: int
    ld: int
    step: int


@dataclass(frozen=True)
class Product:
    """d = activation(alpha op(a) op(b) + c + bias) for each matrix of the stack; the bias is a column, added to every
    column of d, which is the transpose of what the graph calls its result where that is stored row by row."""

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
    tf32: bool = False  # whether operands in fp32 may be rounded


def product_of(graph: CudnnGraph) -> Product | None:
    """The graph as one call of cuBLASLt; None if it is not one. Nothing is rounded that the graph does not round: sums
    are in fp32, and so is all that follows, up to the one result."""
    if not graph.calls or len(graph.outputs) != 1 or any(0 in t.dims for t in graph.tensors):
        return None
    anchor, *epilogue = graph.calls
    image = anchor.op in CONVOLUTIONS
    if image and not _is_pixelwise(graph, anchor):
        return None
    if anchor.op not in ("matmul", *CONVOLUTIONS) or anchor.compute is not DType.F32:
        return None
    parts = _epilogue(graph, anchor.outputs[0], epilogue)
    if parts is None:
        return None
    alpha, residual, bias, activation = parts
    left, right = (graph.tensor(uid) for uid in anchor.inputs)
    (result,) = graph.outputs
    types = left.dtype in DTYPES and left.dtype is right.dtype and result.dtype in (left.dtype, DType.F32)
    if not types or any(t is not None and t.dtype is not result.dtype for t in (residual, bias)):
        return None
    if left.virtual or right.virtual:  # made by a prologue
        return None
    found: tuple[_Stack | None, _Stack | None, _Stack | None]
    if anchor.op == "conv_wgrad":  # filters by channels: the loss turned, times the image
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
    return _as_columns(a, b, d, c, bias, alpha, activation, tf32)


@dataclass(frozen=True)
class _Stack:
    """Dims [batch, rows, columns] and strides of a tensor."""

    tensor: CudnnTensor
    dims: tuple[int, int, int]
    strides: tuple[int, int, int]

    @property
    def transposed(self) -> _Stack:
        (n, rows, columns), (step, down, right) = self.dims, self.strides
        return _Stack(self.tensor, (n, columns, rows), (step, right, down))

    def by_columns(self) -> Matrices | None:
        """As stored column by column; None if it is not."""
        (n, rows, columns), (step, down, right) = self.dims, self.strides
        ld = right if columns > 1 else max(rows, 1)
        if (down != 1 and rows > 1) or ld < rows:
            return None
        return Matrices(self.tensor.uid, self.tensor.dtype, rows, columns, ld, step if n > 1 else 0)

    def operand(self) -> tuple[Matrices, bool] | None:
        """As stored, and whether that is its transpose."""
        straight = self.by_columns()
        if straight is not None:
            return straight, False
        turned = self.transposed.by_columns()
        return None if turned is None else (turned, True)


def _as_columns(
    a: _Stack,
    b: _Stack,
    d: _Stack,
    c: _Stack | None,
    bias: CudnnTensor | None,
    alpha: float,
    activation: str,
    tf32: bool,
) -> Product | None:
    """The call; a result stored row by row is the transposed product, which a bias of one row asks for."""
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


Epilogue = tuple[float, CudnnTensor | None, CudnnTensor | None, str]  # alpha, residual, bias, activation


def _epilogue(graph: CudnnGraph, uid: int, calls: list[CudnnCall]) -> Epilogue | None:
    """What follows the product, if each op takes what the one before it gives and stands where cuBLASLt has it."""
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
    """Whether a tensor holds a number for each column of a result (channel of an image), side by side."""
    axis = 2 if len(result.dims) == 3 else 1
    if tensor.dims[axis] != result.dims[axis] or math.prod(tensor.dims) != tensor.dims[axis]:
        return False
    return tensor.strides[axis] == 1 or tensor.dims[axis] == 1


def _stacked(tensor: CudnnTensor, image: bool = False) -> _Stack | None:
    """A matmul's tensor as it is; an image as one matrix with a row for each pixel, if those are evenly apart."""
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
    """Filters of one pixel as a matrix [channels, filters]."""
    return _Stack(tensor, (1, tensor.dims[1], tensor.dims[0]), (0, tensor.strides[1], tensor.strides[0]))


def _is_pixelwise(graph: CudnnGraph, call: CudnnCall) -> bool:
    """Whether a convolution is a product of pixels and filters: of one pixel each, none left out, no groups."""
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
