"""Define the tensor of a graph under construction, with NumPy's operators. Shape and dtype are known immediately."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any, cast

from fusec.errors import VerifyError
from fusec.ir import DType, Value
from fusec.ops import Cast, Expand, MatMul, Reduce, Reshape, Slice, Softmax, Transpose

if TYPE_CHECKING:
    from fusec.builder.builder import Builder

Operand = Any  # a Tensor, a Python number, or an array of the dtype of the other operand
Axis = int | Sequence[int] | None


class Tensor:
    """A value of a builder's graph.

    Operators broadcast as in NumPy. Python numbers get the dtype of the tensor.
    Operands of different dtypes raise an error, because fusec never promotes dtypes.
    """

    __array_ufunc__ = None  # so that `array + tensor` calls Tensor.__radd__ instead of NumPy's add
    __slots__ = ("builder", "value")

    def __init__(self, builder: Builder, value: Value):
        self.builder = builder
        self.value = value

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.type.shape

    @property
    def dtype(self) -> DType:
        return self.value.type.dtype

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.value.type.size

    @property
    def name(self) -> str:
        return self.value.name

    def __repr__(self) -> str:
        return f"Tensor({self.value!r})"

    def __bool__(self) -> bool:
        raise VerifyError(f"{self!r} has no truth value: the graph is only being built; use where()")

    def __len__(self) -> int:
        if not self.shape:
            raise VerifyError(f"{self!r} has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        raise self.builder.error(f"{self!r} is one tensor where several are wanted; x[0], x[1] and so on are its rows")

    # arithmetic --------------------------------------------------------------------------------------

    def pointwise(self, name: str, *others: Operand, **attributes: float) -> Tensor:
        """Apply the pointwise op of that name in the IR, with this tensor as its first operand."""
        return self.builder.pointwise(name, self, *others, **attributes)

    def __add__(self, other: Operand) -> Tensor:
        return self.pointwise("add", other)

    def __radd__(self, other: Operand) -> Tensor:
        return self.builder.like(other, self).pointwise("add", self)

    def __sub__(self, other: Operand) -> Tensor:
        return self.pointwise("sub", other)

    def __rsub__(self, other: Operand) -> Tensor:
        return self.builder.like(other, self).pointwise("sub", self)

    def __mul__(self, other: Operand) -> Tensor:
        return self.pointwise("mul", other)

    def __rmul__(self, other: Operand) -> Tensor:
        return self.builder.like(other, self).pointwise("mul", self)

    def __truediv__(self, other: Operand) -> Tensor:
        return self.pointwise("div", other)

    def __rtruediv__(self, other: Operand) -> Tensor:
        return self.builder.like(other, self).pointwise("div", self)

    def __mod__(self, other: Operand) -> Tensor:
        return self.pointwise("floor_mod", other)

    def __pow__(self, other: Operand) -> Tensor:
        return self.pointwise("pow", other)

    def __rpow__(self, other: Operand) -> Tensor:
        return self.builder.like(other, self).pointwise("pow", self)

    def __neg__(self) -> Tensor:
        return self.pointwise("neg")

    def __abs__(self) -> Tensor:
        return self.pointwise("abs")

    def __lt__(self, other: Operand) -> Tensor:
        return self.pointwise("cmp_lt", other)

    def __le__(self, other: Operand) -> Tensor:
        return self.pointwise("cmp_le", other)

    def __gt__(self, other: Operand) -> Tensor:
        return self.pointwise("cmp_gt", other)

    def __ge__(self, other: Operand) -> Tensor:
        return self.pointwise("cmp_ge", other)

    def eq(self, other: Operand) -> Tensor:
        """Compare elements for equality. Python's `==` compares tensors by identity."""
        return self.pointwise("cmp_eq", other)

    def ne(self, other: Operand) -> Tensor:
        return self.pointwise("cmp_neq", other)

    def __and__(self, other: Operand) -> Tensor:
        return self.pointwise("logical_and" if self.dtype is DType.BOOL else "bitwise_and", other)

    def __or__(self, other: Operand) -> Tensor:
        return self.pointwise("logical_or" if self.dtype is DType.BOOL else "bitwise_or", other)

    def __xor__(self, other: Operand) -> Tensor:
        return self.pointwise("logical_xor" if self.dtype is DType.BOOL else "bitwise_xor", other)

    def __invert__(self) -> Tensor:
        return self.pointwise("logical_not" if self.dtype is DType.BOOL else "bitwise_not")

    def __matmul__(self, other: Operand) -> Tensor:
        return self.builder.matmul(self, self.builder.like(other, self))

    def __rmatmul__(self, other: Operand) -> Tensor:
        return self.builder.matmul(self.builder.like(other, self), self)

    # functions of one tensor ---------------------------------------------------------------------------

    def exp(self) -> Tensor:
        return self.pointwise("exp")

    def log(self) -> Tensor:
        return self.pointwise("log")

    def sqrt(self) -> Tensor:
        return self.pointwise("sqrt")

    def rsqrt(self) -> Tensor:
        return self.pointwise("rsqrt")

    def tanh(self) -> Tensor:
        return self.pointwise("tanh")

    def sigmoid(self) -> Tensor:
        return self.pointwise("sigmoid")

    def relu(self) -> Tensor:
        return self.pointwise("relu")

    def gelu(self) -> Tensor:
        return self.pointwise("gelu")

    def silu(self) -> Tensor:
        return self.pointwise("swish")

    def maximum(self, other: Operand) -> Tensor:
        return self.pointwise("max", other)

    def minimum(self, other: Operand) -> Tensor:
        return self.pointwise("min", other)

    def clip(self, low: float = -math.inf, high: float = math.inf) -> Tensor:
        return self.pointwise("clip", min=low, max=high)

    def astype(self, dtype: DType | str) -> Tensor:
        """Cast to a dtype. Returns the tensor itself if it has that dtype."""
        to = self.builder.dtype_of(dtype)
        return self if to is self.dtype else self.builder.apply(Cast(to), self)

    def softmax(self, axis: int = -1) -> Tensor:
        return self.builder.apply(Softmax(axis), self)

    def log_softmax(self, axis: int = -1) -> Tensor:
        return self.builder.apply(Softmax(axis, True), self)

    # reductions ----------------------------------------------------------------------------------------

    def reduce(self, kind: str, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """Reduce some axes, by default all of them. `kind` is one of the IR's `reduce` op."""
        given = range(self.rank) if axis is None else [axis] if isinstance(axis, int) else axis
        axes = tuple(sorted({self._from_start(a) for a in given}))
        return self.builder.apply(Reduce(kind, axes, keepdims), self)

    def _from_start(self, axis: int) -> int:
        """Count an axis from the start. One out of range stays, because the op refuses it with its name."""
        return axis % self.rank if -self.rank <= axis < self.rank else axis

    def sum(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return self.reduce("sum", axis, keepdims)

    def mean(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return self.reduce("mean", axis, keepdims)

    def max(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return self.reduce("max", axis, keepdims)

    def min(self, axis: Axis = None, keepdims: bool = False) -> Tensor:
        return self.reduce("min", axis, keepdims)

    # shapes --------------------------------------------------------------------------------------------

    def reshape(self, *shape: int | Sequence[int]) -> Tensor:
        """Reshape. One dim may be -1: it is computed from the number of elements."""
        wanted = _flat(shape)
        if wanted.count(-1) == 1:
            known = -math.prod(wanted)
            wanted[wanted.index(-1)] = self.size // known if known else 0
        if tuple(wanted) == self.shape:
            return self
        return self.builder.apply(Reshape(tuple(wanted)), self)

    def transpose(self, *perm: int | Sequence[int]) -> Tensor:
        """Permute the dims; without `perm`, reverse them."""
        order = [self._from_start(p) for p in _flat(perm)] or list(range(self.rank))[::-1]
        return self if order == list(range(self.rank)) else self.builder.apply(Transpose(tuple(order)), self)

    @property
    def T(self) -> Tensor:  # noqa: N802 - NumPy's name for it
        return self.transpose()

    def swapaxes(self, a: int, b: int) -> Tensor:
        order = list(range(self.rank))
        if not all(-self.rank <= axis < self.rank for axis in (a, b)):
            raise self.builder.error(f"axes {a} and {b} of {self!r}")
        order[a], order[b] = order[b], order[a]
        return self.transpose(order)

    def expand(self, *shape: int | Sequence[int]) -> Tensor:
        """Broadcast to a shape."""
        wanted = tuple(_flat(shape))
        return self if wanted == self.shape else self.builder.apply(Expand(wanted), self)

    def __getitem__(self, index: Any) -> Tensor:
        """Index with integers, slices, `...` and None, as in NumPy. To index by a tensor, use `Builder.take`."""
        items: list[Any] = list(cast("tuple[Any, ...]", index)) if isinstance(index, tuple) else [index]
        if any(isinstance(i, Tensor) for i in items):
            raise self.builder.error("an index that is a tensor: use Builder.take")
        taken = sum(i is not None and i is not Ellipsis for i in items)
        if Ellipsis not in items:
            items.append(Ellipsis)
        if taken > self.rank or items.count(Ellipsis) > 1:
            raise self.builder.error(f"{taken} indices for {self!r}")
        items[items.index(Ellipsis) : items.index(Ellipsis) + 1] = [slice(None)] * (self.rank - taken)
        starts, sizes, steps, shape = list[int](), list[int](), list[int](), list[int]()
        for item in items:
            if item is None:
                shape.append(1)
                continue
            start, size, step = _range_of(self, item, self.shape[len(starts)])
            starts.append(start)
            sizes.append(size)
            steps.append(step)
            if isinstance(item, slice):
                shape.append(size)
        part = self
        if tuple(sizes) != self.shape or any(s != 1 for s in steps):
            part = self.builder.apply(Slice(tuple(starts), tuple(sizes), tuple(steps)), self)
        return part.reshape(shape)


def _range_of(tensor: Tensor, item: int | slice[Any, Any, Any] | EllipsisType, dim: int) -> tuple[int, int, int]:
    """Return start, size and step of one index in a dim of size `dim`."""
    if isinstance(item, slice):
        if item.step == 0:
            raise tensor.builder.error(f"{item} has a step of 0")
        start, stop, step = item.indices(dim)
        size = len(range(start, stop, step))
        return (start, size, step) if size else (0, 0, 1)
    if not isinstance(item, int) or not -dim <= item < dim:
        raise tensor.builder.error(f"index {item!r} for a dim of {dim}")
    return item % dim, 1, 1


def _flat(given: Sequence[int | Sequence[int]]) -> list[int]:
    if len(given) == 1 and not isinstance(given[0], int):
        return list(given[0])
    return [cast(int, g) for g in given]


MATMUL = MatMul()
