"""Test MeanVarianceNormalization: one step over the axes of a norm, and 0 for an image of one number."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx
import onnx.parser
import pytest
from frontends.onnx.models import info, model, run
from gpu.kernels.cases import assert_same, build, normal, rows
from gpu.kernels.emulator import Emulator, needs_compiler
from helpers import assert_close, quick, relative_l2
from onnx import helper

import fusec
from fusec import Executable
from fusec.frontends import load as load_graph
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.kernels import GpuFigures
from fusec.ir import DType, Graph, Value
from fusec.ops import GroupNorm, LayerNorm
from fusec.reference import evaluate
from fusec.targets.target import load

ROUNDING = {np.float32: 1e-6, np.float16: 1e-3, ml_dtypes.bfloat16: 4e-3}
SHAPES = ((4, 8, 32, 32), (1, 64, 56, 56))
NORMS: dict[tuple[int, ...], str] = {
    (0, 2, 3): "batch_norm_train",
    (2, 3): "instance_norm",
    (1, 2, 3): "group_norm",
    (0, 1, 2, 3): "layer_norm",
    (3,): "layer_norm",
    (0, 3): "batch_norm_train",
    (0, 1): "batch_norm_train",
}
APART = ((1,), (1, 2), (0, 2), (1, 3))  # axes that no view brings together


def node_of(axes: Sequence[int], shape: Sequence[int], dtype: type = np.float32, opset: int = 13) -> onnx.ModelProto:
    node = helper.make_node("MeanVarianceNormalization", ["x"], ["y"], axes=list(axes))
    return model([node], [info("x", shape, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))], ["y"], opset=opset)


def compiled(proto: onnx.ModelProto, precision: str = "fp32") -> Executable:
    executable = fusec.compile(proto, target="h200", simulate=True, precision=precision)
    assert isinstance(executable, Executable)
    return executable


def ops_of(executable: Executable) -> list[str]:
    """Return the ops of the steps that are no views."""
    return [step.ops for step in executable.explain().steps if step.kind != "view"]


def formula(x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """ONNX's definition, in float64."""
    centred = x.astype(np.float64) - x.astype(np.float64).mean(axis=tuple(axes), keepdims=True)
    return centred / (np.sqrt((centred * centred).mean(axis=tuple(axes), keepdims=True)) + 1e-9)


@pytest.mark.cudnn
@pytest.mark.parametrize("shape", quick(SHAPES, SHAPES[:1]), ids=str)
@pytest.mark.parametrize("axes", NORMS, ids=str)
@pytest.mark.parametrize("dtype", quick(ROUNDING, (np.float32, np.float16)))
def test_the_axes_of_a_norm_are_one_step(
    axes: tuple[int, ...], shape: tuple[int, ...], dtype: type, rng: np.random.Generator
) -> None:
    executable = compiled(node_of(axes, shape, dtype))
    assert ops_of(executable) == [NORMS[axes]] and executable.explain().totals["launches"] == 1
    fused = fuse_steps(executable.compiled.program, GpuFigures.of(load("h200"))).steps  # as on a GPU
    assert len([step for step in fused if step.kind.value != "view"]) == 1
    x = (3 * rng.standard_normal(shape) + 2).astype(dtype)
    got = executable(x)
    assert got.dtype == x.dtype
    assert_close(got, formula(x, axes), ROUNDING[dtype])


@pytest.mark.cudnn
@pytest.mark.parametrize("axes", APART, ids=str)
def test_other_axes_are_a_norm_between_transposes(axes: tuple[int, ...], rng: np.random.Generator) -> None:
    executable = compiled(node_of(axes, (4, 8, 16, 12)))
    assert ops_of(executable) == ["transpose", "layer_norm", "transpose"]
    x = rng.standard_normal((4, 8, 16, 12)).astype(np.float32)
    assert_close(executable(x), formula(x, axes), 1e-6)


