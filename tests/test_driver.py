"""Compile small models for GPU targets with the real cuDNN, and run them in simulation."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from frontends.onnx.models import run
from helpers import assert_close, one_program, quick
from onnx import TensorProto, helper

import fusec
from fusec import driver, frontends
from fusec.builder import Builder
from fusec.compiler import compile_model
from fusec.compiler.choose_target import require_runs_on_gpu
from fusec.diagnostics.explain import explain
from fusec.diagnostics.verify import verify
from fusec.errors import FusecError, ModelError, TargetError
from fusec.execution.shape_family import ShapeFamily
from fusec.gpu import device
from fusec.reference import evaluate
from fusec.runtime import Executable
from fusec.schedule.program import Kind

pytestmark = pytest.mark.usefixtures("no_gpu")  # these tests compile for GPUs that are not there


def model(batch: int | str = 1) -> onnx.ModelProto:
    """Make a convolution with BatchNorm and ReLU, a residual add, pooling and a classifier."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int, low: float | None = None) -> onnx.TensorProto:
        array = rng.standard_normal(shape) * 0.3 if low is None else rng.uniform(low, 1.5, shape)
        return onnx.numpy_helper.from_array(array.astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], "stem", pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["c", "s", "b", "m", "v"], ["n"], "norm"),
        helper.make_node("Relu", ["n"], ["r"], "act"),
        helper.make_node("Conv", ["r", "w2"], ["d"], "second", pads=[1, 1, 1, 1]),
        helper.make_node("Add", ["d", "r"], ["a"], "residual"),
        helper.make_node("Relu", ["a"], ["q"], "act2"),
        helper.make_node("GlobalAveragePool", ["q"], ["g"], "pool"),
        helper.make_node("Flatten", ["g"], ["f"], "flat"),
        helper.make_node("Gemm", ["f", "fc", "fb"], ["y"], "fc", transB=1),
    ]
    weights = [
        weight("w", 16, 8, 3, 3),
        *(weight(n, 16) for n in ("s", "b", "m")),
        weight("v", 16, low=0.5),
        weight("w2", 16, 16, 3, 3),
        weight("fc", 10, 16),
        weight("fb", 10),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 8, 14, 14])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 10])
    graph = helper.make_graph(nodes, "net", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.cudnn
@pytest.mark.parametrize(("precision", "rtol"), [("fp32", 1e-5), ("tf32", 1e-5), ("fp16", 5e-3), ("bf16", 4e-2)])
def test_precisions(precision: str, rtol: float, rng: np.random.Generator) -> None:
    executable = one_program(fusec.compile(model(), target="h200", precision=precision))
    assert executable.device == "simulated"
    x = rng.standard_normal((1, 8, 14, 14)).astype(np.float32)
    want = evaluate(executable.compiled.source, {"x": x}, precision=fusec.DType.F64)["y"]
    assert_close(executable(x), want, rtol)
    assert verify(executable.compiled).ok
    executable.assert_fused("conv+bias+relu")
    executable.assert_fused("conv*+add+relu")


@pytest.mark.cudnn
@pytest.mark.parametrize("target", quick(["t4", "a100", "l4", "h100", "h200", "b200"], ["t4", "h200"]))
def test_every_target_fuses_the_residual_block(target: str) -> None:
    compiled = driver.build(model(), target=target, precision="fp16")
    first, second = (s for s in compiled.program.steps if "conv" in s.signature)
    # where engines take mixed operands (B200), the cast of the input goes into the first convolution
    assert first.signature in ("conv+bias+relu", "cast+conv+bias+relu")
    assert second.signature == "conv+add+relu"
    assert first.kind is Kind.CUDNN
    assert second.verdict is not None
    assert second.verdict.precompiled


@pytest.mark.parametrize("budget", [-1.0, float("nan")])
def test_a_budget_that_is_no_time(budget: float) -> None:
    with pytest.raises(FusecError, match=f"budget is a number of seconds, 0 or more, not {budget}"):
        driver.compile(model(), target="cpu", budget=budget)


@pytest.mark.cudnn
def test_what_the_budget_leaves_unasked_runs_unfused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Products run alone in cuDNN, the other ops as kernels; a later compilation fuses as ever."""
    x = rng.standard_normal((1, 8, 14, 14)).astype(np.float32)
    usual = driver.compile(model(), target="h200", precision="tf32", simulate=True)
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    spent = driver.compile(model(), target="h200", precision="tf32", budget=1e-9, simulate=True)
    assert isinstance(usual, Executable) and isinstance(spent, Executable)
    assert not any(hint.kind == "budget" for hint in usual.hints)
    assert [hint.text.partition(",")[0] for hint in spent.hints if hint.kind == "budget"] == ["5 steps run unfused"]
    in_cudnn = [step.signature for step in spent.compiled.program.steps if step.kind is Kind.CUDNN]
    assert in_cudnn == ["conv", "conv", "matmul"]
    explanation = explain(spent.compiled.program, spent.compiled.target)
    assert {decline.code for decline in explanation.left_out if decline.op == "relu"} == {"FUSEC_BUDGET"}
    (want,), (got,) = usual.run(None, {"x": x}), spent.run(None, {"x": x})
    assert_close(got, want, 1e-3)
    later = driver.compile(model(), target="h200", precision="tf32", budget=0.0, simulate=True)
    assert isinstance(later, Executable)
    assert str(later.compiled.program) == str(usual.compiled.program), "0 bounds only what is timed"


@pytest.mark.cudnn
def test_a_second_compilation_asks_cudnn_nothing() -> None:
    first = driver.build(model(), target="a100")
    second = driver.build(model(), target="a100")
    assert second.judge.oracle.asked == 0  # type: ignore[attr-defined]  # the protocol does not promise it
    assert str(second.program) == str(first.program)


@pytest.mark.cudnn
def test_every_kind_of_model_is_accepted(tmp_path: Path, rng: np.random.Generator) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model(), path)
    x = rng.standard_normal((1, 8, 14, 14)).astype(np.float32)
    answers = [
        fusec.compile(m, target="h200")(x)
        for m in (path, str(path), model(), model().SerializeToString(), frontends.load(model()))
    ]
    for answer in answers[1:]:
        assert_close(answer, answers[0], 0.0)


@pytest.mark.cudnn
def test_symbolic_dims_are_bound_by_shapes(rng: np.random.Generator) -> None:
    executable = fusec.compile(model("N"), target="h200", shapes={"x": (3, 8, 14, 14)})
    assert executable.inputs[0].shape == (3, 8, 14, 14)
    with pytest.raises(ModelError, match="x"):
        fusec.compile(model("N"), target="h200")


@pytest.mark.cudnn
def test_the_graph_given_is_not_changed() -> None:
    graph = frontends.load(model())
    before = str(graph)
    fusec.compile(graph, target="h200")
    assert str(graph) == before


def _quantised() -> onnx.ModelProto:
    """Make a model that casts x to an 8-bit float and back."""
    scale = onnx.numpy_helper.from_array(np.array(0.5, np.float32), "s")
    zero = helper.make_tensor("z", TensorProto.FLOAT8E4M3FN, [], [0.0])
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s"], ["y"]),
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [4]) for n in "xy"]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], [scale, zero])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_eight_bit_floats_run_in_simulation() -> None:
    exe = fusec.compile(_quantised())
    x = np.array([0.26, -3.9, 1000.0, 0.01], np.float32)
    want = np.clip(x / 0.5, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.5)
    np.testing.assert_array_equal(exe(x), want)


SCATTERED = """graph "scattered" (%x: f8e4m3[8], %i: i64[2], %u: f8e4m3[2]) {
  %y = scatter(%x, %i, %u) {reduction="none"}
  return %y
}"""


def test_types_that_no_kernel_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = fusec.text.parse(SCATTERED, {})
    built = driver.build(graph, target="h200")
    monkeypatch.setattr(compile_model, "build_program", lambda *args, **more: built)
    monkeypatch.setattr(device, "is_present", lambda target: True)
    with pytest.raises(TargetError, match=r"%y = scatter.*: f8e4m3 runs in simulation only, not on a GPU, because"):
        fusec.compile(graph, target="h200")


def test_narrow_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'graph "s" (%x: f8e4m3[8]) {\n  %y = cast(%x) {to=f32}\n  %n = cast(%y) {to=f8e4m3}\n  return %n\n}'
    built = driver.build(fusec.text.parse(text, {}), target="h200", state={"x": "n"})
    with pytest.raises(TargetError, match="state %x: f8e4m3 cannot be state on a GPU"):
        require_runs_on_gpu(built)


def test_auto_without_a_gpu_is_an_h200() -> None:
    assert driver.resolve_target("auto").name == "h200"


def test_bad_options_are_named() -> None:
    with pytest.raises(TargetError, match="no target 'gtx'; targets are t4, a100, l4, h100, h200, b200"):
        fusec.compile(model(), target="gtx")
    quantise = "not 'int4'; a model that `fusec quantize` wrote runs in 8 or 4 bits"
    with pytest.raises(FusecError, match=f"precision is one of fp32, tf32, fp16, bf16, {quantise}"):
        fusec.compile(model(), precision="int4")
    with pytest.raises(FusecError, match="tune is one of none, quick, full, not 'max'"):
        fusec.compile(model(), tune="max")
    with pytest.raises(FusecError, match="no pass or rule is named nonsense"):
        fusec.compile(model(), disable=["nonsense"])


def _counted(alpha: float = 1.0) -> onnx.ModelProto:
    """Make a matmul of integers, and a Gemm of its result with the transpose of x."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Gemm", ["a", "x", "c"], ["y"], "layer", transB=1, alpha=alpha, beta=3.0),
    ]
    weights = [
        onnx.numpy_helper.from_array(np.full(s, 2**61 + 7, np.int64), n) for n, s in (("w", (5, 5)), ("c", (4,)))
    ]
    info = [helper.make_tensor_value_info(n, TensorProto.INT64, s) for n, s in (("x", [4, 5]), ("y", [4, 4]))]
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_products_of_integers_are_exact_and_wrap_around(precision: str, rng: np.random.Generator) -> None:
    x = rng.integers(-(2**62), 2**62, (4, 5))
    exe = fusec.compile(_counted(-2.0), target="h200", precision=precision, tune="none")
    w, c = np.int64(2**61 + 7), np.full(4, 2**61 + 7, np.int64)
    want = (x @ np.full((5, 5), w)) @ x.T * np.int64(-2) + c * np.int64(3)
    np.testing.assert_array_equal(exe(x), want)


