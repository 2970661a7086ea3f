"""Test ops that draw random numbers: their distributions, and that a seed or a state gives the same numbers again."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator
from scipy import stats
from segments.models import FLOAT, INT, n

import fusec
from fusec.errors import ModelError
from fusec.ops.random import STATE_NAME
from fusec.segments.executable import SegmentedExecutable

CPU: Any = {"target": "cpu"}
SIZE = [64, 1000]
SIGNIFICANT = 1e-4


def state(seed: int, call: int = 0) -> dict[str, np.ndarray]:
    return {STATE_NAME: np.array([seed, call], np.uint64)}


def of(node: onnx.NodeProto, *inputs: onnx.ValueInfoProto, dtype: int = FLOAT, **more: Any) -> onnx.ModelProto:
    outputs = [info(name, None, dtype) for name in node.output[:1]] + [info(name, None, 9) for name in node.output[1:]]
    return model([node], list(inputs), outputs, more.pop("held", {}), opset=22)


def draw(proto: onnx.ModelProto, *arrays: np.ndarray, **options: Any) -> np.ndarray:
    return fusec.compile(proto, **CPU, **options)(*arrays)


@pytest.mark.parametrize("seed", [None, 3.0])
@pytest.mark.parametrize("like", [False, True])
@pytest.mark.parametrize("dtype", [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE])
def test_uniform_and_normal(seed: float | None, like: bool, dtype: int) -> None:
    fixed = {} if seed is None else {"seed": seed}
    for op, given, distribution in (
        ("RandomUniform", {"low": -2.0, "high": 3.0}, stats.uniform(-2, 5)),
        ("RandomNormal", {"mean": 1.0, "scale": 2.0}, stats.norm(1, 2)),
    ):
        if like:
            made = of(n(f"{op}Like x -> y", dtype=dtype, **given, **fixed), info("x", SIZE, INT), dtype=dtype)
            arrays = [np.zeros(SIZE, np.int64)]
        else:
            made, arrays = of(n(f"{op} -> y", shape=SIZE, dtype=dtype, **given, **fixed), dtype=dtype), []
        executable = fusec.compile(made, **CPU)
        y = executable(*arrays)
        assert y.shape == tuple(SIZE)
        assert y.dtype == onnx.helper.tensor_dtype_to_np_dtype(dtype)
        assert stats.kstest(y.reshape(-1).astype(np.float64), distribution.cdf).pvalue > SIGNIFICANT
        assert abs(np.corrcoef(y[:, 1:].reshape(-1), y[:, :-1].reshape(-1))[0, 1]) < 0.02
        (want,) = ReferenceEvaluator(made).run(None, {"x": arrays[0]} if arrays else {})
        assert isinstance(want, np.ndarray)
        assert (want.shape, want.dtype) == (y.shape, y.dtype)


def test_bernoulli_and_its_edges() -> None:
    p = np.linspace(0, 1, 20, dtype=np.float32)[:, None].repeat(5000, 1)
    made = of(n("Bernoulli x -> y", dtype=TensorProto.BOOL), info("x", [20, 5000]), dtype=TensorProto.BOOL)
    drawn = draw(made, p)
    assert drawn.dtype == np.bool_
    assert not drawn[0].any() and drawn[-1].all()
    assert np.abs(drawn.mean(1) - p[:, 0]).max() < 0.03
    half = draw(of(n("Bernoulli x -> y"), info("x", [20, 5000])), p, precision="fp16")
    assert half.dtype == np.float32 and half[-1].all()


def test_multinomial_draws_classes_by_their_probability() -> None:
    chances = np.array([[0.1, 0.0, 0.4, 0.5, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]], np.float32)
    with np.errstate(divide="ignore"):
        logits = np.log(chances) + np.array([[3], [-1]], np.float32)
    for dtype in (TensorProto.INT32, INT):
        made = of(n("Multinomial x -> y", sample_size=20000, dtype=dtype), info("x", [2, 5]), dtype=dtype)
        y = draw(made, logits)
        assert y.shape == (2, 20000) and y.dtype == onnx.helper.tensor_dtype_to_np_dtype(dtype)
        for row, chance in zip(y, chances, strict=True):
            found = np.bincount(row, minlength=5) / row.size
            assert found[chance == 0].sum() == 0
            assert np.abs(found - chance).max() < 0.02


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.75])
def test_dropout_in_training(ratio: float) -> None:
    held = {"r": np.array(ratio, np.float32), "t": np.array(True)}
    made = of(n("Dropout x r t -> y m"), info("x", SIZE), held=held)
    x = np.random.default_rng(0).standard_normal(SIZE).astype(np.float32) + 9
    y, mask = fusec.compile(made, **CPU)(x)
    assert abs(mask.mean() - (1 - ratio)) < 0.01
    assert np.allclose(y, np.where(mask, x / np.float32(1 - ratio), 0), rtol=1e-6)


def test_numbers_follow_from_the_state() -> None:
    """Without a state they differ from call to call, and start anew in each executable."""
    made = of(n("RandomNormal -> y", shape=[100]))
    executable = fusec.compile(made, **CPU)
    first, second = executable(), executable()
    assert (first != second).mean() > 0.9
    assert (executable.run(None, state(0, 0))[0] == first).all()
    assert (executable.run(None, state(0, 1))[0] == second).all()
    assert (executable.run(None, state(1, 0))[0] != first).mean() > 0.9
    assert (fusec.compile(made, **CPU)() == first).all()
    assert executable.inputs[-1].name == STATE_NAME


def test_a_seed_in_the_model_fixes_the_numbers() -> None:
    executable = fusec.compile(of(n("RandomNormal -> y", shape=[100], seed=1.5)), **CPU)
    assert (executable() == executable()).all()
    assert not executable.inputs
    other = fusec.compile(of(n("RandomNormal -> y", shape=[100], seed=2.5)), **CPU)
    assert (executable() != other()).mean() > 0.9


def test_nodes_draw_different_numbers() -> None:
    """Also those of one name, in the trips of a loop."""
    nodes = [n("RandomUniform -> a", shape=[50]), n("RandomUniform -> b", shape=[50])]
    a, b = fusec.compile(model(nodes, [], [info("a", [50]), info("b", [50])], opset=22), **CPU)()
    assert (a != b).mean() > 0.9
    body = onnx.helper.make_graph(
        [n("RandomUniform -> u", shape=[50]), n("Identity c -> d")], "body",
        [info("i", [], INT), info("c", [], TensorProto.BOOL)], [info("d", [], TensorProto.BOOL), info("u", [50])],
    )  # fmt: skip
    made = model([n("Loop k _ -> y", body=body)], [], [info("y", [3, 50])], {"k": np.array(3)}, opset=22)
    rows = fusec.compile(made, **CPU)()
    assert len(np.unique(rows)) > 140


def cut(seed: float | None = None) -> onnx.ModelProto:
    fixed = {} if seed is None else {"seed": seed}
    nodes = [
        n("RandomUniformLike x -> a", **fixed), n("NonZero x -> z"), n("Cast z -> f", to=FLOAT),
        n("RandomUniformLike f -> b", **fixed),
    ]  # fmt: skip
    return model(nodes, [info("x", [4, 5])], [info("a", None), info("b", None)], opset=22)


def test_a_model_with_host_steps_has_one_state() -> None:
    x = np.eye(4, 5, dtype=np.float32)
    executable = fusec.compile(cut(), **CPU)
    assert isinstance(executable, SegmentedExecutable)
    first, second = executable(x), executable(x)
    assert (first[0] != second[0]).all() and (first[1] != second[1]).all()
    for one, other in zip(executable.run(None, {"x": x, **state(0, 1)}), second, strict=True):
        assert (one == other).all()
    executable = fusec.compile(cut(seed=2.0), **CPU)
    assert (executable(x)[1] == executable(x)[1]).all()


def test_only_a_later_segment_draws() -> None:
    made = cut()
    del made.graph.node[0], made.graph.output[0]
    executable = fusec.compile(made, **CPU)
    x = np.eye(4, 5, dtype=np.float32)
    first = executable(x)
    assert (first != executable(x)).all()
    assert (executable.run(None, {"x": x, **state(0, 0)})[0] == first).all()


def test_a_loop_on_the_host_needs_a_seed() -> None:
    body = onnx.helper.make_graph(
        [n("RandomUniformLike v -> w"), n("ReduceMax w -> m", keepdims=0), n("Less m most -> go")], "body",
        [info("i", [], INT), info("c", [], TensorProto.BOOL), info("v", [5])],
        [info("go", [], TensorProto.BOOL), info("w", [5])],
        [onnx.numpy_helper.from_array(np.array(0.5, np.float32), "most")],
    )  # fmt: skip
    made = model([n("Loop _ t x -> y", body=body)], [info("x", [5])], [info("y", [5])], {"t": np.array(True)}, opset=22)
    with pytest.raises(ModelError, match=r"node 'Loop_0' \(Loop\).*give RandomUniformLike a seed"):
        fusec.compile(made, **CPU)


def test_programs_of_several_shapes_share_the_count_of_calls() -> None:
    made = of(n("RandomUniformLike x -> y"), info("x", ["n"]))
    dynamic = fusec.compile_dynamic(made, **CPU)
    drawn = [dynamic(np.zeros(size, np.float32)) for size in (50, 60, 50)]
    assert (drawn[0] != drawn[1][:50]).all() and (drawn[0] != drawn[2]).all()
    assert (dynamic.run(None, {"x": np.zeros(50, np.float32), **state(0, 2)})[0] == drawn[2]).all()
    session = fusec.InferenceSession(made, **CPU)
    assert [arg.name for arg in session.get_inputs()] == ["x"]
    assert (session.run(None, {"x": np.zeros(50, np.float32)})[0] == drawn[0]).all()


@pytest.mark.cudnn
def test_a_saved_model_draws_the_same(tmp_path: Any) -> None:
    made = of(n("RandomNormal -> y", shape=[100]))
    executable = fusec.compile(made, target="h200", simulate=True)
    executable.save(tmp_path / "m.fusec")
    first = executable()
    assert executable.verify().ok
    loaded = fusec.load(tmp_path / "m.fusec")
    assert (loaded() == first).all()
    assert (loaded() != first).mean() > 0.9


@pytest.mark.parametrize(
    ("node", "told"),
    [
        (n("RandomUniform -> y", shape=[-1]), "negative dim"),
        (n("RandomUniform -> y", shape=[2], dtype=INT), "i64, which is no float"),
        (n("Multinomial x -> y", dtype=FLOAT), "samples of type f32"),
        (n("Multinomial x -> y", sample_size=0), "sample_size is 0"),
    ],
)
def test_what_is_refused(node: onnx.NodeProto, told: str) -> None:
    with pytest.raises(ModelError, match=told):
        fusec.compile(of(node, info("x", [2, 5])), **CPU)
