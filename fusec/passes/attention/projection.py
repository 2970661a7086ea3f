"""Match a product by constant weights with its scale and bias, as a projection of queries, keys or values is."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from fusec.ir import HALVES, DType, Literal, Node, Value
from fusec.ops import Cast
from fusec.ops.matmul import SUMMED_IN
from fusec.passes.rewriting.rewriter import single_use
from fusec.system.dataclass import dataclass

ALIGNED = 8  # columns: slices begin on 16 bytes, as attention kernels need


@dataclass(frozen=True)
class Columns:
    """A constant of each column, or one of all, perhaps times a number that is computed."""

    literal: Literal
    number: Value | None = None


@dataclass(frozen=True)
class Projection:
    """A product by a constant, perhaps a constant bias, and the value that then goes to attention.

    weights: the matrix; of a product with packed weights its codes, scales and zero points.
    scale: factor of the sums of a product of 8-bit numbers, in fp32, before the bias.
    term: term of a zero point, which is subtracted from the sums before.
    """

    product: Node
    weights: tuple[Literal, ...]
    bias: Literal | None
    end: Value
    scale: Columns | None = None
    term: Columns | None = None

    @property
    def columns(self) -> int:
        return self.product.result.type.shape[-1]

    @property
    def kind(self) -> Hashable:
        """Return what is equal for products that can be merged."""
        numbers = tuple(each and each.number for each in (self.scale, self.term))
        return self.product.operands[0], self.product.op, tuple(w.type.dtype for w in self.weights), numbers


def as_projection(product: Node) -> Projection | None:
    """Return a product by a constant of aligned columns, with its bias if it has one; None if it is not in 16 bits.

    A product of 8-bit numbers ends in 16 bits, after its scale and bias. A bias in 16 bits follows the cast to 16 bits.
    """
    x, *constants = product.operands
    weights = tuple(w.literal for w in constants if w.literal is not None and w.type.rank == 2)
    columns, end = product.result.type.shape[-1], product.result
    if len(weights) < len(constants) or x.literal is not None or x.type.dtype not in (*HALVES, *SUMMED_IN):
        return None
    if columns % ALIGNED or 0 in end.type.shape or not single_use(end):
        return None
    if x.type.dtype in HALVES:
        end, bias = _with_constant(end, "add")
        return Projection(product, weights, bias, end)
    end, term = _with_columns(_cast(end, (DType.F32,)) or end, "sub")
    end, scale = _with_columns(end, "mul")
    scaled = _cast(end, HALVES)
    end, bias = _with_constant(scaled or end, "add")
    narrow = end if scaled is not None else _cast(end, HALVES)
    return None if scale is None or narrow is None else Projection(product, weights, bias, narrow, scale, term)


def _cast(value: Value, to: Sequence[DType]) -> Value | None:
    """Return a value after its only reader, a cast to one of these types; None if that is another op."""
    node = value.users[0] if single_use(value) else None
    return node.result if node is not None and isinstance(node.op, Cast) and node.op.to in to else None


def _with_constant(value: Value, name: str) -> tuple[Value, Literal | None]:
    """Return a value after the op that alone reads it with a number for each column, and these; else the value."""
    end, columns = _with_columns(value, name)
    return (value, None) if columns is None or columns.number is not None else (end, columns.literal)


def _with_columns(value: Value, name: str) -> tuple[Value, Columns | None]:
    """Return the same for numbers that are constant, or constant but for one factor."""
    node = value.users[0] if single_use(value) else None
    if node is None or node.op.name != name or node.result.type.shape != value.type.shape:
        return value, None
    other = node.operands[1] if node.operands[0] is value else node.operands[0]
    size, columns = other.type.size, value.type.shape[-1]
    if (name == "sub" and other is node.operands[0]) or not (size == 1 or size == columns == other.type.shape[-1]):
        return value, None
    if other.literal is not None:
        return node.result, Columns(other.literal)
    if other.node is None or other.node.op.name != "mul":
        return value, None
    for constant, number in (other.node.operands, reversed(other.node.operands)):
        if constant.literal is not None and number.type.size == 1:
            return node.result, Columns(constant.literal, number)
    return value, None
