"""Import TreeEnsembleRegressor and TreeEnsembleClassifier, whose nodes name the node below by its tree and number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fusec.frontends.onnx.classical.forest import COMPARISONS, Forest, aggregated, columns_of, leaf_weights, no_weights
from fusec.frontends.onnx.classical.linear import best_label, label_of, require_no_strings, transformed
from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.ir import DType, Literal, Value
from fusec.ops import Concat, pw
from fusec.ops.spec import require

LEAF = "LEAF"


def _numbers(given: Mapping[str, Any], name: str) -> np.ndarray:
    literal = given.get(f"{name}_as_tensor")
    return literal.array.reshape(-1) if isinstance(literal, Literal) else np.array(given.get(name, ()), np.float32)


def _forest(given: Mapping[str, Any], kind: str, targets: int) -> Forest:
    """Read the attributes. kind: `target` or `class`, the prefix of the leaves' attributes."""
    names = ("treeids", "nodeids", "featureids", "modes", "falsenodeids", "truenodeids")
    trees, ids, features, modes, *below = columns_of(given, [f"nodes_{name}" for name in names])
    place = {key: index for index, key in enumerate(zip(trees, ids, strict=True))}
    unknown = {*modes} - {*COMPARISONS, LEAF}
    require(not unknown, f"nodes of unknown modes: {', '.join(sorted(unknown))}")

    def child(numbers: Sequence[int]) -> np.ndarray:
        rows = enumerate(zip(trees, numbers, modes, strict=True))
        found = [at if mode == LEAF else place.get((tree, number), -1) for at, (tree, number, mode) in rows]
        require(min(found) >= 0, "a node leads to one that its tree lacks")
        return np.array(found, np.int64)

    down = (child(below[0]), child(below[1]))
    inner = np.array([mode != LEAF for mode in modes], bool)
    reached = {int(node) for side in down for node in side[inner]}
    roots = np.array([at for at in range(len(ids)) if at not in reached], np.int64)
    require(len(roots) == len(set(trees)), f"{len(roots)} roots of {len(set(trees))} trees: a tree has a circle")
    limits = _numbers(given, "nodes_values")
    missing = np.array(given.get("nodes_missing_value_tracks_true") or [0] * len(ids), bool)
    require(limits.size == missing.size == len(ids), "nodes and their values differ in number")
    numbered = {mode: index for index, mode in enumerate(COMPARISONS)}
    return Forest(
        np.array(features, np.int64) * inner,
        limits,
        np.array([numbered.get(mode, 0) for mode in modes], np.int64),
        down,
        missing & inner,
        _weights(given, kind, targets, place),
        roots,
    )


def _weights(given: Mapping[str, Any], kind: str, targets: int, place: Mapping[tuple[int, int], int]) -> np.ndarray:
    """Return what each node adds to each target, which is not 0 for leaves."""
    trees, nodes, wanted = columns_of(given, [f"{kind}_{name}" for name in ("treeids", "nodeids", "ids")])
    numbers = _numbers(given, f"{kind}_weights")
    require(numbers.size == len(wanted), f"{numbers.size} weights for {len(wanted)} leaves")
    weights = no_weights(len(place), targets, DType.F32)
    for tree, node, target, weight in zip(trees, nodes, wanted, numbers, strict=True):
        require(
            (tree, node) in place and 0 <= target < targets, f"a weight of node {node} of tree {tree}, {kind} {target}"
        )
        weights[place[tree, node], target] += weight
    return weights


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
    weights = leaf_weights(g, x, _forest(given, "target", n_targets))
    return transformed(g, _with_base(g, aggregated(g, weights, aggregate_function), given), post_transform)


def _base(given: Mapping[str, Any]) -> np.ndarray:
    return _numbers(given, "base_values").astype(np.float32)


def _with_base(g: Emitter, scores: Value, given: Mapping[str, Any]) -> Value:
    base = _base(given)
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
    require_no_strings(classlabels_strings)
    count = len(classlabels_int64s)
    forest = _forest(given, "class", count)
    scores = aggregated(g, leaf_weights(g, x, forest), "SUM")
    if count == 2 and len(set(given["class_ids"])) == 1:
        return _of_one_class(g, scores, forest, classlabels_int64s, post_transform, given)
    scores = _with_base(g, scores, given)
    return best_label(g, scores, classlabels_int64s), transformed(g, scores, post_transform)


def _of_one_class(
    g: Emitter, scores: Value, forest: Forest, labels: Sequence[int], transform: str, given: Mapping[str, Any]
) -> tuple[Value, Value]:
    """Return the label and the scores of two classes from the sum of the second, as onnxruntime does."""
    base = _base(given)
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
