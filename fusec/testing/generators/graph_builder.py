"""Build a random graph from drawn choices: values, constants, and operands that broadcast."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

import numpy as np
from hypothesis import strategies as st

from fusec.errors import VerifyError
from fusec.ir import DType, Graph, Node, Op, TensorType, Value
from fusec.ops import Cast, Reduce, pw
from fusec.testing.generators.arrays import draw_array

T = TypeVar("T")
Shape = tuple[int, ...]

MAX_ELEMENTS = 1200  # of one value: enough for every rule, and few enough for thousands of graphs a minute
MAX_INPUTS = 6
NUMBERS = (1.0, 0.0, -1.0, 0.5, 2.0, 3.0, 6.0, 1 / 6, -0.0, 0.1)
CONSTANT_STYLES = ("integers", "normal", "normal", "number", "positive", "ties")


class Unfit(Exception):  # noqa: N818 - not an error: the caller makes another choice
    """A choice does not fit the values of the graph."""


@cache
def _below(count: int) -> st.SearchStrategy[int]:
    return st.integers(0, count - 1)


class Choices:
    """Source of random choices from Hypothesis. The simplest choice comes first, because shrinking leads to it."""

    def __init__(self, draw: st.DrawFn):
        self._draw = draw

    def below(self, count: int) -> int:
        return self._draw(_below(count)) if count > 1 else 0

    def between(self, low: int, high: int) -> int:
        return low + self.below(high - low + 1)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, percent: int) -> bool:
        """Return True with a probability of `percent` / 100. Shrinks to False."""
        return self.below(100) >= 100 - percent

    def permutation(self, count: int) -> tuple[int, ...]:
        left = list(range(count))
        return tuple(left.pop(self.below(len(left))) for _ in range(count))


class RandomGraph(Choices):
    """A random graph under construction, with the choices that make it.

    dtype: floating-point type of most values.
    exact: all constants are small integers.
    values: inputs and results, in the order they were made.
    focus: operand of the next op, if it fits.
    is_nested: the graph is the body of a loop.
    """

    def __init__(self, draw: st.DrawFn, dtype: DType = DType.F32):
        super().__init__(draw)
        self.graph = Graph("fuzz")
        self.dtype = dtype
        self.exact = self.chance(25)
        self._seed = self.below(1 << 16)
        self._constants: list[Value] = []
        self.values: list[Value] = []
        self.focus: Value | None = None
        self.most_elements = MAX_ELEMENTS  # of one value
        self.is_nested = False

    def nested(self) -> RandomGraph:
        """Begin the graph of a body, drawn from the same choices."""
        inner = RandomGraph(self._draw, self.dtype)
        inner.graph = Graph("body")
        inner.is_nested = True
        return inner

    # nodes ---------------------------------------------------------------------------------------

    def insert(self, op: Op, *operands: Value) -> Node:
        """Add a node. Raises Unfit if the op refuses the operands, or a result is too large."""
        try:
            types = op.infer(*(v.type for v in operands))
        except VerifyError as error:
            raise Unfit(str(error)) from error
        if any(t.size > self.most_elements or t.rank > 7 for t in types):
            raise Unfit("too large")
        node = self.graph.insert(op, operands)
        self.values += node.results
        return node

    def add(self, op: Op, *operands: Value) -> Value:
        """Add an op with one result. The operands of a commutative op are in random order."""
        if op.commutative and self.chance(40):
            operands = operands[::-1]
        return self.insert(op, *operands).results[0]

    def pointwise(self, name: str, *operands: Value, **attributes: float) -> Value:
        return self.add(pw(name, **attributes), *operands)

    # operands ------------------------------------------------------------------------------------

    def input(self, type: TensorType) -> Value:
        value = self.graph.add_input(f"x{len(self.graph.inputs)}", type)
        self.values.append(value)
        return value

    def order(self, rank: int) -> tuple[int, ...]:
        """Draw a layout: mostly row-major, else channels last or any other."""
        if rank < 2 or not self.chance(15):
            return ()
        if rank >= 3 and self.chance(50):
            return (0, *range(2, rank), 1)
        return self.permutation(rank)

    def constant(self, shape: Shape, dtype: DType | None = None, style: str = "") -> Value:
        """Draw a constant; sometimes an existing one of the type."""
        type = TensorType(shape, dtype or self.dtype)
        existing = [v for v in self._constants if v.type.same_value_type(type)]
        if existing and not style and self.chance(30):
            return self.pick(existing)
        self._seed += 1
        rng = np.random.default_rng(self._seed)
        style = style or ("integers" if self.exact else self.pick(CONSTANT_STYLES))
        if style == "positive" and self.exact:
            array = np.asarray(rng.integers(1, 4, shape)).astype(type.dtype.numpy)
        elif style == "number":
            array = np.full(shape, self.pick(NUMBERS)).astype(type.dtype.numpy)
        else:
            array = draw_array(rng, type, style)
            if style == "positive" and not type.dtype.is_float:
                array = np.abs(array) + 1
        value = self.graph.constant(array, f"c{self._seed}")
        self._constants.append(value)
        return value

    def some(self, fits: Callable[[TensorType], bool] = lambda t: True) -> Value:
        """Draw a value that fits: the focus, else most likely a recent one. Raises Unfit if there is none."""
        if self.focus is not None and fits(self.focus.type):
            return self.focus
        found = [v for v in reversed(self.values) if fits(v.type)]
        if not found:
            raise Unfit("no such value")
        return self.pick(found[:4] if self.chance(75) else found)

    def float_value(self, low: int = 0, high: int = 7) -> Value:
        """Draw a value of the graph's float type with a rank in the range; cast or make one if there is none."""

        def fits(type: TensorType) -> bool:
            return type.dtype is self.dtype and low <= type.rank <= high

        try:
            return self.some(fits)
        except Unfit:
            if any(low <= v.type.rank <= high for v in self.values) and self.chance(60):
                return self.add(Cast(self.dtype), self.some(lambda t: low <= t.rank <= high))
            return self.fresh(TensorType(self.shape(low, max(low, min(high, 4))), self.dtype))

    def image(self, low: int = 3, high: int = 5) -> Value:
        """Draw a float value with batch, channel and spatial dims, none of them empty."""
        value = self.float_value(low, high)
        if value.type.size == 0:
            raise Unfit("an empty image")
        return value

    @contextmanager
    def focused(self, value: Value) -> Generator[None]:
        """Let the first operand of the next ops be a value, if it fits."""
        self.focus = value
        try:
            yield
        finally:
            self.focus = None

    def fresh(self, type: TensorType) -> Value:
        """Make a new input, or a constant; always a constant if there are many inputs."""
        if len(self.graph.inputs) < MAX_INPUTS and not self.chance(30):
            return self.input(type.with_order(self.order(type.rank)))
        return self.constant(type.shape, type.dtype)

    def like(self, value: Value) -> Value:
        """Draw an existing or a new value of the same shape and dtype."""
        return self.of_type(value.type)

    def of_type(self, type: TensorType) -> Value:
        """Draw an existing or a new value of a type."""
        same = [v for v in reversed(self.values) if v.type.same_value_type(type)]
        return self.fresh(type) if not same or self.chance(35) else self.pick(same[:5])

    def broadcastable(self, value: Value) -> Value:
        """Draw an operand that broadcasts with a value: constant or computed, of any such shape."""
        type = value.type
        kind = self.below(10)
        if kind <= 2:
            return self.like(value)
        if kind <= 4:
            return self.constant(self.broadcast_shape(type.shape), type.dtype)
        if kind == 5:
            return self.constant(self.pick([(), (1,)]), type.dtype, "number")
        if kind == 6 and type.rank >= 2:
            channels = (type.shape[1], *(1 for _ in type.shape[2:]))
            return self.constant(self.pick([channels, (1, *channels)]), type.dtype)
        if kind == 7:
            shape = self.broadcast_shape(type.shape)
            found = [v for v in self.values if v.type.shape == shape and v.type.dtype is type.dtype]
            return self.pick(found) if found else self.fresh(TensorType(shape, type.dtype))
        if kind == 8 and type.dtype.is_float and type.rank and type.size:
            axes = tuple(sorted({self.below(type.rank) for _ in range(2)}))
            return self.add(Reduce(self.pick(["mean", "max", "sum"]), axes), value)
        if kind == 9 and 1 in type.shape:  # the new operand is the larger one
            return self.fresh(TensorType(tuple(self.pick([d, 2, 3]) if d == 1 else d for d in type.shape), type.dtype))
        return self.fresh(TensorType(self.broadcast_shape(type.shape), type.dtype))

    def broadcast_shape(self, shape: Shape) -> Shape:
        """Draw a shape that broadcasts to this one: some dims are 1, and some leading ones are left out."""
        dims = tuple(d if self.chance(60) else 1 for d in shape)
        leading = next((i for i, d in enumerate(dims) if d != 1), len(dims))
        return dims[self.below(leading + 1) :] if leading else dims

    def mask(self, value: Value) -> Value:
        """Draw bools that broadcast with a value."""
        kind = self.below(4)
        same = [v for v in self.values if v.type.dtype is DType.BOOL and v.type.shape == value.type.shape]
        if kind == 0 and same:
            return self.pick(same)
        if kind == 1 or not value.type.dtype.is_float:
            return self.fresh(TensorType(self.broadcast_shape(value.type.shape), DType.BOOL))
        other = self.broadcastable(value) if kind == 2 else self.constant((), value.type.dtype, "number")
        return self.pointwise(self.pick(["cmp_gt", "cmp_lt", "cmp_ge", "cmp_le", "cmp_eq", "cmp_neq"]), value, other)

    # shapes and ranges ---------------------------------------------------------------------------

    def shape(self, low: int = 0, high: int = 5) -> Shape:
        """Draw a shape of small dims, with odd numbers and 1 among them; rarely an empty dim."""
        rank = self.between(low, high)
        dims = tuple(self.pick([2, 3, 1, 4, 5, 8]) for _ in range(rank))
        if rank and self.chance(3):
            dims = (*dims[:-1], 0)
        while math.prod(dims) > MAX_ELEMENTS // 2:
            dims = tuple(min(d, 3) for d in dims[:3]) + (1,) * max(rank - 3, 0)
        return dims

    def image_shape(self) -> Shape:
        """Draw a shape of batch, channels and 1 to 3 (mostly 2) spatial dims."""
        spatial = self.pick([2, 2, 2, 2, 1, 3])
        side = [4, 3, 5, 1, 2, 6, 8] if spatial < 3 else [2, 3, 1]
        return (self.pick([1, 2, 3]), self.pick([4, 8, 3, 1, 2, 6]), *(self.pick(side) for _ in range(spatial)))

    def bounded(self, value: Value, low: float, high: float) -> Value:
        """Clip a value to an interval, so that later results are defined and not large; rarely leave it as it is."""
        if self.chance(8):
            return value
        return self.pointwise("clip", value, min=low, max=high)

    def away_from_zero(self, value: Value) -> Value:
        """Draw a positive value: computed from another, or a constant that broadcasts with it."""
        kind = self.below(4)
        if kind == 0:
            return self.constant(self.broadcast_shape(value.type.shape), value.type.dtype, "positive")
        if kind == 1:
            return self.pointwise("sigmoid", value)
        if kind == 2:
            return self.pointwise("exp", self.bounded(value, -2.0, 2.0))
        magnitude = self.pointwise("abs", value)
        return self.pointwise("add", magnitude, self.constant((), value.type.dtype, "positive"))

    # the end -------------------------------------------------------------------------------------

    def finish(self, escaping: int = 8) -> Graph:
        """Set the outputs: values that nothing uses, and some used ones. `escaping`: their percentage."""
        made = [v for v in self.values if v.node is not None]
        outputs = [v for v in made if not v.uses or self.chance(escaping)]
        if not outputs:
            outputs = made[-1:] or list(self.graph.inputs[-1:])
        if self.chance(4):
            outputs.append(self.pick(list(self.graph.inputs)) if self.graph.inputs else outputs[0])
        outputs = list(dict.fromkeys(outputs))
        names: list[Any] = [f"y{i}" for i in range(len(outputs))]
        if self.chance(4):  # one value under two names
            outputs.append(outputs[0])
            names.append("again")
        self.graph.set_outputs(outputs, names)
        self.graph.prune()
        return self.graph


Draw = Callable[[RandomGraph], None]  # adds to the graph
