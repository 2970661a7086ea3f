"""Import linear models: a product, an offset, and what classifiers do with scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fusec.frontends.onnx.classical.features import floats
from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.ir import DType, Value
from fusec.ops import Gather, MatMul, Reshape, Softmax, TopK, pw
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


def require_no_strings(strings: Sequence[str]) -> None:
    """Raise VerifyError for labels that are strings; `with_numbered_classes` has replaced those of the model itself."""
    require(not strings, "labels are strings in the body of another node: take the classifier out of it")


def linear_scores(
    g: Emitter, x: Value, coefficients: Sequence[float], intercepts: Sequence[float], count: int
) -> Value:
    """Return a score of each row and class.

    coefficients: [count, features].
    intercepts: one for each class; none are zeros.
    """
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
    return transformed(g, linear_scores(g, x, coefficients, intercepts, targets), post_transform)


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
    require_no_strings(classlabels_strings)
    count = len(classlabels_ints)
    rows = len(coefficients) // max(1, x.type.shape[-1])
    require(rows == count, f"{rows} rows of coefficients for {count} labels")
    scores = linear_scores(g, x, coefficients, intercepts, count)
    return best_label(g, scores, classlabels_ints), transformed(g, scores, post_transform)


TABLE: Mapping[str, OpFunction] = {"LinearClassifier": linear_classifier, "LinearRegressor": linear_regressor}
