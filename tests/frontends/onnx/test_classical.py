"""Compare ops of ai.onnx.ml with onnxruntime, each compiled without a GPU, and check what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from helpers import assert_close
from onnx import TensorProto, helper

import fusec
from fusec.errors import ModelError
from fusec.frontends import load
from fusec.frontends.onnx import classical
from fusec.frontends.onnx.classical.trees import COMPARISONS

X = np.array([[0.5, -1.0, 2.0], [0.0, 0.0, 0.0], [-2.0, 0.25, 0.75], [1.0, 2.0, 3.0]], np.float32)
HOLES = np.array([[np.nan, 1.0, 2.0], [3.0, np.nan, np.nan]], np.float32)
NUMBERS = np.array([[3, 1], [7, 3]], np.int64)
LINE = {"coefficients": [0.5, -1.0, 0.25, 1.0, 2.0, -0.5], "intercepts": [0.1, -0.2]}
KERNEL = {"coefficients": [0.5, -0.25], "rho": [0.3], "n_supports": 2, "kernel_params": [0.5, 0.1, 2.0]}
SUPPORT = {**KERNEL, "support_vectors": [0.1, 0.2, 0.3, -1.0, 0.5, 0.0]}
CASES: dict[str, tuple[str, list[np.ndarray], dict[str, Any]]] = {
    "scaler": ("Scaler", [X], {"offset": [1.0, 2.0, 3.0], "scale": [2.0, 0.5, 1.0]}),
    "scaler of integers": ("Scaler", [NUMBERS], {"offset": [1.0], "scale": [0.5]}),
    "largest": ("Normalizer", [np.abs(X)], {"norm": "MAX"}),
    "l1": ("Normalizer", [X], {"norm": "L1"}),
    "l2": ("Normalizer", [X], {"norm": "L2"}),
    "binarizer": ("Binarizer", [X], {"threshold": 0.25}),
    "imputer": ("Imputer", [HOLES], {"imputed_value_floats": [9.0], "replaced_value_float": float("nan")}),
    "imputer of columns": ("Imputer", [X], {"imputed_value_floats": [7.0, 8.0, 9.0], "replaced_value_float": 0.0}),
    "imputer of integers": ("Imputer", [NUMBERS], {"imputed_value_int64s": [5], "replaced_value_int64": 3}),
    "join": ("FeatureVectorizer", [X, X[:, :2]], {"inputdimensions": [3, 2]}),
    "extract": ("ArrayFeatureExtractor", [X, np.array([[2, 0]], np.int64)], {}),
    "extract labels": ("ArrayFeatureExtractor", [X[0], np.array([1, 1, 2, 0], np.int64)], {}),
    "one hot": ("OneHotEncoder", [NUMBERS], {"cats_int64s": [1, 3, 5], "zeros": 1}),
    "labels": ("LabelEncoder", [NUMBERS], {"keys_int64s": [3, 7], "values_floats": [0.5, 0.25], "default_float": 9.0}),
    "labels of floats": ("LabelEncoder", [X], {"keys_floats": [0.0, 2.0], "values_int64s": [4, 5]}),
    "regressor": ("LinearRegressor", [X], {**LINE, "targets": 2}),
    "classifier": ("LinearClassifier", [X], {**LINE, "classlabels_ints": [4, 9], "post_transform": "SOFTMAX"}),
    "logistic": ("LinearClassifier", [X], {**LINE, "classlabels_ints": [0, 1], "post_transform": "LOGISTIC"}),
    "svm": ("SVMRegressor", [X], {**SUPPORT, "kernel_type": "RBF"}),
    "svm of polynomials": ("SVMRegressor", [X], {**SUPPORT, "kernel_type": "POLY"}),
    "svm of sigmoids": ("SVMRegressor", [X], {**SUPPORT, "kernel_type": "SIGMOID"}),
    "svm of lines": ("SVMRegressor", [X], {**SUPPORT, "kernel_type": "LINEAR"}),
    "svm of one class": ("SVMRegressor", [X], {**SUPPORT, "kernel_type": "RBF", "one_class": 1}),
}
OUTPUTS = {"LinearClassifier": 2, "TreeEnsembleClassifier": 2}


def classical_model(op: str, arrays: Sequence[np.ndarray], attributes: dict[str, Any]) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(arrays))]
    results = [f"y{i}" for i in range(OUTPUTS.get(op, 1))]
    node = helper.make_node(op, names, results, name="n", domain="ai.onnx.ml", **attributes)
    inputs = [info(n, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for n, a in zip(names, arrays, strict=True)]
    proto = model([node], inputs, results, opset=17)
    proto.opset_import.add(domain="ai.onnx.ml", version=3)
    return proto


def agrees(op: str, arrays: Sequence[np.ndarray], attributes: dict[str, Any]) -> list[np.ndarray]:
    """Compare with onnxruntime; return what it gives."""
    proto = classical_model(op, arrays, attributes)
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    wanted = run(proto, feeds)
    for got, want in zip(fusec.compile(proto, target="cpu").run(None, feeds), wanted, strict=True):
        assert got.dtype == want.dtype
        assert got.shape == want.shape
        assert_close(got, want, 1e-6)
    return wanted


@pytest.mark.parametrize("name", CASES)
def test_as_onnxruntime(name: str) -> None:
    op, arrays, attributes = CASES[name]
    agrees(op, arrays, attributes)


def test_every_op_has_a_case() -> None:
    assert {op for op, _, _ in CASES.values()} | {"TreeEnsembleClassifier", "TreeEnsembleRegressor"} == {
        *classical.TABLE
    }


def forest(rng: np.random.Generator, prefix: str, classes: Sequence[int], mode: str = "BRANCH_LEQ") -> dict[str, Any]:
    """Make three random trees over three features, of several depths, whose leaves add to all of these classes."""
    found: dict[str, list[Any]] = {
        f"nodes_{name}": []
        for name in ("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids")
    }
    found |= {f"{prefix}_{name}": [] for name in ("treeids", "nodeids", "ids", "weights")}

    def grow(tree: int, number: int, depth: int) -> int:
        """Append a node and all below it, and return the next free number."""
        leaf = depth == 0 or (depth < 3 and rng.random() < 0.3)
        row = len(found["nodes_treeids"])
        limit = float(np.float32(rng.choice(X.ravel()) if rng.random() < 0.5 else rng.standard_normal()))
        values = [tree, number, int(rng.integers(3)), 0.0 if leaf else limit, "LEAF" if leaf else mode, 0, 0]
        for name, value in zip(list(found)[:7], values, strict=True):
            found[name].append(value)
        if leaf:
            for kind in classes:
                weight = float(np.float32(rng.uniform(0.1, 0.3)))
                for name, value in zip(list(found)[7:], (tree, number, kind, weight), strict=True):
                    found[name].append(value)
            return number + 1
        found["nodes_truenodeids"][row] = number + 1
        following = grow(tree, number + 1, depth - 1)
        found["nodes_falsenodeids"][row] = following
        return grow(tree, following, depth - 1)

    for tree, depth in enumerate((3, 1, 2)):
        grow(tree, 0, depth)
    return found


@pytest.mark.parametrize("mode", COMPARISONS)
def test_trees_of_each_comparison(mode: str, rng: np.random.Generator) -> None:
    agrees("TreeEnsembleRegressor", [X], {**forest(rng, "target", [0], mode), "n_targets": 1})


@pytest.mark.parametrize("kind", ["SUM", "AVERAGE", "MIN", "MAX"])
def test_trees_of_each_aggregate(kind: str, rng: np.random.Generator) -> None:
    given = forest(rng, "target", [0])
    agrees("TreeEnsembleRegressor", [X], {**given, "aggregate_function": kind, "n_targets": 1})


def test_trees_of_several_targets_with_a_base(rng: np.random.Generator) -> None:
    given = forest(rng, "target", [0, 1])
    agrees("TreeEnsembleRegressor", [X], {**given, "n_targets": 2, "base_values": [1.0, 2.0]})


@pytest.mark.parametrize("transform", ["NONE", "SOFTMAX", "LOGISTIC"])
def test_trees_of_three_classes(transform: str, rng: np.random.Generator) -> None:
    given = forest(rng, "class", [0, 1, 2])
    agrees("TreeEnsembleClassifier", [X], {**given, "classlabels_int64s": [3, 5, 7], "post_transform": transform})


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["probabilities", "scores"])
def test_trees_of_two_classes_with_the_weights_of_one(sign: float, rng: np.random.Generator) -> None:
    given = forest(rng, "class", [0])
    given["class_weights"] = [w * (sign if i % 2 else 1.0) for i, w in enumerate(given["class_weights"])]
    transform = "NONE" if sign > 0 else "LOGISTIC"
    labels, _ = agrees(
        "TreeEnsembleClassifier", [X], {**given, "classlabels_int64s": [4, 6], "post_transform": transform}
    )
    assert set(labels) <= {4, 6}


def test_a_missing_feature_goes_where_the_node_says(rng: np.random.Generator) -> None:
    given: dict[str, Any] = {**forest(rng, "target", [0]), "n_targets": 1}
    count = len(given["nodes_modes"])
    rows = X.copy()
    rows[:, 1] = np.nan
    for tracks in (0, 1):
        agrees("TreeEnsembleRegressor", [rows], {**given, "nodes_missing_value_tracks_true": [tracks] * count})


@pytest.mark.parametrize(
    ("op", "attributes", "words"),
    [
        ("LinearClassifier", {**LINE, "classlabels_strings": ["a", "b"]}, "labels are strings"),
        ("LabelEncoder", {"keys_strings": ["a"], "values_int64s": [1]}, "strings, which fusec lacks"),
        (
            "LinearRegressor",
            {**LINE, "targets": 2, "post_transform": "PROBIT"},
            "post_transform 'PROBIT' is not supported",
        ),
        ("LinearRegressor", {"coefficients": [1.0]}, "1 coefficients for 1 x 3"),
        ("OneHotEncoder", {"cats_int64s": [1], "zeros": 0}, "zeros=0"),
    ],
)
def test_what_is_refused(op: str, attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match="node 'n'") as caught:
        load(classical_model(op, [X], attributes))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("nodes_truenodeids", 0, "a tree has a circle"),
        ("nodes_truenodeids", 99, "a node leads to one that its tree lacks"),
        ("nodes_featureids", 3, "reads 4 features of f32[4,3]"),
        ("target_ids", 1, "a weight of node"),
        ("target_nodeids", 99, "a weight of node 99 of tree 0"),
        ("nodes_treeids", None, "differ in length"),
        ("target_weights", None, "0 weights for"),
    ],
)
def test_faulty_trees_are_refused(name: str, number: int | None, words: str, rng: np.random.Generator) -> None:
    given: dict[str, Any] = {**forest(rng, "target", [0]), "n_targets": 1}
    if number is None:
        del given[name]
    else:
        given[name][0] = number
    with pytest.raises(ModelError, match="node 'n'") as caught:
        load(classical_model("TreeEnsembleRegressor", [X], given))
    assert words in str(caught.value)


def test_maps_of_a_classifier_are_refused_with_the_remedy() -> None:
    proto = classical_model("LinearClassifier", [X], {**LINE, "classlabels_ints": [0, 1]})
    maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    proto.graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(maps))
    with pytest.raises(ModelError, match="zipmap=False"):
        load(proto)
