"""Import TreeEnsemble of version 5, whose nodes are numbered through all trees, and whose leaves are apart.

A forest has the nodes first, then the leaves. A node that tests membership in a set becomes a binary search, because
it then needs no op that other nodes lack.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fusec.frontends.onnx.classical.forest import (
    AGGREGATES,
    COMPARISONS,
    EQ,
    LEQ,
    Forest,
    aggregated,
    columns_of,
    leaf_weights,
    no_weights,
)
from fusec.frontends.onnx.classical.linear import transformed
from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.ir import Array, DType, Literal, Value
from fusec.ops.spec import require

MEMBER = len(COMPARISONS)  # the mode of a node that tests membership
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
NODES = ("featureids", "modes", "splits", "falsenodeids", "falseleafs", "truenodeids", "trueleafs")


def tree_ensemble(
    g: Emitter, x: Value, /, *, n_targets: int = 1, aggregate_function: int = 1, post_transform: int = 0, **given: Any
) -> Value:
    """Import TreeEnsemble. A leaf has one weight, of one target."""
    kinds = (*AGGREGATES,)
    require(0 <= aggregate_function < len(kinds), f"aggregate_function {aggregate_function} is not known")
    require(0 <= post_transform < len(TRANSFORMS), f"post_transform {post_transform} is not known")
    require(x.type.dtype.is_float, f"takes features that are floats, not {x.type}")
    weights = leaf_weights(g, x, _forest(given, n_targets, x.type.dtype))
    return transformed(g, aggregated(g, weights, kinds[aggregate_function]), TRANSFORMS[post_transform])


def _forest(given: Mapping[str, Any], targets: int, dtype: DType) -> Forest:
    """Read the attributes. dtype: type of the features, which the results have, too."""
    given = {name: value.array.reshape(-1) if isinstance(value, Literal) else value for name, value in given.items()}
    features, modes, limits, *below = columns_of(given, [f"nodes_{name}" for name in NODES])
    targetids, weights = columns_of(given, ("leaf_targetids", "leaf_weights"))
    nodes, leaves = len(modes), len(targetids)
    roots = np.array(given["tree_roots"], np.int64)
    require(roots.size > 0 and _within(roots, nodes), f"a root that is none of the {nodes} nodes, or no root")
    require(_within(modes, MEMBER + 1), f"nodes of unknown modes: {sorted({*map(int, modes)} - {*range(MEMBER + 1)})}")
    require(_within(targetids, targets), f"leaves of targets up to {max(targetids)} of {targets}")
    missing = np.array(given.get("nodes_missing_value_tracks_true") or [0] * nodes, bool)
    require(missing.size == nodes, f"nodes_missing_value_tracks_true has {missing.size} entries for {nodes} nodes")
    table = no_weights(nodes + leaves, targets, dtype)
    table[np.arange(nodes, nodes + leaves), targetids] = weights
    rest, itself = np.zeros(leaves, np.int64), np.arange(nodes, nodes + leaves)
    false, true = _children(below[0], below[1], nodes, leaves), _children(below[2], below[3], nodes, leaves)
    down = np.concatenate([false, itself]), np.concatenate([true, itself])
    plain = Forest(
        np.concatenate([np.array(features, np.int64), rest]),
        np.concatenate([limits, rest.astype(limits.dtype)]),
        np.concatenate([modes.astype(np.int64), rest]),
        down,
        np.concatenate([missing, rest > 0]),
        table,
        roots,
    )
    return _searched(plain, given.get("membership_values", np.zeros(0, limits.dtype)))


def _within(numbers: Any, end: int) -> bool:
    return bool(((np.array(numbers, np.int64) >= 0) & (np.array(numbers, np.int64) < end)).all())


def _children(ids: Any, leafs: Any, nodes: int, leaves: int) -> Array:
    """Return the rows of the nodes and leaves that all nodes lead to."""
    found, is_leaf = np.array(ids, np.int64), np.array(leafs, bool)
    require(_within(found[is_leaf], leaves), f"a node leads to a leaf that is none of the {leaves}")
    require(_within(found[~is_leaf], nodes), f"a node leads to a node that is none of the {nodes}")
    require(bool((found != np.arange(nodes))[~is_leaf].all()), "a tree has a circle")
    return found + nodes * is_leaf


def _searched(forest: Forest, members: Array) -> Forest:
    """Replace nodes that test membership by a binary search: LEQ at inner nodes, and EQ at the last one.

    members: the sets of these nodes, in their order. NaN ends a set.
    """
    at = np.flatnonzero(forest.comparison == MEMBER)
    sets = np.split(members, np.flatnonzero(np.isnan(members)) + 1)
    sets = sets[:-1] if len(sets[-1]) == 0 else sets
    require(len(sets) == len(at), f"membership_values has {len(sets)} sets for {len(at)} nodes that test membership")
    wide = np.result_type(forest.limit, members)
    feature, limit, mode, missing = map(
        list, (forest.feature, forest.limit.astype(wide), forest.comparison, forest.missing)
    )
    false, true = map(list, forest.down)

    def search(row: int, numbers: Array) -> None:
        """Let a row search among these numbers, in order. Rows that it needs are appended."""
        node = (feature[row], missing[row], false[row], true[row])
        pending = [(row, numbers)]
        while pending:
            row, numbers = pending.pop()
            middle = len(numbers) // 2
            if not middle:
                mode[row], limit[row] = EQ, numbers[0]
                continue
            mode[row], limit[row], missing[row] = LEQ, numbers[middle - 1], False
            true[row], false[row] = len(mode), len(mode) + 1
            pending += [(len(mode), numbers[:middle]), (len(mode) + 1, numbers[middle:])]
            for _ in range(2):
                for column, entry in zip((feature, missing, false, true), node, strict=True):
                    column.append(entry)
                mode.append(EQ)
                limit.append(limit[row])

    for row, numbers in zip(at, sets, strict=True):
        found = np.unique(numbers[~np.isnan(numbers)])
        search(int(row), found if found.size else np.full(1, np.nan, wide))  # no number equals NaN
    more = np.zeros((len(mode) - len(forest.weights), forest.weights.shape[1]), forest.weights.dtype)
    return Forest(
        np.array(feature),
        np.array(limit, wide),
        np.array(mode),
        (np.array(false), np.array(true)),
        np.array(missing),
        np.concatenate([forest.weights, more]),
        forest.roots,
    )


TABLE: Mapping[str, OpFunction] = {"TreeEnsemble": tree_ensemble}
