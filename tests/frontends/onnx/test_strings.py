"""Compare ops of strings with onnxruntime, each compiled without a GPU, and check what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from frontends.onnx.models import info, model
from onnx import TensorProto, helper, numpy_helper

import fusec
from fusec.errors import ExecutionError, ModelError
from fusec.frontends import load
from fusec.segments.executable import SegmentedExecutable


def words(*items: Any) -> np.ndarray:
    return np.array(items, object)


WORDS = words("abc", "", "Über", "a b  c", "日本", "x,y,,z")
FULL = words("abc", "a b  c", "日本", "x,y,,z")  # onnxruntime splits an empty string into no part, onnx into one
PAIR = np.array([["red", "blue"], ["green", "red"]], object)
NUMBERS = np.array([[3, 1], [7, 3]], np.int64)
FLOATS = np.array([0.5, np.nan, -2.0, 1e10, np.inf, -np.inf, 123456789.0], np.float32)
KEYS = {"keys_strings": ["red", "blue", "pink"]}
GRAMS = {
    "max_gram_length": 2, "min_gram_length": 1, "max_skip_count": 1, "mode": "TF", "ngram_counts": [0, 2],
    "ngram_indexes": [0, 2, 1], "pool_strings": ["red", "blue", "red", "green"],
}  # fmt: skip
CASES: dict[str, tuple[str, Sequence[np.ndarray], dict[str, Any]]] = {
    "concat": ("StringConcat", [WORDS, WORDS[::-1].copy()], {}),
    "concat of a column and a row": ("StringConcat", [PAIR[:, :1], PAIR[0]], {}),
    "concat of scalars": ("StringConcat", [np.array("a", object), np.array("b", object)], {}),
    "split": ("StringSplit", [WORDS], {}),
    "split at commas": ("StringSplit", [FULL.reshape(2, 2)], {"delimiter": ","}),
    "split once": ("StringSplit", [FULL], {"delimiter": " ", "maxsplit": 1}),
    "split of nothing": ("StringSplit", [np.empty((2, 0), object)], {"delimiter": " "}),
    "normalise": ("StringNormalizer", [WORDS], {"case_change_action": "UPPER", "locale": "C"}),
    "normalise a row": ("StringNormalizer", [WORDS[None]], {"stopwords": ["ABC", "abc"], "is_case_sensitive": 1}),
    "normalise to nothing": ("StringNormalizer", [PAIR[:1]], {"stopwords": ["Red", "BLUE"], "locale": "C"}),
    "match": ("RegexFullMatch", [WORDS], {"pattern": r"\w+"}),
    "match choices": ("RegexFullMatch", [WORDS.reshape(3, 2)], {"pattern": "(?:a.*|x.*z|日本)"}),
    "equal": ("Equal", [PAIR, PAIR[0]], {}),
    "where": ("Where", [np.array([[True], [False]]), PAIR, PAIR[1]], {}),
    "transpose": ("Transpose", [PAIR], {}),
    "concat of tensors": ("Concat", [PAIR, PAIR], {"axis": 1}),
    "gather": ("Gather", [PAIR, np.array([1, 0, -1])], {"axis": 1}),
    "flatten": ("Flatten", [PAIR], {"axis": 0}),
    "unique": ("Unique", [words("b", "a", "b")], {}),
    "size": ("Size", [PAIR], {}),
    "identity": ("Identity", [PAIR], {}),
    "numbers of strings": ("Cast", [words("1.5", "-2e3", "nan", "INF", "-inf")], {"to": TensorProto.FLOAT}),
    "integers of strings": ("Cast", [words("15", "-2")], {"to": TensorProto.INT64}),
    "strings of floats": ("Cast", [FLOATS], {"to": TensorProto.STRING}),
    "strings of integers": ("Cast", [NUMBERS], {"to": TensorProto.STRING}),
    "n-grams": ("TfIdfVectorizer", [PAIR], GRAMS),
    "one hot": ("ai.onnx.ml.OneHotEncoder", [PAIR], {"cats_strings": ["blue", "red"], "zeros": 1}),
    "to integers": ("ai.onnx.ml.LabelEncoder", [PAIR], {**KEYS, "values_int64s": [1, 2, 3], "default_int64": 9}),
    "to floats": ("ai.onnx.ml.LabelEncoder", [PAIR], {**KEYS, "values_floats": [0.5, 1.5, 2.5]}),
    "to strings": ("ai.onnx.ml.LabelEncoder", [PAIR], {**KEYS, "values_strings": ["r", "b", "R"]}),
    "of integers": ("ai.onnx.ml.LabelEncoder", [NUMBERS], {"keys_int64s": [3, 7], "values_strings": ["x", "y"]}),
    "of floats": (
        "ai.onnx.ml.LabelEncoder",
        [FLOATS],
        {"keys_floats": [0.5, float("nan")], "values_strings": ["half", "none"], "default_string": "?"},
    ),
    "of NaN to integers": ("ai.onnx.ml.LabelEncoder", [FLOATS], {"keys_floats": [float("nan")], "values_int64s": [4]}),
    "categories": ("ai.onnx.ml.CategoryMapper", [PAIR], {"cats_int64s": [4, 5], "cats_strings": ["red", "green"]}),
    "names of categories": (
        "ai.onnx.ml.CategoryMapper",
        [NUMBERS],
        {"cats_int64s": [3, 5], "cats_strings": ["red", "green"], "default_string": "none"},
    ),
}  # fmt: skip
OUTPUTS = {"StringSplit": 2, "Unique": 4}


def proto_of(op: str, arrays: Sequence[np.ndarray], attributes: Mapping[str, Any]) -> onnx.ModelProto:
    domain, _, name = op.rpartition(".")
    names, results = [f"x{i}" for i in range(len(arrays))], [f"y{i}" for i in range(OUTPUTS.get(op, 1))]
    node = helper.make_node(name, names, results, name="n", domain=domain, **attributes)
    inputs = [info(n, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for n, a in zip(names, arrays, strict=True)]
    proto = model([node], inputs, results, opset=21)
    proto.opset_import.add(domain="ai.onnx.ml", version=4)
    return proto


def run(proto: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[Any]:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


def check_equal(got: Any, want: Any) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype == object:
        assert got.tolist() == want.tolist()
    else:
        np.testing.assert_allclose(got, want, 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_as_onnxruntime(name: str) -> None:
    op, arrays, attributes = CASES[name]
    proto = proto_of(op, arrays, attributes)
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    executable = fusec.compile(proto, target="cpu")
    for got, want in zip(executable.run(None, feeds), run(proto, feeds), strict=True):
        check_equal(got, want)


@pytest.mark.parametrize("name", ["concat", "split", "to integers", "numbers of strings", "n-grams"])
def test_constants_are_computed_when_the_model_is_read(name: str) -> None:
    op, arrays, attributes = CASES[name]
    proto = proto_of(op, arrays, attributes)
    feeds = {f"x{i}": a for i, a in enumerate(arrays)}
    executable = fusec.compile(proto, target="cpu", constants=feeds)
    assert not executable.inputs
    for got, want in zip(executable.run(None, {}), run(proto, feeds), strict=True):
        check_equal(got, want)


@pytest.mark.parametrize("op", ["LinearClassifier", "SVMClassifier", "TreeEnsembleClassifier"])
def test_classes_may_be_strings(op: str, rng: np.random.Generator) -> None:
    """The device computes the class's number and the scores; the host alone looks the name up."""
    x = rng.standard_normal((5, 2)).astype(np.float32)
    common: dict[str, Any] = {"classlabels_strings": ["cat", "dog", "rat"]}
    own: dict[str, dict[str, Any]] = {
        "LinearClassifier": {"coefficients": [0.5, -1.0, -0.5, 1.0, 0.25, 0.0], "intercepts": [0.1, -0.1, 0.2]},
        "SVMClassifier": {
            "coefficients": [1.0, 0.5, -1.0, -0.5, 0.25, 2.0], "rho": [0.1, 0.2, -0.1], "kernel_type": "RBF",
            "support_vectors": [0.1, 0.2, 1.0, -1.0, -0.5, 0.5], "vectors_per_class": [1, 1, 1],
            "kernel_params": [0.5, 0.0, 2.0],
        },
        "TreeEnsembleClassifier": {
            "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [1, 0, 0],
            "nodes_values": [0.1, 0.0, 0.0], "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
            "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], "class_treeids": [0, 0],
            "class_nodeids": [1, 2], "class_ids": [0, 1], "class_weights": [1.0, 1.0],
        },
    }  # fmt: skip
    node = helper.make_node(op, ["x0"], ["label", "scores"], name="n", domain="ai.onnx.ml", **common, **own[op])
    proto = model([node], [info("x0", x.shape)], ["label", "scores"], opset=17)
    proto.opset_import.add(domain="ai.onnx.ml", version=3)
    executable = fusec.compile(proto, target="cpu")
    for got, want in zip(executable.run(None, {"x0": x}), run(proto, {"x0": x}), strict=True):
        check_equal(got, want)
    assert isinstance(executable, SegmentedExecutable)
    first, last = executable.explain().segments
    assert [step.op for step in first.steps] == ["ai.onnx.ml::LabelEncoder"]
    assert first.ops > 0
    assert last.ops == 0


