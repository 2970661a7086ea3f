"""Import linear models and support vector regression: a product, an offset, and what classifiers do with scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusec.frontends.onnx.classical.features import floats
from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.ir import DType, Value
from fusec.ops import Gather, MatMul, Reduce, Reshape, Softmax, TopK, pw
from fusec.ops.spec import require


def transformed(g: Emitter, scores: Value, transform: str) -> Value:
    """Return scores after a classifier's post_transform."""
    require(transform in ("NONE", "SOFTMAX", "LOGISTIC"), f"post_transform {transform!r} is not supported")
    if transform == "SOFTMAX":
        return g(Softmax(1), scores)
    return g(pw("sigmoid"), scores) if transform == "LOGISTIC" else scores


def best_label(g: Emitter, scores: Value, labels: Sequence[int]) -> Value:
    """Return the label of the largest score of each row, the first of equal ones."""
    _, index = g.many(TopK(1, 1), scores)
    return label_of(g, g(Reshape((scores.type.shape[0],)), index), labels)


def label_of(g: Emitter, index: Value, labels: Sequence[int]) -> Value:
    """Return the label of each class, which is a number."""
    if tuple(labels) == tuple(range(len(labels))):
        return g.cast(index, DType.I64)
    return g(Gather(0), g.constant(np.array(labels, np.int64)), index)


def require_integers(strings: Sequence[str]) -> None:
    require(not strings, "labels are strings, which fusec lacks: train with integers as labels")


def _scores(g: Emitter, x: Value, coefficients: Sequence[float], intercepts: Sequence[float], count: int) -> Value:
    require(x.type.rank == 2, f"takes rows of features, not {x.type}")
    features = x.type.shape[1]
    require(len(coefficients) == count * features, f"{len(coefficients)} coefficients for {count} x {features}")
    weights = np.array(coefficients, np.float32).reshape(count, features).T
    y = g(MatMul(), g.cast(x, DType.F32), g.constant(np.ascontiguousarray(weights)))
    return g(pw("add"), y, floats(g, intercepts)) if intercepts else y


def linear_regressor(
    g: Emitter,
    x: Value,
    /,
    *,
    coefficients: tuple[float, ...] = (),
    intercepts: tuple[float, ...] = (),
    post_transform: str = "NONE",
    targets: int = 1,
) -> Value:
    return transformed(g, _scores(g, x, coefficients, intercepts, targets), post_transform)


def linear_classifier(
    g: Emitter,
    x: Value,
    /,
    *,
    coefficients: tuple[float, ...],
    classlabels_ints: tuple[int, ...] = (),
    classlabels_strings: tuple[str, ...] = (),
    intercepts: tuple[float, ...] = (),
    multi_class: int = 0,
    post_transform: str = "NONE",
) -> tuple[Value, Value]:
    """Import LinearClassifier. multi_class says nothing about the result."""
    require_integers(classlabels_strings)
    count = len(classlabels_ints)
    rows = len(coefficients) // max(1, x.type.shape[-1])
    require(rows == count, f"{rows} rows of coefficients for {count} labels")
    scores = _scores(g, x, coefficients, intercepts, count)
    return best_label(g, scores, classlabels_ints), transformed(g, scores, post_transform)


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
        return _scores(g, x, coefficients, rho[:1], 1)
    y = g.cast(x, DType.F32)
    vectors = np.array(support_vectors, np.float32).reshape(n_supports, -1)
    kernel = _kernel(g, y, vectors, kernel_type, (*kernel_params, 0.0, 0.0, 0.0))
    weights = g.constant(np.array(coefficients, np.float32).reshape(n_supports, 1))
    y = g(pw("add"), g(MatMul(), kernel, weights), floats(g, rho[:1]))
    if not one_class:
        return y
    inside = g(pw("cmp_gt"), y, g.scalar(0.0, y))
    return g(pw("where"), inside, g.scalar(1.0, y), g.scalar(-1.0, y))


def _kernel(g: Emitter, x: Value, vectors: np.ndarray, kind: str, params: Sequence[float]) -> Value:
    """Return the kernel of each row and each support vector."""
    gamma, offset, degree = params[:3]
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


TABLE: Mapping[str, OpFunction] = {
    "LinearClassifier": linear_classifier,
    "LinearRegressor": linear_regressor,
    "SVMRegressor": svm_regressor,
}
