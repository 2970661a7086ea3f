"""Import ensembles of decision trees: all rows walk down all trees together, one level at a time.

A node is a row of constant tables. A leaf leads to itself, so trees of different depths take the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusec.frontends.onnx.classical.linear import best_label, label_of, require_integers, transformed
from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.movement.gather_scatter import gather_elements
from fusec.ir import DType, Literal, Value
from fusec.ops import Concat, Gather, Reduce, pw
from fusec.ops.spec import require

COMPARISONS = {
    "BRANCH_LEQ": "cmp_le",
    "BRANCH_LT": "cmp_lt",
    "BRANCH_GTE": "cmp_ge",
    "BRANCH_GT": "cmp_gt",
    "BRANCH_EQ": "cmp_eq",
    "BRANCH_NEQ": "cmp_neq",
}


@dataclass(frozen=True)
class Forest:
    """Tables of all nodes of all trees, and the weights that each leaf adds to each target.

    down: the node for a comparison that is false, and that for one that is true.
    missing: nodes where NaN counts as true.
    """

    feature: np.ndarray
    limit: np.ndarray
    down: tuple[np.ndarray, np.ndarray]
    missing: np.ndarray
    comparison: str
    weights: np.ndarray
    roots: np.ndarray
    depth: int


def _numbers(given: Mapping[str, Any], name: str) -> np.ndarray:
    literal = given.get(f"{name}_as_tensor")
    return np.asarray(literal.array if isinstance(literal, Literal) else given.get(name, ()), np.float32)


def _columns(given: Mapping[str, Any], names: Sequence[str]) -> list[Sequence[Any]]:
    """Return attributes that have one entry for each node, or for each weight of a leaf."""
    columns = [given.get(name, ()) for name in names]
    sizes = {len(column) for column in columns}
    require(len(sizes) == 1 and sizes != {0}, f"{', '.join(names)} differ in length, or are empty")
    return columns


def _forest(given: Mapping[str, Any], kind: str, targets: int) -> Forest:
    """Read the attributes. kind: `target` or `class`, the prefix of the leaves' attributes."""
    names = ("treeids", "nodeids", "featureids", "modes", "falsenodeids", "truenodeids")
    trees, ids, features, modes, *below = _columns(given, [f"nodes_{name}" for name in names])
    place = {key: index for index, key in enumerate(zip(trees, ids, strict=True))}
    used = {mode for mode in modes if mode != "LEAF"}
    require(len(used) <= 1 and used <= {*COMPARISONS}, f"nodes of several comparisons, {', '.join(sorted(used))}")

    def child(numbers: Sequence[int]) -> np.ndarray:
        rows = enumerate(zip(trees, numbers, modes, strict=True))
        found = [at if mode == "LEAF" else place.get((tree, number), -1) for at, (tree, number, mode) in rows]
        require(min(found) >= 0, "a node leads to one that its tree lacks")
        return np.array(found, np.int64)

    down = (child(below[0]), child(below[1]))
    inner = np.array([mode != "LEAF" for mode in modes], bool)
    reached = {int(node) for side in down for node in side[inner]}
    roots = np.array([at for at in range(len(ids)) if at not in reached], np.int64)
    require(len(roots) == len(set(trees)), f"{len(roots)} roots of {len(set(trees))} trees: a tree has a circle")
    limits = _numbers(given, "nodes_values")
    missing = np.array(given.get("nodes_missing_value_tracks_true") or [0] * len(ids), bool)
    require(limits.size == missing.size == len(ids), "nodes and their values differ in number")
    return Forest(
        np.array(features, np.int64) * inner,
        limits,
        down,
        missing & inner,
        COMPARISONS[used.pop()] if used else "cmp_le",
        _weights(given, kind, targets, place),
        roots,
        _depth(roots, down),
    )


def _weights(given: Mapping[str, Any], kind: str, targets: int, place: Mapping[tuple[int, int], int]) -> np.ndarray:
    """Return what each node adds to each target, which is not 0 for leaves."""
    trees, nodes, wanted = _columns(given, [f"{kind}_{name}" for name in ("treeids", "nodeids", "ids")])
    numbers = _numbers(given, f"{kind}_weights")
    require(numbers.size == len(wanted), f"{numbers.size} weights for {len(wanted)} leaves")
    weights = np.zeros((len(place), targets), np.float32)
    for tree, node, target, weight in zip(trees, nodes, wanted, numbers, strict=True):
        require(
            (tree, node) in place and 0 <= target < targets, f"a weight of node {node} of tree {tree}, {kind} {target}"
        )
        weights[place[tree, node], target] += weight
    return weights