def test_a_classifier_in_a_body_has_no_strings_as_classes() -> None:
    attributes: dict[str, Any] = {"coefficients": [0.5, -1.0], "classlabels_strings": ["cat", "dog"]}
    node = helper.make_node("LinearClassifier", ["x"], ["l", "s"], domain="ai.onnx.ml", **attributes)
    branch = helper.make_graph([node], "b", [], [info("s", None)])
    other = helper.make_graph([helper.make_node("Identity", ["x"], ["o"])], "o", [], [info("o", None)])
    choice = helper.make_node("If", ["c"], ["y"], name="n", then_branch=branch, else_branch=other)
    proto = model([choice], [info("x", [3, 1])], ["y"], {"c": np.array(True)}, opset=17)
    proto.opset_import.add(domain="ai.onnx.ml", version=3)
    with pytest.raises(ModelError, match="labels are strings in the body of another node"):
        fusec.compile(proto, target="cpu")


def test_of_equal_keys_the_last_one_counts() -> None:
    """The standard says so; onnxruntime takes the first."""
    attributes = {"keys_strings": ["red", "blue", "red"], "values_strings": ["r", "b", "R"]}
    got = fusec.compile(proto_of("ai.onnx.ml.LabelEncoder", [PAIR], attributes), target="cpu")(PAIR)
    assert got.tolist() == [["R", "b"], ["_Unused", "R"]]


