"""Run ensembles of decision trees: all rows walk down all trees together, one level at a time.

A node is a row of constant tables. A leaf leads to itself, so trees of different depths take the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter
from fusec.frontends.onnx.model_file.limits import require_constant
from fusec.ir import DType, TensorType, Value
from fusec.ops import Gather, Reduce, pw
from fusec.ops.spec import require
from fusec.system.dataclass import dataclass

COMPARISONS = {
    "BRANCH_LEQ": "cmp_le",
    "BRANCH_LT": "cmp_lt",
    "BRANCH_GTE": "cmp_ge",
    "BRANCH_GT": "cmp_gt",
    "BRANCH_EQ": "cmp_eq",
    "BRANCH_NEQ": "cmp_neq",
}
LEQ, EQ = (list(COMPARISONS).index(mode) for mode in ("BRANCH_LEQ", "BRANCH_EQ"))
AGGREGATES = {"AVERAGE": "mean", "SUM": "sum", "MIN": "min", "MAX": "max"}


@dataclass(frozen=True)
class Forest:
    """Tables of all nodes of all trees, and the weights that each leaf adds to each target.

    comparison: index into COMPARISONS, of a leaf any number.
    down: the node for a comparison that is false, and that for one that is true. A leaf has itself.
    missing: nodes where NaN counts as true.
    roots: one node for each tree.
    """

    feature: np.ndarray
    limit: np.ndarray
    comparison: np.ndarray
    down: tuple[np.ndarray, np.ndarray]
    missing: np.ndarray
    weights: np.ndarray
    roots: np.ndarray

    @property
    def inner(self) -> np.ndarray:
        """Tell of each node if it is not a leaf."""
        itself = np.arange(len(self.down[0]))
        return (self.down[0] != itself) | (self.down[1] != itself)


def columns_of(given: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """Return attributes that have one entry for each node, or for each weight of a leaf."""
    columns = [given.get(name, ()) for name in names]
    sizes = {len(column) for column in columns}
    require(len(sizes) == 1 and sizes != {0}, f"{', '.join(names)} differ in length, or are empty")
    return columns


def no_weights(nodes: int, targets: int, dtype: DType) -> np.ndarray:
    """Return a table of zeros for what each node adds to each target."""
    require(targets > 0, f"{targets} targets")
    require_constant(TensorType((nodes, targets), dtype), "the table of weights,")
    return np.zeros((nodes, targets), dtype.numpy)


def leaf_weights(g: Emitter, x: Value, forest: Forest) -> Value:
    """Return the weights [rows, trees, targets] of the leaves that the rows reach."""
    require(x.type.rank == 2, f"takes rows of features, not {x.type}")
    rows, trees = x.type.shape[0], len(forest.roots)
    columns = int(forest.feature.max()) + 1
    require(columns <= x.type.shape[1] and forest.feature.min() >= 0, f"reads {columns} features of {x.type}")
    y = x if x.type.dtype.is_float else g.cast(x, DType.F32)
    y = g.cast(y, DType.of(np.result_type(y.type.dtype.numpy, forest.limit.dtype)))
    at = g.constant(np.broadcast_to(forest.roots, (rows, trees)).copy())
    firsts = g.constant(np.arange(rows)[:, None] * x.type.shape[1])
    y = g.reshape(y, (y.type.size,))
    for _ in range(_depth(forest)):
        at = _one_level_down(g, y, firsts, at, forest)
    return g(Gather(0), g.constant(forest.weights), at)


def aggregated(g: Emitter, weights: Value, kind: str) -> Value:
    """Return the sum, mean, least or largest weight of all trees [rows, targets]."""
    require(kind in AGGREGATES, f"aggregate_function {kind!r} is not known")
    # a row may reach no leaf of a target; the least weight of no leaves is not defined
    single = kind in ("SUM", "AVERAGE") or weights.type.shape[2] == 1
    require(single, f"aggregate_function {kind!r} of several targets")
    return g(Reduce(AGGREGATES[kind], (1,), keepdims=False), weights)


def _one_level_down(g: Emitter, y: Value, firsts: Value, at: Value, forest: Forest) -> Value:
    """Return the nodes [rows, trees] below those that the rows have reached.

    y: the features of all rows.
    firsts: the index of the first feature of each row.
    """

    def of_node(table: np.ndarray) -> Value:
        return g(Gather(0), g.constant(table), at)

    number = g(Gather(0), y, g(pw("add"), of_node(forest.feature), firsts))
    limit = of_node(forest.limit.astype(y.type.dtype.numpy))
    used = np.unique(forest.comparison[forest.inner])
    true, *others = [g(pw([*COMPARISONS.values()][mode]), number, limit) for mode in used]
    if others:
        mode = of_node(forest.comparison)
        for index, other in zip(used[1:], others, strict=True):
            true = g(pw("where"), g(pw("cmp_eq"), mode, g.scalar(index, mode)), other, true)
    if forest.missing.any():
        tracks = g(pw("cmp_neq"), of_node(forest.missing.astype(np.int64)), g.constant(np.array(0, np.int64)))
        true = g(pw("logical_or"), true, g(pw("logical_and"), g(pw("is_nan"), number), tracks))
    size = g.constant(np.array(len(forest.weights)))
    place = g(pw("where"), true, g(pw("add"), at, size), at)
    return g(Gather(0), g.constant(np.concatenate(forest.down)), place)


def _depth(forest: Forest) -> int:
    """Count the steps of the longest way down. Several nodes may lead to one. Raises VerifyError for a circle."""
    inner, below = forest.inner, np.stack(forest.down, 1)
    above = np.bincount(below[inner].ravel(), minlength=len(below)).tolist()
    steps, children = [0] * len(below), below.tolist()
    ready = [node for node, count in enumerate(above) if not count]
    for node in ready:
        for child in children[node] if inner[node] else ():
            steps[child] = max(steps[child], steps[node] + 1)
            above[child] -= 1
            if not above[child]:
                ready.append(child)
    require(len(ready) == len(below), "a tree has a circle")
    return max(steps)
