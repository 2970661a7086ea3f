"""Test the builder: operators and indices as in NumPy, immediate shapes, errors with the caller's line."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from scipy import special

import fusec
from fusec.builder import Builder, Tensor
from fusec.errors import ModelError, VerifyError
from fusec.ir import DType
from fusec.reference import evaluate

Array = np.ndarray[Any, Any]


def wrong(value: Any) -> Any:
    """Return a value whose type is not taken, without its type."""
    return value


def run(build: Callable[..., Tensor], *arrays: Array) -> Array:
    """Evaluate a function of tensors on arrays."""
    b = Builder()
    y = build(*(b.input(f"x{i}", a.shape, DType.of(a.dtype)) for i, a in enumerate(arrays)))
    b.output(y=y)
    got = evaluate(b.graph(), {f"x{i}": a for i, a in enumerate(arrays)})["y"]
    assert got.shape == y.shape and DType.of(got.dtype) is y.dtype
    return got


SAME: dict[str, Callable[[Any, Any], Any]] = {
    "sums": lambda x, y: 1.0 + x - y + 2,
    "products": lambda x, y: 2.0 * x * y / (abs(x) + 1.0),
    "quotient of a number": lambda x, y: 3.0 / (x * x + 1.0),
    "power": lambda x, y: 2.0**x + abs(y) ** 1.5,
    "negative": lambda x, y: -x % 2.0,
    "product of matrices": lambda x, y: x @ y.T,
    "matrix and vector": lambda x, y: x @ y[0],
    "vector and matrix": lambda x, y: x[0] @ y.T,
    "vectors": lambda x, y: x[0] @ y[1],
    "one element": lambda x, y: x[1, -1],
    "a row in the middle": lambda x, y: x[:, None, 1:],
    "backwards in steps": lambda x, y: x[::-1, ::-2],
    "dots": lambda x, y: x[..., 1] + y[..., 1:2],
    "an empty slice": lambda x, y: x[2:2] + 1.0,
    "reshape with a rest": lambda x, y: x.reshape(-1, 2),
    "transpose": lambda x, y: x.transpose(1, 0),
    "swapped": lambda x, y: x.swapaxes(0, 1),
    "sum": lambda x, y: x.sum(),
    "mean of an axis": lambda x, y: x.mean(-1, keepdims=True) - y,
    "maximum": lambda x, y: x.max(0),
    "minimum over both": lambda x, y: x.min((0, 1)),
    "an array of NumPy": lambda x, y: np.ones((4,), np.float32) * x,
}


@pytest.mark.parametrize("name", SAME)
def test_operators_mean_what_they_mean_in_numpy(name: str, rng: np.random.Generator) -> None:
    x, y = (rng.standard_normal((3, 4)).astype(np.float32) for _ in range(2))
    want = SAME[name](x, y)
    got = run(SAME[name], x, y)
    assert got.shape == np.shape(want)
    if got.size:
        assert_close(got, np.asarray(want), 1e-6)


def test_comparisons_and_logic(rng: np.random.Generator) -> None:
    x, y = (rng.integers(-2, 3, (20,)).astype(np.float32) for _ in range(2))
    got = run(lambda a, b: ((a < b) | ~(a >= 1.0) & (a <= b) ^ (a > b)) & (a.eq(b) | a.ne(0.0)), x, y)
    np.testing.assert_array_equal(got, ((x < y) | ~(x >= 1.0) & (x <= y) ^ (x > y)) & ((x == y) | (x != 0.0)))


def test_integers_have_bitwise_logic() -> None:
    x = np.arange(8, dtype=np.int32)
    np.testing.assert_array_equal(run(lambda a: (a & 3) | (~a ^ 5), x), (x & 3) | (~x ^ 5))


def test_functions(rng: np.random.Generator) -> None:
    x = rng.uniform(0.5, 2.0, (6,)).astype(np.float32)
    for name, function in {
        "exp": np.exp,
        "log": np.log,
        "sqrt": np.sqrt,
        "tanh": np.tanh,
        "sigmoid": special.expit,
    }.items():
        assert_close(run(lambda a, name=name: getattr(a, name)(), x), function(x), 1e-6)
    assert_close(run(lambda a: a.rsqrt() + a.silu() + a.gelu() + a.relu(), x), evaluated(x), 1e-6)
    assert_close(run(lambda a: a.softmax() + a.log_softmax().exp(), x), 2 * special.softmax(x), 1e-6)
    assert_close(run(lambda a: a.clip(0.6, 1.5).maximum(1.0).minimum(1.2), x), np.clip(x, 1.0, 1.2), 1e-6)


def evaluated(x: Array) -> Array:
    return 1 / np.sqrt(x) + x * special.expit(x) + x * special.ndtr(x) + np.maximum(x, 0)


def test_indexing_and_shapes(rng: np.random.Generator) -> None:
    x = rng.standard_normal((4, 6)).astype(np.float32)
    labels = np.array([5, 0, 3])
    assert_close(run(lambda a: a.builder.concat(a.builder.split(a, 3, 1)[::-1], 1), x), x[:, [4, 5, 2, 3, 0, 1]], 0.0)
    assert_close(run(lambda a, i: a.builder.take(a, i, 1), x, labels), x[:, labels], 0.0)
    assert_close(
        run(lambda a: a.builder.pad(a, [0, 1, 0, 2], value=3.0), x), np.pad(x, [(0, 0), (1, 2)], constant_values=3), 0.0
    )
    assert_close(run(lambda i: i.builder.one_hot(i, 6), labels), np.eye(6)[labels], 0.0)
    logits = x[:3]
    got = run(lambda a, i: a.builder.cross_entropy(a, i), logits, labels)
    assert_close(got, -special.log_softmax(logits, -1)[range(3), labels].mean(), 1e-6)


def test_a_flipped_convolution_is_that_of_reversed_filters(rng: np.random.Generator) -> None:
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 4, 9), (6, 2, 3)))
    options: dict[str, Any] = {"stride": 2, "padding": (1, 0), "groups": 2}
    got = run(lambda a, f: a.builder.conv(a, f, **options, flipped=True), x, w)
    plain = run(lambda a, f: a.builder.conv(a, f, **options), x, w)
    assert_close(got, run(lambda a, f: a.builder.conv(a, f, **options), x, w[:, :, ::-1].copy()), 1e-6)
    assert np.abs(got - plain).max() > 0.1


def test_shapes_of_convolutions_and_pools() -> None:
    b = Builder()
    x = b.input("x", (2, 4, 9, 8))
    w = b.constant(np.ones((6, 2, 3, 3), np.float32))
    assert b.conv(x, w, stride=2, padding=1, groups=2).shape == (2, 6, 5, 4)
    assert b.conv(x, w, padding=(1, 0, 1, 2), groups=2).shape == (2, 6, 9, 8)
    assert b.conv(x, w, padding=(1, 0, 1, 2), groups=2, flipped=True).shape == (2, 6, 9, 8)
    assert b.conv_transpose(x, b.constant(np.ones((4, 3, 2, 2), np.float32)), stride=2).shape == (2, 3, 18, 16)
    assert b.max_pool(x, 2).shape == (2, 4, 4, 4)
    assert b.avg_pool(x, 3, stride=1, padding=1).shape == x.shape
    assert b.upsample(x, 2).shape == (2, 4, 18, 16)
    c = b.constant(np.ones(4, np.float32))
    for y in (
        b.batch_norm(x, c, c, c, c),
        b.group_norm(x, c, c, 2),
        b.instance_norm(x, c, c),
        b.batch_norm_train(x, c, c)[0],
    ):
        assert y.shape == x.shape
    row = b.constant(np.ones(8, np.float32))
    assert b.layer_norm(x, row, row).shape == b.rms_norm(x, row).shape == x.shape


def test_batch_statistics(rng: np.random.Generator) -> None:
    x = rng.standard_normal((8, 3, 4)).astype(np.float32)
    one = np.ones(3, np.float32)
    assert_close(run(lambda a, c: a.builder.batch_norm_train(a, c, c)[2], x, one), x.var((0, 2)), 1e-5)


def test_random_numbers_follow_from_the_state() -> None:
    b = Builder()
    state = b.input("state", (2,), "u64")
    b.output(a=b.random_uniform(state, (2000,)), b=b.random_uniform(state, (2000,)))
    graph = b.graph()
    first, again, later = (
        evaluate(graph, {"state": np.array([seed, step], np.uint64)}) for seed, step in ((7, 0), (7, 0), (7, 1))
    )
    np.testing.assert_array_equal(first["a"], again["a"])
    assert not np.array_equal(first["a"], first["b"])
    assert not np.array_equal(first["a"], later["a"])
    assert first["a"].min() >= 0.0 and first["a"].max() < 1.0
    assert abs(first["a"].mean() - 0.5) < 0.03


def test_random_numbers_survive_16_bits() -> None:
    """Bits as a number would overflow fp16."""
    b = Builder()
    b.output(y=b.random_uniform(b.input("state", (2,), "u64"), (4000,)))
    feeds = {"state": np.array([3, 4], np.uint64)}
    (got,) = fusec.compile(b.graph(), target="cpu", precision="fp16").run(None, feeds)
    assert_close(got, evaluate(b.graph(), feeds)["y"], 1e-3)


def test_dropout_keeps_the_mean() -> None:
    x = np.ones((100, 100), np.float32)
    b = Builder()
    state = b.input("state", (2,), "u64")
    b.output(y=b.dropout(b.input("x", x.shape), 0.25, state))
    got = evaluate(b.graph(), {"x": x, "state": np.array([1, 2], np.uint64)})["y"]
    assert set(np.unique(got)) == {0.0, np.float32(1 / 0.75)}
    assert abs(got.mean() - 1.0) < 0.02
    assert b.dropout(b.constant(x), 0.0, state).shape == x.shape


# what is wrong is said where it was written ------------------------------------------------------------------

WRONG: dict[str, tuple[Callable[[Builder, Tensor], Any], str]] = {
    "shapes": (lambda b, x: x + b.input("z", (3,)), r"add\(.*shapes \[2, 4\], \[3\] do not broadcast"),
    "dtypes": (lambda b, x: x + b.input("z", (4,), "i64"), "operands differ in dtype: f32, i64"),
    "an array of another dtype": (lambda b, x: x + np.ones(4), "an array of float64 with .*: convert it to f32 first"),
    "filters": (
        lambda b, x: b.conv(b.input("i", (1, 3, 8, 8)), b.constant(np.ones((4, 2, 3, 3), np.float32))),
        "channels",
    ),
    "an index": (lambda b, x: x[0, 7], "index 7 for a dim of 4"),
    "indices": (lambda b, x: x[0, 0, 0], "3 indices for"),
    "an index that is a tensor": (lambda b, x: x[x], "use Builder.take"),
    "another builder": (lambda b, x: x + Builder().input("x", (4,)), "belongs to another builder"),
    "no tensor": (lambda b, x: b.concat([x, wrong(3.0)]), "float is no tensor of this graph"),
    "an op": (lambda b, x: x.pointwise("relue"), "no pointwise op 'relue'"),
    "two inputs": (lambda b, x: b.input("x", (2,)), "two values are named %x"),
    "two outputs": (lambda b, x: [b.output(y=x), b.output(y=x)], "two outputs are named 'y'"),
    "no outputs": (lambda b, x: b.graph(), "the graph has no outputs"),
    "an axis": (lambda b, x: x.sum(5), r"axes \[5\] for rank 2"),
    "an uneven split": (lambda b, x: b.split(x, 3), "does not split into 3 along axis 0"),
    "a rate": (lambda b, x: b.dropout(x, 1.0, x), "a dropout rate of 1.0"),
    "no parameter": (lambda b, x: b.update(x, x), "is no parameter of this graph"),
    "another type": (lambda b, x: b.update(b.parameter("p", shape=(3,)), x), "cannot become"),
    "no shape": (lambda b, x: b.parameter("p"), "parameter 'p' needs an array or a shape"),
    "no window": (lambda b, x: b.max_pool(x, 2), "has no spatial dims"),
    "scalars": (lambda b, x: x.sum() @ x, "a matrix product of"),
    "rows": (lambda b, x: list(x), "one tensor where several are wanted"),
    "axes": (lambda b, x: x.swapaxes(0, 7), "axes 0 and 7 of"),
    "a step of 0": (lambda b, x: x[::0], "has a step of 0"),
    "a dtype of NumPy": (lambda b, x: x.astype("float16"), "'float16' is no dtype; these are f64, f32, f16"),
    "a dtype of an input": (lambda b, x: b.input("i", (2,), "float"), "'float' is no dtype"),
    "a symbolic dim": (lambda b, x: b.input("i", (wrong("n"), 2)), "a graph has sizes, no symbolic dims"),
    "a name in place of an op": (lambda b, x: b.apply(wrong("relu"), x), "'relu' is no op of fusec.ops"),
    "rows of a constant": (lambda b, x: b.constant([[1], [1, 2]]), "a constant that is no array"),
    "a large byte": (lambda b, x: b.constant(300, "u8"), "u8 does not hold 300 as it is"),
    "a negative": (lambda b, x: b.constant(-1, "u64"), "u64 does not hold -1 as it is"),
    "NaN as an integer": (lambda b, x: b.constant(math.nan, "i32"), "i32 does not hold nan as it is"),
    "fractions": (lambda b, x: b.constant([1.0, 1.5], "i8"), "i8 does not hold an array of float64 as it is"),
    "a fraction": (lambda b, x: x.astype("i32") + 1.5, "i32 does not hold 1.5 as it is"),
    "a rate next to 1": (lambda b, x: b.dropout(x, 1 - 1e-12, x), "a dropout rate of 0.99"),
    "numbers alone": (lambda b, x: b.where(x > 0, 1.0, 0.0), r"where\(\) of \(1.0, 0.0\): one of them"),
}


@pytest.mark.parametrize("number", [3, 3.0, True, -128])
def test_integers_hold_whole_numbers(number: float) -> None:
    b = Builder()
    b.output(y=b.input("x", (1,), "i8") * number)
    assert fusec.compile(b, target="cpu")(np.ones(1, np.int8)) == np.int8(number)


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_line(name: str) -> None:
    wrong, message = WRONG[name]
    b = Builder()
    with pytest.raises(ModelError, match=rf"^test_builder\.py:\d+: .*{message}"):
        wrong(b, b.input("x", (2, 4)))


def test_a_tensor_has_no_truth_value() -> None:
    x = Builder().input("x", (2,))
    with pytest.raises(VerifyError, match="has no truth value"):
        bool(x > 0.0)
    assert len(x) == 2


def test_origins_name_the_callers_line() -> None:
    b = Builder()
    b.output(y=b.input("x", (2,)).exp())
    (node,) = b.graph().nodes
    assert node.origin[0].startswith("test_builder.py:")


def test_fusec_exports_it() -> None:
    assert fusec.Builder is Builder
    assert fusec.Tensor is Tensor
