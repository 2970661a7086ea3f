"""Draw groups of ops that fuse: convolutions and products with their prologues and epilogues."""

from __future__ import annotations

import math

from fusec.ir import TensorType, Value
from fusec.ops import BatchNorm, BatchNormBySums, ChannelSums, Concat, MatMul, Pad, Reduce, Reshape, Transpose
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.operations.pointwise import draw_pointwise
from fusec.testing.generators.operations.products import multiply
from fusec.testing.generators.operations.windows import convolve, convolve_transposed

ACTIVATIONS = (
    *("relu", "relu", "clip", "sigmoid", "tanh", "leaky_relu", "elu", "gelu", "gelu_tanh", "swish", "hard_swish"),
    *("hard_sigmoid", "softplus", "mish", "abs", "neg", "identity", "prelu", "selu", "celu", "softsign"),
)


def epilogue(b: RandomGraph, x: Value, longest: int = 4) -> Value:
    """Draw an epilogue of up to `longest` ops in any order: bias, residual, activation, scale, batch norm."""
    rank = x.type.rank
    for _ in range(b.below(longest + 1)):
        kind = b.below(8)
        if kind <= 1:
            channels = (x.type.shape[1], *(1,) * (rank - 2)) if rank > 2 else x.type.shape[-1:]
            x = b.pointwise(
                b.pick(["add", "add", "mul", "sub"]), x, b.constant(b.pick([channels, (1, *channels)]), x.type.dtype)
            )
        elif kind <= 3:
            x = draw_pointwise(b, b.pick(ACTIVATIONS), x)
        elif kind == 4:
            x = b.pointwise(b.pick(["add", "add", "sub", "mul", "max"]), x, b.like(x))
        elif kind == 5:
            x = b.pointwise(b.pick(["mul", "add", "div"]), x, b.constant((), x.type.dtype, "positive"))
        elif kind == 6 and rank > 2:
            x = _normalised(b, x)
        else:
            x = b.pointwise(b.pick(["add", "mul"]), x, b.broadcastable(x))
    return x


def _normalised(b: RandomGraph, x: Value) -> Value:
    styles = ["", "", "", "positive"]
    parameters = [b.constant((x.type.shape[1],), x.type.dtype, style) for style in styles]
    return b.add(BatchNorm(b.pick([1e-5, 1e-3, 0.5])), x, *parameters)


def convolution_block(b: RandomGraph) -> None:
    """Draw [pad] [prologue] convolution [epilogue]."""
    x = b.image(3, 5) if b.chance(70) else b.input(TensorType(b.image_shape(), b.dtype))
    if b.chance(15):
        spatial = x.type.rank - 2
        pads = tuple(b.below(2) for _ in range(2 * spatial))
        x = b.add(Pad((0, 0, *pads[:spatial], 0, 0, *pads[spatial:]), "constant", b.pick([0.0, 0.0, 1.0])), x)
    if b.chance(20):
        x = epilogue(b, x, 3)
    epilogue(b, convolve(b, x) if b.chance(85) else convolve_transposed(b, x))


def summed_block(b: RandomGraph) -> None:
    """Draw a batch norm of training whose statistics the convolution before it can compute."""
    y = convolve(b, b.image(3, 5))
    sums = b.insert(ChannelSums(), y).results
    parameters = [b.constant((y.type.shape[1],), y.type.dtype) for _ in range(2)]
    epilogue(b, b.insert(BatchNormBySums(b.pick([1e-2, 0.5])), y, *parameters, *sums).results[0], 2)


def residual_block(b: RandomGraph) -> None:
    """Draw two convolutions and a residual connection around them."""
    x = b.image(3, 4)
    y = epilogue(b, convolve(b, x, keep_size=True), 2)
    y = convolve(b, y, filters=x.type.shape[1], keep_size=True) if b.chance(50) else y
    if b.chance(50):
        y = b.pointwise("add", y, b.constant((y.type.shape[1], *(1,) * (y.type.rank - 2)), y.type.dtype))
    if y.type.same_value_type(x.type):
        y = b.pointwise("add", y, x)
    if b.chance(70):
        draw_pointwise(b, b.pick(ACTIVATIONS), y)


def product_block(b: RandomGraph) -> None:
    """Draw [activation] matmul [epilogue]."""
    x = b.float_value(2, 4) if b.chance(70) else b.input(TensorType(b.shape(2, 4), b.dtype))
    if b.chance(20):
        x = draw_pointwise(b, b.pick(ACTIVATIONS), x)
    epilogue(b, multiply(b, x))


def squeeze_excite(b: RandomGraph) -> None:
    """Draw squeeze and excitation: an image scaled by a function of its spatial mean."""
    x = b.image(3, 5)
    axes = tuple(range(2, x.type.rank))
    squeezed = b.add(Reduce("mean", axes), x)
    if b.chance(60):
        squeezed = draw_pointwise(b, "relu", convolve(b, squeezed, x.type.shape[1], keep_size=True))
    b.pointwise("mul", x, b.pointwise(b.pick(["sigmoid", "hard_sigmoid"]), squeezed))


def pointwise_sequence(b: RandomGraph) -> None:
    """Draw a sequence of pointwise ops, with further operands of other shapes."""
    x = b.float_value()
    for _ in range(b.between(2, 6)):
        x = draw_pointwise(b, b.pick(("add", "mul", "sub", "max", "min", *ACTIVATIONS)), x)


def dense_block(b: RandomGraph) -> None:
    """Draw layers of which each reads the results of all earlier ones, joined along channels.

    One concat can then contain the operands of another.
    """
    x = b.image(3, 5)
    wide = b.pick([8, 8, 4, 1])
    results = [draw_pointwise(b, b.pick(ACTIVATIONS), x) if b.chance(20) else convolve(b, x, wide, True)]
    for _ in range(b.pick([1, 2, 3])):
        joined = results[0] if len(results) == 1 else b.add(Concat(1), *results)
        read = draw_pointwise(b, b.pick(ACTIVATIONS), joined) if b.chance(60) else joined
        made = convolve(b, read, wide, True)
        results = [made, *results] if b.chance(15) else [*results, made]
    whole = b.add(Concat(1), *results)
    if b.chance(60):
        draw_pointwise(b, b.pick(ACTIVATIONS), whole)


def transposed_rows(b: RandomGraph) -> None:
    """Draw a linear layer between transposes of its rows: in some models sequences are the first dim, in others not."""
    rows, features = [b.pick([2, 3, 4]) for _ in range(b.pick([2, 2, 3]))], b.pick([4, 8, 3])
    count = len(rows)
    x = b.fresh(TensorType((*rows, features), b.dtype))
    if b.chance(80):
        x = b.add(Transpose((*b.permutation(count), count)), x)
    y = b.add(MatMul(), x, b.constant((features, b.pick([4, 6])), b.dtype))
    if b.chance(60):
        y = b.pointwise("add", y, b.constant(y.type.shape[-1:], b.dtype))
    y = b.add(Transpose((*b.permutation(count), count)), y)
    if b.chance(50):
        b.add(Reshape((math.prod(y.type.shape[:-1]), y.type.shape[-1])), y)