def test_doubles_are_written_with_all_their_digits(rng: np.random.Generator) -> None:
    x = np.concatenate([rng.standard_normal(20) * 10.0 ** rng.integers(-300, 300, 20), [0.1, 1e16]])
    to_text = fusec.compile(proto_of("Cast", [x], {"to": TensorProto.STRING}), target="cpu")(x)
    assert [float(text) for text in to_text] == x.tolist()
    assert to_text[-2:].tolist() == ["0.1", "1e+16"]


def test_an_empty_string_has_one_part() -> None:
    parts, counts = fusec.compile(proto_of("StringSplit", [WORDS], {"delimiter": ","}), target="cpu")(WORDS)
    assert counts.tolist() == [1, 1, 1, 1, 1, 4]
    assert parts[5].tolist() == ["x", "y", "", "z"]


def test_strings_pass_from_step_to_step() -> None:
    nodes = [
        helper.make_node("StringNormalizer", ["x"], ["lower"], case_change_action="LOWER"),
        helper.make_node("StringConcat", ["lower", "end"], ["joined"]),
        helper.make_node("Reshape", ["joined", "shape"], ["rows"]),
        helper.make_node("Equal", ["rows", "wanted"], ["same"]),
        helper.make_node("Cast", ["same"], ["y"], to=TensorProto.FLOAT),
    ]
    constants = {"shape": np.array([2, 2]), "end": words("!"), "wanted": words("a!", "d!")}
    proto = model(nodes, [info("x", ["n"], TensorProto.STRING)], ["rows", "y"], constants)
    executable = fusec.compile(proto, target="cpu", shapes={"x": (4,)})
    assert "x string[4]" in repr(executable)
    for given in (["A", "b", "C", "D"], ["q", "d", "A", "e"]):
        rows, y = executable.run(None, {"x": given})
        assert rows.tolist() == [[f"{t.lower()}!" for t in given[:2]], [f"{t.lower()}!" for t in given[2:]]]
        assert y.tolist() == (rows == words("a!", "d!")).astype(np.float32).tolist()


