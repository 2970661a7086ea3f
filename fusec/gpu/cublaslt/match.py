"""Match cuDNN graphs that are one call of cuBLASLt: act(alpha A·B + C + bias), also of fp8, with scales, or of int8.

This module needs no CUDA, because a graph and a call are plain data.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

from fusec.gpu.cublaslt.epilogue import Epilogue, epilogue_of, is_row
from fusec.ir import HALVES, DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor
from fusec.system.dataclass import dataclass

DTYPES = (DType.F16, DType.BF16, DType.F32)
CONVOLUTIONS = ("conv_fprop", "conv_dgrad", "conv_wgrad")
FP8 = DType.F8E4M3
BYTES = (FP8, DType.I8)
BYTES_MULTIPLE = 16  # of the inner dim and of the rows of d: cuBLASLt's rows of 8-bit numbers begin on multiples of it


@dataclass(frozen=True)
class Matrices:
    """Stack of matrices stored by columns.

    ld: elements from one column to the next.
    step: elements from one matrix to the next; 0 if there is one matrix for the whole stack.
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
    bias: int | None = None  # uid
    bias_dtype: DType | None = None
    activation: str = ""
    scale: int | None = None  # uid of a number in memory by which the sums of fp8 are multiplied
    result_scale: int | None = None  # uid of a number in memory by which a result in fp8 is multiplied
    tf32: bool = False  # fp32 operands may be rounded to tf32
    fast_sums: bool = False  # Hopper adds products of fp8 with about 14 bits, and does not move the sums to fp32

    @property
    def of_integers(self) -> bool:
        """Tell if the sums are integers, which are exact."""
        return self.d.dtype is DType.I32

    @property
    def scales_in(self) -> DType:
        """Type of alpha and beta."""
        return DType.I32 if self.of_integers else DType.F32


def product_of(graph: CudnnGraph) -> Product | None:
    """Return the graph as one call of cuBLASLt; None if it is not one.

    The call rounds where the graph does: sums and epilogue are in fp32, and only the result is rounded.
    """
    if not graph.calls or len(graph.outputs) != 1 or any(0 in t.dims for t in graph.tensors):
        return None
    anchor, *epilogue = graph.calls
    image = anchor.op in CONVOLUTIONS
    if image and not _is_pixelwise(graph, anchor):
        return None
    if anchor.op not in ("matmul", *CONVOLUTIONS) or anchor.compute not in (DType.F32, DType.I32):
        return None
    found = epilogue_of(graph, anchor.outputs[0], epilogue)
    if found is None:
        return None
    residual, bias = found.residual, found.bias
    left, right = (graph.tensor(uid) for uid in anchor.inputs)
    (result,) = graph.outputs
    if left.dtype is not right.dtype or not _takes_types(left.dtype, result.dtype, found):
        return None
    if left.virtual or right.virtual:  # a prologue computes it
        return None
    if anchor.op == "conv_wgrad":  # filters by channels: the transposed loss times the image
        if residual is not None or bias is not None:
            return None
        loss = _stacked(right, True)
        a, b, d = loss and loss.transposed, _stacked(left, True), _filters(result).transposed
    elif anchor.op == "conv_dgrad":
        a, b, d = _stacked(left, True), _filters(right).transposed, _stacked(result, True)
    else:
        a, b, d = _stacked(left, image), _filters(right) if image else _stacked(right), _stacked(result, image)
    c = None if residual is None else _stacked(residual, image)
    if a is None or b is None or d is None or (residual is not None and c is None):
        return None
    tf32 = graph.tensor_cores and left.dtype is DType.F32
    product = _as_columns((a, b, d, c), found, tf32)
    if product is None or (left.dtype in BYTES and not _reads_bytes(product)):
        return None
    return replace(product, fast_sums=bool(anchor.attribute("fast_sums", False)))


def _takes_types(operand: DType, result: DType, epilogue: Epilogue) -> bool:
    """Tell if cuBLASLt has such a product: a bias and a residual have the type of the result.

    With a result in fp8 they are in fp16 or bf16. Scales in memory belong to fp8. Hopper adds no bias to fp8 in fp32.
    Of integers, fusec takes the sums alone. A result in i8 has one scale and a bias in fp32, and is rounded to even and
    saturated (H200, cuBLASLt 13.1). Quantised layers have a scale for each column, with which it takes twice as long.
    """
    added = {t.dtype for t in (epilogue.residual, epilogue.bias) if t is not None}
    if operand is DType.I8:
        return result is DType.I32 and epilogue == Epilogue()
    if operand is FP8 and result is FP8:
        return epilogue.saturates and len(added) <= 1 and added <= {*HALVES}
    if epilogue.saturates or epilogue.result_scale is not None:
        return False
    if operand is FP8:
        return added <= {result} if result in HALVES else result is DType.F32 and not added
    scaled = epilogue.scale is not None
    return not scaled and operand in DTYPES and result in (operand, DType.F32) and added <= {result}


def _reads_bytes(product: Product) -> bool:
    """Return True for the only form of 8-bit numbers: both operands contiguous along the inner dim, and aligned."""
    sizes = (product.a.rows, product.a.ld, product.b.ld, product.d.rows, product.d.ld)
    aligned = all(size % BYTES_MULTIPLE == 0 for size in sizes)
    return product.transpose_a and not product.transpose_b and product.batch == 1 and aligned


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


def _as_columns(stacks: tuple[_Stack, _Stack, _Stack, _Stack | None], epilogue: Epilogue, tf32: bool) -> Product | None:
    """Return the call over matrices stored by columns; None if there is none.

    A result stored by rows is computed as the transposed product. A bias needs that: cuBLASLt adds it to columns.

    stacks: A, B, D and C.
    """
    a, b, d, c = stacks
    bias = epilogue.bias
    if d.transposed.by_columns() is not None:
        a, b, d, c = b.transposed, a.transposed, d.transposed, c and c.transposed
    elif bias is not None:
        return None
    result, left, right = d.by_columns(), a.operand(), b.operand()
    residual = c and c.by_columns()
    if result is None or left is None or right is None or (c is not None and residual is None):
        return None
    if bias is not None and (math.prod(bias.dims) != result.rows or not is_row(bias, d.tensor)):
        return None
    (a_stored, transpose_a), (b_stored, transpose_b) = left, right
    return Product(
        *(a_stored, b_stored, result, transpose_a, transpose_b, d.dims[0]),
        alpha=epilogue.alpha,
        c=residual,
        bias=None if bias is None else bias.uid,
        bias_dtype=None if bias is None else bias.dtype,
        activation=epilogue.activation,
        scale=epilogue.scale,
        result_scale=epilogue.result_scale,
        tf32=tf32,
    )


def _stacked(tensor: CudnnTensor, image: bool = False) -> _Stack | None:
    """View a matmul's tensor as a stack, and an image as one matrix with a row per pixel.

    None if a tensor of a matmul has another rank, or if the pixels of an image are not evenly spaced.
    """
    if not image:
        if len(tensor.dims) != 3:
            return None
        (n, rows, columns), (step, down, right) = tensor.dims, tensor.strides
        return _Stack(tensor, (n, rows, columns), (step, down, right))
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
    """Tell if a convolution is a matrix product: filters of one pixel, stride 1, no padding, no groups."""
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
