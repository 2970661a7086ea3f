"""Compare TreeEnsemble of version 5 with onnxruntime and with a walk by its text, each compiled without a GPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from helpers import assert_close
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import fusec
from fusec.errors import ManyLaunchesWarning, ModelError
from fusec.frontends import load
from fusec.frontends.onnx.classical.tree_ensemble import MEMBER, TRANSFORMS
from fusec.ops.pointwise import CLASSES

FEATURES = 3
NUMBERS = (-2.0, -0.75, -0.25, 0.5, 1.25, 3.0)  # features and limits meet often; f16 holds them
COMPARED = ("cmp_le", "cmp_lt", "cmp_ge", "cmp_gt", "cmp_eq", "cmp_neq")
Given = dict[str, Any]


def features(rng: np.random.Generator, dtype: Any, holes: bool) -> np.ndarray:
    x = rng.choice([*NUMBERS, 0.0, 7.0], (40, FEATURES)).astype(dtype)
    x[rng.random(x.shape) < (0.2 if holes else 0.0)] = np.nan
    return x


def grown(
    rng: np.random.Generator, modes: Sequence[int], dtype: Any = np.float32, targets: int = 1, most: int = 4
) -> Given:
    """Make three random trees of several depths. Sets have 1 to `most` members, in no order."""
    nodes: list[list[Any]] = []  # feature, mode, split, true, true is a leaf, false, false is a leaf
    leaves: list[tuple[int, float]] = []
    sets: dict[int, list[float]] = {}

    def leaf() -> int:
        leaves.append((int(rng.integers(targets)), float(rng.integers(1, 64)) / 32))
        return len(leaves) - 1

    def grow(depth: int) -> int:
        row, mode = len(nodes), int(rng.choice(modes))
        nodes.append([int(rng.integers(FEATURES)), mode, float(rng.choice(NUMBERS)), 0, 0, 0, 0])
        if mode == MEMBER:
            count = int(rng.integers(1, most + 1))
            sets[row] = [float(n) for n in rng.choice(NUMBERS if most < 9 else np.arange(-64, 64) / 16, count)]
        for place in (3, 5):
            ends = depth == 1 or rng.random() < 0.2
            nodes[row][place : place + 2] = [leaf() if ends else grow(depth - 1), int(ends)]
        return row

    roots = [grow(depth) for depth in (4, 1, 3)]
    columns = [list(column) for column in zip(*nodes, strict=True)]
    given: Given = dict(
        zip(
            ("featureids", "modes", "splits", "truenodeids", "trueleafs", "falsenodeids", "falseleafs"),
            columns,
            strict=True,
        )
    )
    given = {f"nodes_{name}": column for name, column in given.items()}
    given["nodes_modes"] = np.array(given["nodes_modes"], np.uint8)
    given["nodes_splits"] = np.array(given["nodes_splits"], dtype)
    if sets:
        given["membership_values"] = np.array([n for row in sorted(sets) for n in (*sets[row], np.nan)], dtype)
    return given | {
        "tree_roots": roots,
        "leaf_targetids": [target for target, _ in leaves],
        "leaf_weights": np.array([weight for _, weight in leaves], dtype),
        "n_targets": targets,
    }


def tree_model(given: Given, x: np.ndarray) -> onnx.ModelProto:
    attributes: Given = {
        name: numpy_helper.from_array(value, name) if isinstance(value, np.ndarray) else value
        for name, value in given.items()
    }
    node = helper.make_node("TreeEnsemble", ["x"], ["y"], name="n", domain="ai.onnx.ml", **attributes)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    proto = model([node], [info("x", x.shape, kind)], [info("y", [len(x), given["n_targets"]], kind)], opset=20)
    proto.opset_import.add(domain="ai.onnx.ml", version=5)
    return proto


def walked(given: Given, x: np.ndarray) -> np.ndarray:
    """Sum the weights of the leaves that each row reaches, one comparison at a time."""
    ends = np.flatnonzero(np.isnan(given.get("membership_values", np.zeros(0))))
    sets = dict(
        zip(
            np.flatnonzero(given["nodes_modes"] == MEMBER).tolist(),
            np.split(given.get("membership_values", np.zeros(0)), ends + 1),
            strict=False,
        )
    )
    tracks = given.get("nodes_missing_value_tracks_true") or [0] * len(given["nodes_modes"])
    total = np.zeros((len(x), given["n_targets"]))
    for row, numbers in enumerate(x):
        for root in given["tree_roots"]:
            at, is_leaf = root, 0
            while not is_leaf:
                number, mode = numbers[given["nodes_featureids"][at]], given["nodes_modes"][at]
                if mode == MEMBER:
                    true = number in sets[at]
                else:
                    (true,) = CLASSES[COMPARED[mode]]().reference(np, number, given["nodes_splits"][at])
                side = "true" if true or (np.isnan(number) and tracks[at]) else "false"
                at, is_leaf = given[f"nodes_{side}nodeids"][at], given[f"nodes_{side}leafs"][at]
            total[row, given["leaf_targetids"][at]] += given["leaf_weights"][at]
    return total


def evaluated(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    """Return what onnx's reference evaluator gives."""
    results: Any = ReferenceEvaluator(proto).run(None, {"x": x})
    return results[0]


