"""Draw parts that several steps have: images, convolutions, sums of integers, and epilogues."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.ir import HALVES, DType, TensorType, Value, channels_last
from fusec.ops import Cast, Conv
from fusec.testing.generators.graph_builder import RandomGraph, Shape, Unfit
from fusec.testing.generators.motifs.layers import epilogue
from fusec.testing.generators.operations import DRAWS


def op_with_epilogue(b: RandomGraph, x: Value, name: str) -> None:
    """Draw an op of the registry with a value as its operand, and pointwise ops after it."""
    with b.focused(x):
        DRAWS[name](b)
    node = b.values[-1].node
    if node is None or not node.results[0].type.dtype.is_float:
        raise Unfit("no float result for pointwise ops")
    epilogue(b, node.results[0], 2)


def scaled_sums(b: RandomGraph, sums: Value) -> Value:
    """Multiply the sums of an integer product by a scale."""
    return b.pointwise("mul", b.add(Cast(DType.F32), sums), b.constant((), DType.F32, "positive"))


def half_dtype(b: RandomGraph) -> DType:
    """Choose a float type of 16 bits: that of the graph, if it has one."""
    return b.dtype if b.dtype in HALVES else b.pick(HALVES)


def image_side(b: RandomGraph) -> int:
    """Choose the height or width of an image."""
    return b.pick([4, 8, 5, 3, 11, 16])


def image_input(b: RandomGraph, count: int, high: int, wide: int, dtype: DType | None = None) -> Value:
    """Add an input of one or two images, mostly channels last."""
    shape = (b.pick([1, 2]), count, high, wide)
    return b.input(TensorType(shape, dtype or b.dtype, channels_last(4) if b.chance(80) else ()))


def convolved(b: RandomGraph, x: Value, filters: int, groups: int = 1, stride: int = 0) -> Value:
    """Add a convolution whose window fits the image, with constant filters."""
    sizes: Sequence[int] = x.type.shape[2:]
    kernel = tuple(b.pick([k for k in (3, 1, 2, 5) if k <= size]) for size in sizes)
    strides = tuple(stride or b.pick([1, 1, 2]) for _ in sizes)
    pads = tuple(b.below(k // 2 + 1) for k in kernel)
    shape: Shape = (filters, x.type.shape[1] // groups, *kernel)
    return b.add(Conv(strides, (*pads, *pads), (1, 1), groups), x, b.constant(shape, x.type.dtype))
