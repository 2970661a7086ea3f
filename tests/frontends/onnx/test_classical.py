"""Compare ops of ai.onnx.ml with onnxruntime, each compiled without a GPU, and check what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from frontends.onnx.models import info, model, run
from helpers import assert_close
from onnx import TensorProto, helper, numpy_helper

import fusec
from fusec.errors import ModelError
from fusec.frontends import load
from fusec.frontends.onnx import classical
from fusec.frontends.onnx.classical.forest import COMPARISONS

X = np.array([[0.5, -1.0, 2.0], [0.0, 0.0, 0.0], [-2.0, 0.25, 0.75], [1.0, 2.0, 3.0]], np.float32)
HOLES = np.array([[np.nan, 1.0, 2.0], [3.0, np.nan, np.nan]], np.float32)
NUMBERS = np.array([[3, 1], [7, 3]], np.int64)
LINE = {"coefficients": [0.5, -1.0, 0.25, 1.0, 2.0, -0.5], "intercepts": [0.1, -0.2]}
KERNEL = {"coefficients": [0.5, -0.25], "rho": [0.3], "n_supports": 2, "kernel_params": [0.5, 0.1, 2.0]}
SUPPORT = {**KERNEL, "support_vectors": [0.1, 0.2, 0.3, -1.0, 0.5, 0.0]}
MACHINE = {
    "coefficients": [0.5, 1.0, -0.25, 0.75, -1.0, 0.125, -0.5, 2.0], "rho": [0.3, -0.2, 0.05],
    "vectors_per_class": [1, 2, 1],
    "support_vectors": np.linspace(-1, 1, 12).round(2).tolist(), "kernel_params": [0.5, 0.1, 2.0], "kernel_type": "RBF",
    "classlabels_ints": [3, 5, 9],
}  # fmt: skip
PAIR = {
    **MACHINE, "coefficients": [0.5, 1.0, -0.25, -1.5], "rho": [0.3], "vectors_per_class": [2, 2],
    "classlabels_ints": [4, 9],
}  # fmt: skip
LINES = {
    "coefficients": [*LINE["coefficients"], 1.0, 0.0, -1.0], "rho": [0.1], "kernel_params": [0.0, 0.0, 0.0],
    "kernel_type": "LINEAR", "classlabels_ints": [3, 5, 9],
}  # fmt: skip
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
    "classifying svm": ("SVMClassifier", [X], MACHINE),
    "classifying svm of lines": ("SVMClassifier", [X], {**MACHINE, "kernel_type": "LINEAR"}),
    "classifying svm with softmax": ("SVMClassifier", [X], {**MACHINE, "post_transform": "SOFTMAX"}),
    "classifying svm of two": ("SVMClassifier", [X], PAIR),
    "classifying svm without vectors": ("SVMClassifier", [X], LINES),
    "svm of one class": ("SVMRegressor", [X], {**SUPPORT, "kernel_type": "RBF", "one_class": 1}),
}
OUTPUTS = {"LinearClassifier": 2, "SVMClassifier": 2, "TreeEnsembleClassifier": 2}


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
    trees = {"TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor"}
    others = {*trees, "CategoryMapper", "ZipMap"}  # test_tree_ensemble.py and test_strings.py have more cases
    assert {op for op, _, _ in CASES.values()} | others == {*classical.TABLE}


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


def test_trees_of_several_comparisons(rng: np.random.Generator) -> None:
    given = forest(rng, "target", [0])
    modes = given["nodes_modes"]
    given["nodes_modes"] = [mode if mode == "LEAF" else str(rng.choice([*COMPARISONS])) for mode in modes]
    agrees("TreeEnsembleRegressor", [np.concatenate([X, HOLES])], {**given, "n_targets": 1})


def test_limits_of_doubles_stay_doubles(rng: np.random.Generator) -> None:
    """Each feature is a limit, or one step of f64 away from it."""
    given = forest(rng, "target", [0], "BRANCH_LT")
    limits = rng.standard_normal(len(given["nodes_values"]))
    rows = rng.choice(limits, (40, 3))
    rows = np.where(rng.random(rows.shape) < 0.5, rows, np.nextafter(rows, -np.inf))
    given["nodes_values_as_tensor"] = numpy_helper.from_array(limits, "limits")
    given["target_weights_as_tensor"] = numpy_helper.from_array(np.array(given["target_weights"]), "weights")
    del given["nodes_values"], given["target_weights"]
    agrees("TreeEnsembleRegressor", [rows], {**given, "n_targets": 1})


def test_several_nodes_may_lead_to_one() -> None:
    """A set as LightGBM's converter writes it: all members lead to one subtree, the last one by the longest way."""
    given: dict[str, Any] = {
        "nodes_treeids": [0] * 8,
        "nodes_nodeids": [*range(8)],
        "nodes_featureids": [0, 0, 0, 1, 2, 0, 0, 0],
        "nodes_modes": [*["BRANCH_EQ"] * 3, "BRANCH_LEQ", "BRANCH_LT", *["LEAF"] * 3],
        "nodes_values": [0.5, -2.0, 1.0, 0.5, 2.5, 0.0, 0.0, 0.0],
        "nodes_truenodeids": [3, 3, 3, 4, 5, 0, 0, 0],
        "nodes_falsenodeids": [1, 2, 7, 6, 6, 0, 0, 0],
        "target_treeids": [0] * 3,
        "target_nodeids": [5, 6, 7],
        "target_ids": [0] * 3,
        "target_weights": [1.0, 2.0, 4.0],
        "n_targets": 1,
    }
    rows = np.array([[a, b, c] for a in (0.5, -2.0, 1.0, 7.0) for b in (0.0, 1.0) for c in (2.0, 3.0)], np.float32)
    proto = classical_model("TreeEnsembleRegressor", [rows], given)
    (got,) = fusec.compile(proto, target="cpu").run(None, {"x0": rows})
    wanted = [4.0 if a == 7 else 1.0 if b <= 0.5 and c < 2.5 else 2.0 for a, b, c in rows]
    assert_close(got, np.array(wanted)[:, None], 1e-6)


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
        ("LabelEncoder", {"keys_strings": ["a"], "values_int64s": [1]}, "its keys are object, but it takes f32[4,3]"),
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
        ("nodes_modes", "OTHER", "nodes of unknown modes: OTHER"),
        ("target_weights", None, "0 weights for"),
    ],
)
def test_faulty_trees_are_refused(name: str, number: int | str | None, words: str, rng: np.random.Generator) -> None:
    given: dict[str, Any] = {**forest(rng, "target", [0]), "n_targets": 1}
    if number is None:
        del given[name]
    else:
        given[name][0] = number
    with pytest.raises(ModelError, match="node 'n'") as caught:
        load(classical_model("TreeEnsembleRegressor", [X], given))
    assert words in str(caught.value)


