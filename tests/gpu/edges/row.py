"""One row of the table of edge values: a graph that is one step, what it is fed, and names for what that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from gpu.edges.numbers import name

from fusec.ir import DType, Graph, Node, Op, TensorType, Value
from fusec.ops import Cast, Pointwise
from fusec.schedule.program import outputs_of

Array = np.ndarray[Any, Any]
FLOATS = (DType.F32, DType.F16, DType.BF16)
HALVES = (DType.F16, DType.BF16)


@dataclass(frozen=True, eq=False)
class Row:
    """`op` is what it is about; `feeds`, by input and run. `labels` broadcast to the first output and say which edge
    values an element is of; without any, those of the operands at the same place do. `exact`: moves elements, so that
    results are to be the same bit for bit. `whole`: it is compiled and run as a model is, since no step is left of it.
    `kernel_only`: partitions never put such a step to cuDNN. `single`: sums have one term that is not zero."""

    name: str
    op: str
    graph: Graph
    feeds: tuple[dict[str, Array], ...]
    labels: Array | None = None
    exact: bool = False
    whole: bool = False
    kernel_only: bool = False
    single: bool = False
    tensor_cores: bool = False

    @property
    def is_pointwise(self) -> bool:
        """Tell if results are as exact as those of ops that compute element by element."""
        return self.single or all(isinstance(node.op, (Pointwise, Cast)) for node in self.nodes)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The step."""
        return tuple(n for n in self.graph.nodes if not any(v.literal is not None for v in n.results))

    @property
    def outputs(self) -> tuple[Value, ...]:
        """Return the values that the step stores."""
        return outputs_of(self.nodes)

    @cached_property
    def dtype(self) -> DType:
        """Of the first operand that holds numbers."""
        values = [v for n in self.nodes for v in (*n.operands, *n.results)]
        return next((v.type.dtype for v in values if v.type.dtype is not DType.BOOL), DType.BOOL)

    def labels_of(self, feeds: dict[str, Array], shape: tuple[int, ...]) -> Array:
        """Return the edge values of each element of a result of this shape, as text."""
        if self.labels is not None:
            labels = self.labels
            if labels.ndim != len(shape) and labels.size == np.prod(shape):
                labels = labels.reshape(shape)  # statistics of channels
            if labels.ndim == len(shape) and all(
                s in (1, n) or s > n for s, n in zip(labels.shape, shape, strict=True)
            ):
                labels = labels[tuple(slice(0, max(n, 1)) for n in shape)]  # a shorter result of the first ones
            try:
                return np.broadcast_to(labels, shape)
            except ValueError:
                return np.full(shape, "")
        parts: list[Array] = []
        for value in self.graph.inputs:
            array = feeds[value.name]
            named = np.array([name(x, value.type.dtype) for x in array.reshape(-1)], object).reshape(array.shape)
            parts.append(named)
        try:
            whole = [np.broadcast_to(p, shape) for p in parts]
        except ValueError:
            return np.full(shape, "")
        return (
            whole[0]
            if len(whole) == 1
            else np.array([" , ".join(x) for x in zip(*(w.reshape(-1) for w in whole), strict=True)], object).reshape(
                shape
            )
            if whole
            else np.full(shape, "")
        )


Make = Callable[..., Value | Sequence[Value]]


def row(
    title: str,
    op: str,
    arrays: Sequence[Array],
    make: Make,
    *,
    constants: Sequence[int] = (),
    orders: dict[int, tuple[int, ...]] | None = None,
    more: Sequence[Sequence[Array]] = (),
    **known: Any,
) -> Row:
    """A row whose graph `make` builds of its operands. constants: which of them are. orders: how others are stored.
    more: arrays for further runs."""
    graph = Graph("row")
    values: list[Value] = []
    for i, array in enumerate(arrays):
        if i in constants:
            values.append(graph.constant(array, f"x{i}"))
        else:
            type = TensorType(array.shape, DType.of(array.dtype), (orders or {}).get(i, ()))
            values.append(graph.add_input(f"x{i}", type))
    made = make(graph, *values)
    graph.set_outputs([made] if isinstance(made, Value) else list(made))
    graph.verify()
    names = {v.name for v in graph.inputs}
    feeds = tuple({f"x{i}": a for i, a in enumerate(each) if f"x{i}" in names} for each in (arrays, *more))
    return Row(title, op, graph, feeds, **known)


def added(op: Op) -> Make:
    """The op alone, with all its results."""
    return lambda g, *v: g.insert(op, list(v)).results