def _depth(roots: np.ndarray, down: Sequence[np.ndarray]) -> int:
    """Count the levels below the roots. Raises VerifyError for trees with a circle."""
    depth, level = 0, set(map(int, roots))
    seen = set(level)
    while level := {int(side[at]) for at in level for side in down} - seen:
        seen |= level
        depth += 1
    require(len(seen) == len(down[0]), "a tree has a circle")
    return depth


def _leaf_weights(g: Emitter, x: Value, forest: Forest) -> Value:
    """Return the weights [rows, trees, targets] of the leaves that the rows reach."""
    require(x.type.rank == 2, f"takes rows of features, not {x.type}")
    rows, trees = x.type.shape[0], len(forest.roots)
    columns = int(forest.feature.max()) + 1
    require(columns <= x.type.shape[1] and forest.feature.min() >= 0, f"reads {columns} features of {x.type}")
    y = x if x.type.dtype.is_float else g.cast(x, DType.F32)
    limits = forest.limit.astype(y.type.dtype.numpy)
    at = g.constant(np.broadcast_to(forest.roots, (rows, trees)).copy())

    def of_node(table: np.ndarray) -> Value:
        return g(Gather(0), g.constant(table), at)

    for _ in range(forest.depth):
        number = gather_elements(g, y, of_node(forest.feature), axis=1)
        true = g(pw(forest.comparison), number, of_node(limits))
        if forest.missing.any():
            tracks = g(pw("cmp_neq"), of_node(forest.missing.astype(np.int64)), g.constant(np.array(0, np.int64)))
            true = g(pw("logical_or"), true, g(pw("logical_and"), g(pw("is_nan"), number), tracks))
        at = g(pw("where"), true, of_node(forest.down[1]), of_node(forest.down[0]))
    return of_node(forest.weights)


def tree_regressor(
    g: Emitter,
    x: Value,
    /,
    *,
    n_targets: int = 1,
    aggregate_function: str = "SUM",
    post_transform: str = "NONE",
    **given: Any,
) -> Value:
    """Import TreeEnsembleRegressor: the sum, mean, least or largest weight of the leaves."""
    kind = {"SUM": "sum", "AVERAGE": "mean", "MIN": "min", "MAX": "max"}.get(aggregate_function, "")
    require(bool(kind), f"aggregate_function {aggregate_function!r} is not known")
    require(kind in ("sum", "mean") or n_targets == 1, f"aggregate_function {aggregate_function!r} of several targets")
    weights = _leaf_weights(g, x, _forest(given, "target", n_targets))
    return transformed(g, _with_base(g, g(Reduce(kind, (1,), keepdims=False), weights), given), post_transform)


def _with_base(g: Emitter, scores: Value, given: Mapping[str, Any]) -> Value:
    base = _numbers(given, "base_values")
    return g(pw("add"), scores, g.constant(base)) if base.size else scores


def tree_classifier(
    g: Emitter,
    x: Value,
    /,
    *,
    classlabels_int64s: tuple[int, ...] = (),
    classlabels_strings: tuple[str, ...] = (),
    post_transform: str = "NONE",
    **given: Any,
) -> tuple[Value, Value]:
    """Import TreeEnsembleClassifier. Of two classes, the leaves may have weights of one only."""
    require_integers(classlabels_strings)
    count = len(classlabels_int64s)
    forest = _forest(given, "class", count)
    scores = g(Reduce("sum", (1,), keepdims=False), _leaf_weights(g, x, forest))
    if count == 2 and len(set(given["class_ids"])) == 1:
        return _of_one_class(g, scores, forest, classlabels_int64s, post_transform, given)
    scores = _with_base(g, scores, given)
    return best_label(g, scores, classlabels_int64s), transformed(g, scores, post_transform)


def _of_one_class(
    g: Emitter, scores: Value, forest: Forest, labels: Sequence[int], transform: str, given: Mapping[str, Any]
) -> tuple[Value, Value]:
    """Return the label and the scores of two classes from the sum of the second, as onnxruntime does."""
    base = _numbers(given, "base_values")
    require(base.size <= 1, "base values of two classes with the weights of one")
    own = given["class_ids"][0]
    second = g.window(scores, 1, own, 1)
    second = g(pw("add"), second, g.constant(base)) if base.size else second
    probability = bool((forest.weights >= 0).all())  # then the limit is 0.5
    is_second = g(pw("cmp_gt"), second, g.scalar(0.5 if probability else 0.0, second))
    label = label_of(g, g.cast(g.reshape(is_second, (second.type.shape[0],)), DType.I64), labels)
    if probability:
        return label, g(Concat(1), g(pw("sub"), g.scalar(1.0, second), second), second)
    pair = g(Concat(1), g(pw("neg"), second), second)
    return label, transformed(g, pair, transform)


TABLE: Mapping[str, OpFunction] = {
    "TreeEnsembleClassifier": tree_classifier,
    "TreeEnsembleRegressor": tree_regressor,
}