@pytest.mark.parametrize(("classes", "given"), [(2, PAIR), (3, MACHINE)])
def test_an_svm_joins_probabilities_of_pairs(classes: int, given: dict[str, Any]) -> None:
    """They minimise the sum of (p_i r_ji - p_j r_ij)^2. onnxruntime stops at an error of 0.005 / classes."""
    slopes, offsets = [-2.0, -1.0, 0.5][: len(given["rho"])], [0.1, -0.2, 0.3][: len(given["rho"])]
    proto = classical_model("SVMClassifier", [X], {**given, "prob_a": slopes, "prob_b": offsets})
    label, got = fusec.compile(proto, target="cpu").run(None, {"x0": X})
    wanted_label, close = run(proto, {"x0": X})
    scores = run(classical_model("SVMClassifier", [X], given), {"x0": X})[1].astype(np.float64)
    first = 1 / (1 + np.exp(scores[:, -len(slopes) :] * slopes + offsets))
    wanted = [_joined(row, classes) for row in first]
    assert (label == wanted_label).all()
    assert_close(got, np.array(wanted), 1e-6)
    assert_close(got, close, 5e-3)


def test_an_svm_joins_probabilities_that_agree() -> None:
    """All pairs are even, so all probabilities are, and p' Q p is 0 there."""
    even = {"prob_a": [0.0] * 3, "prob_b": [0.0] * 3}
    proto = classical_model("SVMClassifier", [X], {**MACHINE, **even})
    _, got = fusec.compile(proto, target="cpu").run(None, {"x0": X})
    assert_close(got, np.full((4, 3), 1 / 3), 1e-6)