@pytest.mark.parametrize("shape", [(5, 7), (6, 5, 7), (5, 6, 5, 6, 5), (6,)], ids=str)
def test_every_choice_of_axes_in_any_rank(shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x = (rng.standard_normal(shape) - 1).astype(np.float32)
    rank = len(shape)
    for chosen in range(1, 1 << rank):
        axes = [d - rank * (d % 2) for d in range(rank) if chosen >> d & 1]  # some counted from the last
        got = evaluate(load_graph(node_of(axes, shape)), {"x": x})["y"]
        assert_close(got, formula(x, axes), 1e-5)


def test_no_axes_are_all_axes(rng: np.random.Generator) -> None:
    """As in the reductions that ONNX defines the op by."""
    proto = node_of((0,), (3, 4, 5))
    del proto.graph.node[0].attribute[0].ints[:]
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    assert_close(evaluate(load_graph(proto), {"x": x})["y"], formula(x, (0, 1, 2)), 1e-6)


@pytest.mark.cudnn
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("dtype", [*ROUNDING, np.float64])
@pytest.mark.parametrize("axes", [(0, 2, 3), (2, 3), (1,)], ids=str)
def test_an_image_of_one_number_becomes_zero(axes: tuple[int, ...], dtype: type, precision: str) -> None:
    """In 16 bits 1e-9 is 0, and ONNX's formula divides by it."""
    executable = compiled(node_of(axes, (2, 4, 16, 6), dtype), precision)
    for number in (0.0, 3.0, -0.625, 1024.0):
        got = executable(np.full((2, 4, 16, 6), number, dtype))
        assert np.array_equal(got.astype(np.float32), np.zeros(got.shape, np.float32)), number


@pytest.mark.parametrize("axes", [(0, 2, 3), (2, 3)], ids=str)
def test_only_tiny_deviations_differ_from_onnx(axes: tuple[int, ...], rng: np.random.Generator) -> None:
    """A norm adds to the variance what ONNX adds to the deviation. In float64 the formula is ONNX's."""
    x = rng.standard_normal((4, 8, 16, 16))
    for dtype, deviation, most in ((np.float32, 1e-2, 2e-7), (np.float32, 1e-6, 1.1e-3), (np.float64, 1e-6, 1e-14)):
        given = (deviation * x).astype(dtype)
        got = evaluate(load_graph(node_of(axes, x.shape, dtype)), {"x": given})["y"]
        assert relative_l2(got, formula(given, axes)) < most


SPELLINGS = {  # of the variance v, from the mean m
    "onnx": "two = Constant <value = float[1] {2}> () mm = Pow (m, two) xx = Pow (x, two) e = AVERAGE (xx) "
    "v = Sub (e, mm) d = Sub (x, m)",
    "differences": "d = Sub (x, m) dd = Mul (d, d) v = AVERAGE (dd)",
}


def in_parts(spelling: str, axes: Sequence[int], shape: Sequence[int], addend: str) -> onnx.ModelProto:
    dims = ",".join(map(str, shape))
    text = f"""<ir_version: 8, opset_import: ["" : 13]> g (float[{dims}] x) => (float[{dims}] y) {{
        m = AVERAGE (x) {SPELLINGS[spelling]}
        s = Sqrt (v) small = Constant <value = float[1] {{{addend}}}> () t = Add (s, small) y = Div (d, t) }}"""
    return onnx.parser.parse_model(text.replace("AVERAGE", f"ReduceMean <axes = [{', '.join(map(str, axes))}]>"))


@pytest.mark.cudnn
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    ("axes", "op"),
    [
        ((0, 2, 3), "batch_norm_train"),
        ((2, 3), "instance_norm"),
        ((1, 2, 3), "layer_norm"),
        ((0, 1, 2, 3), "layer_norm"),
    ],
)
def test_its_parts_are_one_step(spelling: str, axes: tuple[int, ...], op: str, rng: np.random.Generator) -> None:
    proto = in_parts(spelling, axes, (4, 8, 16, 16), "1e-9")
    executable = compiled(proto)
    assert ops_of(executable) == [op]
    x = (3 * rng.standard_normal((4, 8, 16, 16)) + 2).astype(np.float32)
    assert_close(executable(x), formula(x, axes), 1e-6)
    assert_close(executable(x), run(proto, {"x": x})[0], 1e-4)


@pytest.mark.cudnn
def test_a_larger_addend_is_computed_as_it_is_written(rng: np.random.Generator) -> None:
    proto = in_parts("differences", (2, 3), (2, 3, 8, 8), "1e-5")
    executable = compiled(proto)
    assert "instance_norm" not in ops_of(executable)
    x = (1e-4 * rng.standard_normal((2, 3, 8, 8))).astype(np.float32)
    assert_close(executable(x), run(proto, {"x": x})[0], 1e-5)


@needs_compiler
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_kernels_over_whole_tensors_and_images(dtype: DType, rng: np.random.Generator) -> None:
    type = rows(dtype, 3, 8, 20, 16)

    def of_all(g: Graph, x: Value) -> Value:
        return g.add(LayerNorm(0, 1e-18), x, g.constant(np.ones((), dtype.numpy)))

    def of_images(g: Graph, x: Value) -> Value:
        ones, zeros = (g.constant(np.full(8, number, dtype.numpy)) for number in (1, 0))
        return g.add(GroupNorm(1, 1e-18), x, ones, zeros)

    for case in (build("all", [type], of_all, normal), build("images", [type], of_images, normal)):
        kernel = case.kernel
        assert kernel is not None
        for variant in (kernel, *kernel.others):
            emulator, arrays = Emulator([variant]), case.arrays(rng)
            assert_same(case, emulator.run(variant, arrays, case.outputs), case.reference(arrays))
            flat = {value: np.full(value.type.shape, 3, dtype.numpy) for value in arrays if value.type.rank == 4}
            (zero,) = emulator.run(variant, {**arrays, **flat}, case.outputs)
            assert not zero.astype(np.float32).any()