def test_constants_of_a_node() -> None:
    nodes = [
        helper.make_node("Constant", [], ["a"], value_string="é"),
        helper.make_node("Constant", [], ["b"], value_strings=["1", "2"]),
        helper.make_node("StringConcat", ["a", "b"], ["y"]),
    ]
    assert fusec.compile(model(nodes, [], ["y"]), target="cpu")().tolist() == ["é1", "é2"]


def test_a_model_that_only_passes_strings_on() -> None:
    proto = model([], [info("x", [2], TensorProto.STRING)], [info("x", [2], TensorProto.STRING)])
    executable = fusec.compile(proto, target="cpu")
    given = words("a", "b")
    got = executable(given)
    given[0] = "changed"
    assert got.tolist() == ["a", "b"]
    with pytest.raises(ModelError, match="has strings, which only the host has"):
        fusec.compile(proto, target="cpu", state={"x": "x"})


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (np.zeros(2, np.float32), "input %x takes strings, not float32"),
        (words("a", 2.5), "input %x takes strings, but an element is of type float"),
        (np.array([b"a", b"b"]), "input %x takes strings, not"),
        (words("a"), r"input %x has shape \[2\], the array \[1\]"),
    ],
)
def test_other_elements_are_refused_by_a_call(given: np.ndarray, what: str) -> None:
    proto = model([helper.make_node("StringConcat", ["x", "x"], ["y"])], [info("x", [2], TensorProto.STRING)], ["y"])
    executable = fusec.compile(proto, target="cpu")
    with pytest.raises(ExecutionError, match=what):
        executable(given)
    assert executable(np.array(["a", "é"])).tolist() == ["aa", "éé"]  # NumPy's own text


@pytest.mark.parametrize(
    ("op", "arrays", "attributes", "what"),
    [
        ("Add", [PAIR, PAIR], {}, "add takes numbers, not strings"),
        ("StringConcat", [PAIR, NUMBERS], {}, r"takes strings, not i64\[2,2\]"),
        ("Equal", [PAIR, NUMBERS], {}, r"takes strings, not i64\[2,2\]"),
        ("StringNormalizer", [PAIR], {}, "takes a list of strings, or one row of them"),
        ("StringNormalizer", [WORDS], {"case_change_action": "TITLE"}, "case_change_action 'TITLE' is not known"),
        ("RegexFullMatch", [WORDS], {"pattern": "("}, r"pattern '\(': missing \)"),
        ("RegexFullMatch", [WORDS], {"pattern": "[[:alpha:]]"}, "named classes are not supported"),
        ("TfIdfVectorizer", [PAIR], {**GRAMS, "pool_int64s": [1]}, "a pool of integers and one of strings"),
        ("TfIdfVectorizer", [NUMBERS], GRAMS, r"takes strings, not i64"),
        ("ai.onnx.ml.OneHotEncoder", [NUMBERS], {"cats_strings": ["a"]}, "takes strings, not i64"),
        ("ai.onnx.ml.LabelEncoder", [NUMBERS], {**KEYS, "values_int64s": [1, 2, 3]}, "its keys are object, but it"),
        ("ai.onnx.ml.LabelEncoder", [PAIR], {**KEYS, "values_int64s": [1]}, "3 keys and 1 values"),
    ],
)
def test_what_is_refused(op: str, arrays: Sequence[np.ndarray], attributes: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelError, match=what) as caught:
        fusec.compile(proto_of(op, arrays, attributes), target="cpu")
    assert "node 'n'" in str(caught.value)