@pytest.fixture(autouse=True)
def no_hint_of_launches() -> Iterator[None]:
    """A level takes several launches, which is many for the small features of these tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ManyLaunchesWarning)
        yield


def compiled(given: Given, x: np.ndarray, precision: Any = "fp32") -> np.ndarray:
    (got,) = fusec.compile(tree_model(given, x), target="cpu", precision=precision).run(None, {"x": x})
    assert got.dtype == x.dtype
    return got


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "with NaN"])
@pytest.mark.parametrize("modes", [[mode] for mode in range(MEMBER + 1)] + [[*range(MEMBER + 1)]], ids=str)
def test_trees_of_each_comparison(modes: list[int], holes: bool, dtype: Any, rng: np.random.Generator) -> None:
    given, x = grown(rng, modes, dtype, targets=2), features(rng, dtype, holes)
    if holes:
        given["nodes_missing_value_tracks_true"] = rng.integers(0, 2, len(given["nodes_modes"])).tolist()
    got, proto = compiled(given, x), tree_model(given, x)
    assert_close(got, walked(given, x), 1e-6)
    assert_close(got, evaluated(proto, x), 1e-6)
    if MEMBER not in modes:  # onnxruntime has sets of integers only
        assert_close(got, run(proto, {"x": x})[0], 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_half_precision(precision: str, rng: np.random.Generator) -> None:
    """All numbers are exact in fp16, so comparisons are."""
    given = grown(rng, range(MEMBER + 1), np.float16 if precision == "fp32" else np.float32, targets=2)
    x = features(rng, given["nodes_splits"].dtype, holes=True)
    assert_close(compiled(given, x, precision), walked(given, x), 1e-3)


def test_large_sets_are_searched(rng: np.random.Generator) -> None:
    """Sets of up to 100 members, with 0 and duplicates among them; a few levels find one."""
    given = grown(rng, [MEMBER], most=100)
    x = rng.choice(np.arange(-70, 70) / 16, (60, FEATURES)).astype(np.float32)
    assert_close(compiled(given, x), walked(given, x), 1e-6)
    levels = sum(node.op.name == "cmp_le" for node in load(tree_model(given, x)).nodes)
    assert levels <= 4 * 8  # four nodes, each with 2^7 members at most, and the last comparison


def test_an_empty_set_has_no_members(rng: np.random.Generator) -> None:
    given, x = grown(rng, [MEMBER]), features(rng, np.float32, holes=True)
    given["membership_values"] = np.full(len(given["nodes_modes"]), np.nan, np.float32)
    assert_close(compiled(given, x), walked(given, x), 1e-6)


def test_the_last_set_may_lack_its_end(rng: np.random.Generator) -> None:
    given, x = grown(rng, [MEMBER]), features(rng, np.float32, holes=False)
    wanted = walked(given, x)
    given["membership_values"] = given["membership_values"][:-1]
    assert_close(compiled(given, x), wanted, 1e-6)


def test_zero_is_no_end_of_a_set(rng: np.random.Generator) -> None:
    given, x = grown(rng, [0, MEMBER]), features(rng, np.float32, holes=False)
    members = given["membership_values"]
    members[::2] = np.where(np.isnan(members[::2]), np.nan, 0)
    assert_close(compiled(given, x), walked(given, x), 1e-6)


@pytest.mark.parametrize(("number", "targets"), [(0, 3), (1, 3), (2, 1), (3, 1)])
def test_each_aggregate(number: int, targets: int, rng: np.random.Generator) -> None:
    given, x = grown(rng, [0, 3], targets=targets), features(rng, np.float32, holes=False)
    given["aggregate_function"] = number
    proto = tree_model(given, x)
    wanted = evaluated(proto, x)
    assert_close(compiled(given, x), wanted, 1e-6)
    assert_close(wanted, run(proto, {"x": x})[0], 1e-6)


@pytest.mark.parametrize("transform", ["SOFTMAX", "LOGISTIC"])
def test_each_transform(transform: str, rng: np.random.Generator) -> None:
    """As ONNX numbers them; onnxruntime 1.23 exchanges these two."""
    given, x = grown(rng, [1], targets=3), features(rng, np.float32, holes=False)
    scores = walked(given, x)
    powers = np.exp(scores)
    wanted = powers / powers.sum(1, keepdims=True) if transform == "SOFTMAX" else 1 / (1 + np.exp(-scores))
    given["post_transform"] = TRANSFORMS.index(transform)
    assert_close(compiled(given, x), wanted, 1e-6)


def test_several_nodes_may_lead_to_one(rng: np.random.Generator) -> None:
    """A chain of comparisons leads to one subtree from each of its levels: the way down by the last is the longest."""
    given: Given = {
        "nodes_featureids": [0, 0, 0, 1, 2],
        "nodes_modes": np.array([4, 4, 4, 0, 1], np.uint8),
        "nodes_splits": np.array([0.5, 1.25, 3.0, -0.25, 0.5], np.float32),
        "nodes_truenodeids": [3, 3, 3, 4, 1],
        "nodes_trueleafs": [0, 0, 0, 0, 1],
        "nodes_falsenodeids": [1, 2, 0, 1, 2],
        "nodes_falseleafs": [0, 0, 1, 1, 1],
        "tree_roots": [0],
        "leaf_targetids": [0, 0, 0],
        "leaf_weights": np.array([1.0, 2.0, 4.0], np.float32),
        "n_targets": 1,
    }
    x = features(rng, np.float32, holes=False)
    wanted = walked(given, x)
    assert len(np.unique(wanted)) == 3
    assert_close(compiled(given, x), wanted, 1e-6)


def test_a_tree_may_be_one_leaf(rng: np.random.Generator) -> None:
    given, x = grown(rng, [5]), features(rng, np.float32, holes=True)
    given["tree_roots"] = [given["tree_roots"][1]]
    for side in ("true", "false"):
        given[f"nodes_{side}nodeids"][given["tree_roots"][0]] = 1
    assert_close(compiled(given, x), np.full((len(x), 1), given["leaf_weights"][1]), 1e-6)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("nodes_truenodeids", 99, "a node leads to a "),
        ("nodes_falsenodeids", -1, "a node leads to a "),
        ("nodes_featureids", 3, "reads 4 features of f32[40,3]"),
        ("nodes_featureids", [0], "differ in length"),
        ("nodes_modes", 7, "nodes of unknown modes: [7]"),
        ("leaf_targetids", 1, "leaves of targets up to 1 of 1"),
        ("leaf_targetids", [0], "leaf_targetids, leaf_weights differ in length"),
        ("tree_roots", 99, "a root that is none of the"),
        ("tree_roots", None, "needs an attribute 'tree_roots'"),
        ("nodes_missing_value_tracks_true", [1], "nodes_missing_value_tracks_true has 1 entries"),
        ("membership_values", np.array([1, np.nan, 2, np.nan], np.float32), "membership_values has 2 sets for 0 nodes"),
        ("n_targets", 0, "leaves of targets up to 0 of 0"),
        ("n_targets", 1 << 40, "takes 1."),
        ("n_targets", 1 << 25, "the table of weights,"),
        ("aggregate_function", 4, "aggregate_function 4 is not known"),
        ("post_transform", -1, "post_transform -1 is not known"),
        ("post_transform", 4, "post_transform 'PROBIT' is not supported"),
    ],
)
def test_faulty_trees_are_refused(name: str, value: Any, words: str, rng: np.random.Generator) -> None:
    given, x = grown(rng, [0]), features(rng, np.float32, holes=False)
    if value is None:
        del given[name]
    elif isinstance(value, int) and isinstance(given.get(name), list | np.ndarray):
        given[name][0] = value
    else:
        given[name] = value
    with pytest.raises(ModelError, match="node 'n'") as caught:
        load(tree_model(given, x))
    assert words in str(caught.value)


@pytest.mark.parametrize(("child", "of"), [(0, 0), (0, 1)], ids=["itself", "its parent"])
def test_circles_are_refused(child: int, of: int) -> None:
    given: Given = {
        "nodes_featureids": [0, 1],
        "nodes_modes": np.zeros(2, np.uint8),
        "nodes_splits": np.zeros(2, np.float32),
        "nodes_truenodeids": [1, 0],
        "nodes_trueleafs": [0, 1],
        "nodes_falsenodeids": [0, 0],
        "nodes_falseleafs": [1, 1],
        "tree_roots": [0],
        "leaf_targetids": [0],
        "leaf_weights": np.ones(1, np.float32),
        "n_targets": 1,
    }
    given["nodes_truenodeids"][of], given["nodes_trueleafs"][of] = child, 0
    with pytest.raises(ModelError, match="a tree has a circle"):
        load(tree_model(given, np.ones((2, FEATURES), np.float32)))


def test_the_least_of_several_targets_is_refused(rng: np.random.Generator) -> None:
    given = {**grown(rng, [0], targets=2), "aggregate_function": 2}
    with pytest.raises(ModelError, match="'MIN' of several targets"):
        load(tree_model(given, features(rng, np.float32, holes=False)))


def test_a_model_of_an_older_version_is_refused(rng: np.random.Generator) -> None:
    proto = tree_model(grown(rng, [0]), features(rng, np.float32, holes=False))
    proto.opset_import[1].version = 4
    with pytest.raises(ModelError, match=r"version 4\).*version 5 of ai.onnx.ml defines it"):
        load(proto)
