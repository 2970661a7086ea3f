"""Draw steps for the kernels of matrix products."""

from __future__ import annotations

from fusec.ir import DType, TensorType, channels_last
from fusec.ops import Cast, Conv, MatMul, RmsNorm
from fusec.ops.matmul import INTEGERS
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.kernels.parts import half_dtype, image_input, scaled_sums
from fusec.testing.generators.motifs.layers import ACTIVATIONS, epilogue
from fusec.testing.generators.operations.pointwise import draw_pointwise
from fusec.testing.generators.operations.products import multiply_packed


def thin_product(b: RandomGraph) -> None:
    """Draw a product of at least 512 rows with few weights, with pointwise ops before and after it, or of integers."""
    b.dtype = half_dtype(b)
    dtype, pack = (DType.I8, 16) if b.chance(30) else (b.dtype, 8)
    depth, columns = b.pick([1, 2, 3]) * pack, b.pick([8, 16, 24])
    is_matrix = b.chance(50)
    if is_matrix:
        x = b.input(TensorType(b.pick([(512, depth), (530, depth), (2, 260, depth)]), dtype))
    else:
        x = image_input(b, depth, b.pick([16, 17]), 33, dtype)
    if dtype is not DType.I8 and b.chance(50):
        x = draw_pointwise(b, b.pick(ACTIVATIONS), x)
    if is_matrix:
        y = b.add(MatMul(), x, b.constant((depth, columns), dtype))
    else:
        strides = (1, 1) if b.chance(70) else (1, b.pick([2, 3]))
        y = b.add(Conv(strides, (0,) * 4, (1, 1), 1), x, b.constant((columns, depth, 1, 1), dtype))
    if dtype is DType.I8:
        b.add(Cast(b.dtype), epilogue(b, scaled_sums(b, y), 2))
    else:
        epilogue(b, y, 2)


def dense_bytes(b: RandomGraph) -> None:
    """Draw a product of 64 to 128 rows of 8-bit integers, with pointwise ops after it."""
    b.dtype = half_dtype(b)
    rows = b.pick([(64,), (2, 50), (128,)])
    y = b.add(MatMul(), b.input(TensorType((*rows, 128), DType.I8)), b.constant((128, 128), DType.I8))
    b.add(Cast(b.dtype), epilogue(b, scaled_sums(b, y), 2))


def resident_weights(b: RandomGraph) -> None:
    """Draw a 1x1 convolution of 272 pixels of 8-bit integers, with pointwise ops after it."""
    b.dtype = half_dtype(b)
    channels = b.pick([256, 288])
    x = b.input(TensorType((1, channels, 16, 17), DType.I8, channels_last(4)))
    y = b.add(Conv((1, 1), (0,) * 4, (1, 1), 1), x, b.constant((128, channels, 1, 1), DType.I8))
    epilogue(b, b.add(Cast(b.dtype), scaled_sums(b, y)), 2)


def few_rows(b: RandomGraph) -> None:
    """Draw one or two products of at most four rows with constant weights, with pointwise ops after them."""
    rows = b.pick([(1,), (2,), (4,), (1, 1), (2, 2)])
    _products_of_rows(b, rows, b.pick([64, 128, 264, 520]), b.pick([8, 24, 33]))


def streamed_weights(b: RandomGraph) -> None:
    """Draw one or two products of 2 to 32 rows with constant weights, with pointwise ops after them."""
    rows = b.pick([(3,), (8,), (16,), (1, 9), (4, 4), (31,)])
    _products_of_rows(b, rows, b.pick([64, 96, 256, 512]), b.pick([16, 48, 128]))


def _products_of_rows(b: RandomGraph, rows: tuple[int, ...], depth: int, columns: int) -> None:
    b.dtype = half_dtype(b)
    x = b.input(TensorType((*rows, depth), b.dtype))
    if b.chance(40):
        x = b.add(RmsNorm(-1, 1e-3), x, b.constant((depth,), b.dtype))
    y = b.add(MatMul(), x, b.constant((depth, columns), b.dtype))
    if b.chance(50):
        gate = draw_pointwise(b, b.pick(ACTIVATIONS), y)
        y = b.pointwise("mul", gate, b.add(MatMul(), x, b.constant((depth, columns), b.dtype)))
    epilogue(b, y, 3)


def packed_product(b: RandomGraph) -> None:
    """Draw a product of at most 16 rows with weights of 4 or 8 bits, with a norm before and pointwise ops after it."""
    b.dtype = half_dtype(b)
    depth, rows = b.pick([64, 128, 192, 1024]), b.pick([(1,), (2,), (5,), (16,), (1, 1), (3, 3)])
    x = b.input(TensorType((*rows, depth), b.dtype))
    if depth == 1024 and b.chance(70):
        x = b.add(RmsNorm(-1), x, b.fresh(TensorType((depth,), b.dtype)))
    epilogue(b, multiply_packed(b, x, b.pick([16, 32, 48]), b.pick([16, 32, 64, depth])), 3)


def integer_product(b: RandomGraph) -> None:
    """Draw a matrix product of integers, and a sum with the result."""
    dtype, (rows, depth, columns) = b.pick((*INTEGERS, DType.I8)), (b.pick([1, 3, 8, 17]) for _ in range(3))
    batch = b.pick([(), (2,), (1, 3)])
    other = b.pick([batch, ()])
    y = b.add(
        MatMul(),
        b.input(TensorType((*batch, rows, depth), dtype)),
        b.fresh(TensorType((*other, depth, columns), dtype)),
    )
    if b.chance(50):
        b.pointwise(b.pick(["add", "mul", "max"]), y, b.constant(b.broadcast_shape(y.type.shape), y.type.dtype))
