"""Import support vector machines: a regressor, and a classifier that compares each pair of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from fusec.frontends.onnx.classical.features import floats
from fusec.frontends.onnx.classical.linear import best_label, linear_scores, require_no_strings, transformed
from fusec.frontends.onnx.classical.pair_probabilities import joined_probabilities
from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.ir import DType, Value
from fusec.ops import Concat, MatMul, Reduce, pw
from fusec.ops.spec import require


def svm_regressor(
    g: Emitter,
    x: Value,
    /,
    *,
    coefficients: tuple[float, ...] = (),
    kernel_params: tuple[float, ...] = (),
    kernel_type: str = "LINEAR",
    n_supports: int = 0,
    one_class: int = 0,
    post_transform: str = "NONE",
    rho: tuple[float, ...] = (),
    support_vectors: tuple[float, ...] = (),
) -> Value:
    require(post_transform == "NONE", f"post_transform {post_transform!r} is not supported")
    if not n_supports:
        return linear_scores(g, x, coefficients, rho[:1], 1)
    kernel = _kernel(g, x, _vectors(support_vectors, n_supports, x), kernel_type, kernel_params)
    weights = g.constant(np.array(coefficients, np.float32).reshape(n_supports, 1))
    y = g(pw("add"), g(MatMul(), kernel, weights), floats(g, rho[:1]))
    if not one_class:
        return y
    inside = g(pw("cmp_gt"), y, g.scalar(0.0, y))
    return g(pw("where"), inside, g.scalar(1.0, y), g.scalar(-1.0, y))


def svm_classifier(
    g: Emitter,
    x: Value,
    /,
    *,
    coefficients: tuple[float, ...],
    rho: tuple[float, ...],
    classlabels_ints: tuple[int, ...] = (),
    classlabels_strings: tuple[str, ...] = (),
    kernel_params: tuple[float, ...] = (),
    kernel_type: str = "LINEAR",
    post_transform: str = "NONE",
    prob_a: tuple[float, ...] = (),
    prob_b: tuple[float, ...] = (),
    support_vectors: tuple[float, ...] = (),
    vectors_per_class: tuple[int, ...] = (),
) -> tuple[Value, Value]:
    """Import SVMClassifier: the class that wins most comparisons, and scores of pairs or probabilities of classes.

    Two classes without probabilities have two scores, that of their comparison and its negative.
    """
    require_no_strings(classlabels_strings)
    count = len(classlabels_ints)
    if not sum(vectors_per_class):
        scores = linear_scores(g, x, coefficients, (rho[0],) * count, count)
        require(count > 2, "a linear machine of two classes is not supported")
        return best_label(g, scores, classlabels_ints), transformed(g, scores, post_transform)
    pairs = list(combinations(range(count), 2))
    require(len(vectors_per_class) == count > 1, f"vectors of {len(vectors_per_class)} classes for {count} labels")
    require(len(rho) == len(pairs), f"{len(rho)} offsets for {len(pairs)} pairs of classes")
    vectors = _vectors(support_vectors, sum(vectors_per_class), x)
    kernel = _kernel(g, x, vectors, kernel_type, kernel_params)
    weights = g.constant(_of_pairs(coefficients, vectors_per_class))
    scores = g(pw("add"), g(MatMul(), kernel, weights), floats(g, rho))
    label = best_label(g, _votes(g, scores, count), classlabels_ints)
    if prob_a:
        require(len(prob_a) == len(prob_b) == len(pairs), f"{len(prob_a)} slopes for {len(pairs)} pairs of classes")
        return label, transformed(g, joined_probabilities(g, scores, count, prob_a, prob_b), post_transform)
    if count > 2:
        return label, transformed(g, scores, post_transform)
    require(post_transform == "NONE", f"post_transform {post_transform!r} of two classes is not supported")
    return label, g(Concat(1), g(pw("neg"), scores), scores)


def _vectors(numbers: Sequence[float], count: int, x: Value) -> np.ndarray:
    require(x.type.rank == 2, f"takes rows of features, not {x.type}")
    require(
        len(numbers) == count * x.type.shape[1],
        f"{len(numbers)} numbers for {count} support vectors of {x.type.shape[1]} features",
    )
    return np.array(numbers, np.float32).reshape(count, -1)


def _of_pairs(coefficients: Sequence[float], sizes: Sequence[int]) -> np.ndarray:
    """Return the weight of each support vector in each comparison: [vectors, pairs].

    coefficients: [classes - 1, vectors], for each vector those against the other classes, in order.
    """
    ends = np.cumsum(sizes)
    total, starts = int(ends[-1]), ends - sizes
    require(
        len(coefficients) == (len(sizes) - 1) * total,
        f"{len(coefficients)} coefficients for {total} support vectors of {len(sizes)} classes",
    )
    given = np.array(coefficients, np.float32).reshape(-1, total)
    pairs = list(combinations(range(len(sizes)), 2))
    weights = np.zeros((total, len(pairs)), np.float32)
    for number, (first, second) in enumerate(pairs):
        for own, row in ((first, second - 1), (second, first)):
            rows = slice(starts[own], ends[own])
            weights[rows, number] = given[row, rows]
    return weights


def _votes(g: Emitter, scores: Value, count: int) -> Value:
    """Count the comparisons that each class wins: the first of a pair does if the score is above 0."""
    pairs = list(combinations(range(count), 2))
    first, second = np.zeros((2, len(pairs), count), np.float32)
    for number, (one, other) in enumerate(pairs):
        first[number, one] = second[number, other] = 1
    won = g.cast(g(pw("cmp_gt"), scores, g.scalar(0.0, scores)), DType.F32)
    return g(pw("add"), g(MatMul(), won, g.constant(first - second)), g.constant(second.sum(0)))


def _kernel(g: Emitter, x: Value, vectors: np.ndarray, kind: str, params: Sequence[float]) -> Value:
    """Return the kernel of each row and each support vector."""
    x = g.cast(x, DType.F32)
    gamma, offset, degree = (*params, 0.0, 0.0, 0.0)[:3]
    product = g(MatMul(), x, g.constant(np.ascontiguousarray(vectors.T)))
    if kind == "LINEAR":
        return product
    if kind == "RBF":  # |x - v|^2 by differences, because squares less products lose digits
        apart = g(pw("sub"), g.reshape(x, (x.type.shape[0], 1, x.type.shape[1])), g.constant(vectors))
        distance = g(Reduce("sum_square", (2,), keepdims=False), apart)
        return g(pw("exp"), g(pw("mul"), distance, g.scalar(-gamma, x)))
    line = g(pw("add"), g(pw("mul"), product, g.scalar(gamma, x)), g.scalar(offset, x))
    if kind == "SIGMOID":
        return g(pw("tanh"), line)
    require(kind == "POLY", f"kernel_type {kind!r} is not known")
    return g(pw("pow"), line, g.scalar(degree, x))


TABLE: Mapping[str, OpFunction] = {"SVMClassifier": svm_classifier, "SVMRegressor": svm_regressor}