def test_a_string_that_is_no_number_fails_the_call() -> None:
    proto = proto_of("Cast", [WORDS], {"to": TensorProto.INT32})
    executable = fusec.compile(proto, target="cpu")
    with pytest.raises(ExecutionError, match=r"node 'n' \(Cast\): a string is no number of type i32"):
        executable(WORDS)


def test_version_1_of_label_encoder() -> None:
    cases: list[tuple[np.ndarray, dict[str, Any]]] = [
        (words("a", "c", "z"), {"default_int64": -5}),
        (np.array([0, 1, 7]), {"default_string": "?"}),
    ]
    for x, default in cases:
        node = helper.make_node(
            "LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml", classes_strings=["a", "b", "c"], **default
        )
        proto = model([node], [info("x", x.shape, helper.np_dtype_to_tensor_dtype(x.dtype))], ["y"], opset=17)
        proto.opset_import.add(domain="ai.onnx.ml", version=1)
        check_equal(fusec.compile(proto, target="cpu")(x), run(proto, {"x": x})[0])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda t: t.string_data.append(b"more"), "takes 2 elements, its data has 3"),
        (lambda t: t.string_data.__setitem__(0, b"\xff"), "a string is not UTF-8"),
        (lambda t: setattr(t, "raw_data", b"ab"), "holds its elements twice"),
    ],
)
def test_faulty_constants_are_refused(change: Any, what: str) -> None:
    tensor = numpy_helper.from_array(words("a", "b"), "c")
    change(tensor)
    proto = model([helper.make_node("StringConcat", ["x", "c"], ["y"])], [info("x", [2], TensorProto.STRING)], ["y"])
    proto.graph.initializer.append(tensor)
    with pytest.raises(ModelError, match=what):
        fusec.compile(proto, target="cpu")


def test_one_graph_has_no_strings() -> None:
    proto = proto_of("StringConcat", [WORDS, WORDS], {})
    with pytest.raises(ModelError, match="the strings must be known at import"):
        load(proto)
    with pytest.raises(ModelError, match="has strings, which only the host has"):
        fusec.compile(load(proto_of("Identity", [WORDS], {})), target="cpu")


def test_a_loop_carries_no_strings() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["c"], ["c2"]),
            helper.make_node("StringConcat", ["s", "s"], ["s2"]),
        ],
        "body",
        [info("i", [], TensorProto.INT64), info("c", [], TensorProto.BOOL), info("s", [2], TensorProto.STRING)],
        [info("c2", [], TensorProto.BOOL), info("s2", [2], TensorProto.STRING)],
    )
    proto = model(
        [helper.make_node("Loop", ["m", "", "x"], ["y"], name="n", body=body)],
        [info("m", [], TensorProto.INT64), info("x", [2], TensorProto.STRING)],
        ["y"],
    )
    with pytest.raises(ModelError, match="carries strings, which its body cannot"):
        fusec.compile(proto, target="cpu")
    known = fusec.compile(proto, target="cpu", constants={"m": 2})  # unrolled
    assert known(words("a", "bc")).tolist() == ["aaaa", "bcbcbcbc"]


def test_a_custom_op_reads_and_gives_strings() -> None:
    node = helper.make_node("Tokens", ["x"], ["ids", "words"], name="n", domain="my.text")
    proto = model([node], [info("x", [1], TensorProto.STRING)], ["ids", "words"])
    proto.opset_import.add(domain="my.text", version=1)

    def tokens(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = x[0].split()
        return np.array([len(word) for word in found]), np.array(found)

    executable = fusec.compile(proto, target="cpu", custom_ops={"my.text::Tokens": tokens})
    ids, found = executable.run(None, {"x": ["one two  three"]})
    assert ids.tolist() == [3, 3, 5]
    assert found.tolist() == ["one", "two", "three"]
    on_device = fusec.CustomOp(tokens, on_device=True)
    with pytest.raises(ModelError, match="takes strings, which the device has not"):
        fusec.compile(proto, target="cpu", custom_ops={"my.text::Tokens": on_device})