def test_a_gemm_of_integers_has_whole_factors() -> None:
    with pytest.raises(ModelError, match=r"node 'layer' \(Gemm\): alpha 0\.5 and beta 3\.0 of i64 must be whole"):
        fusec.compile(_counted(0.5))


@pytest.mark.parametrize("alpha", [4.0, -4.0])
def test_a_gemm_that_overflows_does_so_to_its_own_side(alpha: float) -> None:
    """Weights times alpha would be infinite, and a sum of infinities of both signs NaN."""
    weight = onnx.numpy_helper.from_array(np.array([[3e38], [3e38]], np.float32), "w")
    node = helper.make_node("Gemm", ["x", "w"], ["y"], "layer", alpha=alpha)
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in (("x", [2, 2]), ("y", [2, 1]))]
    graph = helper.make_graph([node], "g", info[:1], info[1:], [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    x = np.array([[-1.0, 0.5], [0.0, 0.01]], np.float32)
    want = run(proto, {"x": x})[0]
    assert np.isinf(want[0, 0]) and np.isfinite(want[1, 0])
    np.testing.assert_allclose(fusec.compile(proto, target="h200", tune="none")(x), want, rtol=1e-6)


@pytest.mark.cudnn
def test_builders_share_weights() -> None:
    family, weight = ShapeFamily(), np.ones((16, 8), np.float16)
    made: list[Executable] = []
    for rows in (8, 16):
        b = Builder("f16")
        b.output(y=b.input("x", (rows, 16)) @ b.constant(weight))
        exe = fusec.compile(b, target="h200", simulate=True, family=family)
        assert isinstance(exe, Executable)
        made.append(exe)
    first, second = ({id(array) for array in exe._constants.arrays.values()} for exe in made)
    assert first
    assert first == second