def _joined(first: np.ndarray, classes: int) -> np.ndarray:
    """Solve for the probabilities of one row in f64. first: probability of the first class of each pair."""
    beats = np.zeros((classes, classes))
    beats[np.triu_indices(classes, 1)] = first
    beats += np.tril(1 - beats.T, -1)
    matrix = np.diag((beats**2).sum(0)) - beats * beats.T
    solved = np.linalg.solve(matrix + 1, np.ones(classes))  # with a sum of 1, the 1 does not move the minimum
    return solved / solved.sum()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vectors_per_class": [2, 2]}, "vectors of 2 classes for 3 labels"),
        ({"rho": [0.1]}, "1 offsets for 3 pairs"),
        ({"coefficients": [0.5]}, "1 coefficients for 4 support vectors of 3 classes"),
        ({"support_vectors": [0.5]}, "1 numbers for 4 support vectors of 3 features"),
        ({"prob_a": [0.5], "prob_b": [0.5]}, "1 slopes for 3 pairs"),
        ({"kernel_type": "OTHER"}, "kernel_type 'OTHER' is not known"),
        ({**PAIR, "post_transform": "LOGISTIC"}, "post_transform 'LOGISTIC' of two classes"),
    ],
)
def test_faulty_machines_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match="node 'n'") as caught:
        load(classical_model("SVMClassifier", [X], {**MACHINE, **changes}))
    assert words in str(caught.value)


@pytest.mark.parametrize("shapes", [{}, {"x0": ("n", 3)}], ids=["known", "dynamic"])
@pytest.mark.parametrize("labels", [{"classlabels_int64s": [0, 1]}, {"classlabels_strings": ["no", "yes"]}])
def test_maps_of_a_classifier_stay_one_tensor(labels: dict[str, Any], shapes: dict[str, Any]) -> None:
    proto = _with_maps(labels)
    if shapes:
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    names = ", ".join(map(str, *labels.values()))
    with pytest.warns(UserWarning, match=f"node 'zip': the scores are one tensor .* classes {names}"):
        exe = fusec.compile(proto, target="cpu", shapes={"n": "4..8"} if shapes else None)
    label, scores = exe.run(None, {"x0": X})
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    results: Any = session.run(None, {"x0": X})
    wanted_label, maps = results
    assert (label == wanted_label).all()
    assert_close(scores, np.array([list(row.values()) for row in maps], np.float32), 1e-6)


def _with_maps(labels: dict[str, Any]) -> onnx.ModelProto:
    proto = classical_model("LinearClassifier", [X], {**LINE, "classlabels_ints": [0, 1]})
    proto.graph.node.append(helper.make_node("ZipMap", ["y1"], ["z"], name="zip", domain="ai.onnx.ml", **labels))
    key = TensorProto.STRING if "classlabels_strings" in labels else TensorProto.INT64
    maps = helper.make_map_type_proto(key, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    proto.graph.output[1].name = "z"
    proto.graph.output[1].type.CopyFrom(helper.make_sequence_type_proto(maps))
    return proto


def test_maps_of_another_number_of_classes_are_refused() -> None:
    with pytest.raises(ModelError, match=r"node 'zip'.*3 labels for f32"):
        load(_with_maps({"classlabels_int64s": [0, 1, 2]}))
