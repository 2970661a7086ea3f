"""Test cuBLASLt on a real GPU: all it offers for products of every layout, type and epilogue, and whole graphs."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gpu.cublaslt.product_graphs import INTEGER_SIZES, buffers, fp8_grid, fp8_product, grid, integer_product, product
from helpers import assert_close, one_program
from scipy.special import ndtr

import fusec
from fusec.gpu.cublaslt import algorithms
from fusec.ir import DType, Graph
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.lowering.simulator import simulate
from fusec.passes.partition.equivalent_spellings import faster_spellings
from fusec.plans.plan_cache import PlanStore
from fusec.reference import evaluate
from fusec.text import parse

pytestmark = pytest.mark.gpu
LIMIT = {DType.F16: 2e-3, DType.BF16: 2e-2, DType.F32: 1e-5}


def errors(blas: algorithms.Blas, graph: CudnnGraph, seed: int) -> list[float]:
    """Return the distance of each algorithm's result from the simulator's; NaN if it wrote too little or too much."""
    import cupy

    want = buffers(graph, seed)
    given = {uid: array.copy() for uid, array in want.items()}
    simulate(graph, want)
    (result,) = graph.outputs
    right = want[result.uid].astype(np.float64)
    written = ~np.isnan(right)
    found: list[float] = []
    for choice in blas.offers(graph):
        plan = blas.build(graph, choice)
        device = {uid: cupy.asarray(array.view(np.uint8)) for uid, array in given.items()}
        scratch = cupy.empty(max(plan.workspace_bytes, 1), cupy.uint8)
        plan.execute({uid: array.data.ptr for uid, array in device.items()}, scratch.data.ptr, None)
        cupy.cuda.get_current_stream().synchronize()
        got = device[result.uid].get().view(result.dtype.numpy).astype(np.float64)
        outside = np.isnan(got[~written]).all()
        error = np.linalg.norm((got - right)[written]) / np.linalg.norm(right[written])
        found.append(float(error) if outside else float("nan"))
    return found


def opened() -> algorithms.Blas:
    import cupy

    blas = algorithms.Blas.open(lambda: int(cupy.cuda.get_current_stream().ptr))
    if blas is None:
        pytest.skip("there is no cuBLASLt")
    return blas


def test_every_algorithm_of_every_epilogue_type_and_layout_is_right() -> None:
    blas, wrong, without, count = opened(), list[str](), list[str](), 0
    for seed, (name, graph) in enumerate(grid()):
        (result,) = graph.outputs
        limit = LIMIT[result.dtype]
        if graph.tensors[0].dtype is DType.F32 and graph.tensor_cores:
            limit = 2e-3
        found = errors(blas, graph, seed)
        count += len(found)
        without += [name] if not found else []
        wrong += [f"{name}: {error}" for error in found if not error <= limit]
    print(f"{count} algorithms right or wrong, {len(wrong)} wrong, {len(without)} graphs without any: {without[:20]}")
    assert not wrong, wrong[:20]
    assert count > 1000


def test_every_algorithm_of_fp8_is_right() -> None:
    blas, wrong, without, count = opened(), list[str](), list[str](), 0
    for seed, (name, graph) in enumerate(fp8_grid()):
        limit = 2e-2 if graph.outputs[0].dtype is DType.F8E4M3 else max(LIMIT[graph.outputs[0].dtype], 2e-3)
        found = errors(blas, graph, seed)
        count += len(found)
        without += [name] if not found else []
        wrong += [f"{name}: {error}" for error in found if not error <= limit]
    print(f"{count} algorithms right or wrong, {len(wrong)} wrong, {len(without)} graphs without any: {without[:20]}")
    assert not wrong, wrong[:20]
    assert not without
    assert count > 100


@pytest.mark.parametrize("sizes", [*INTEGER_SIZES, (4096, 3072, 768), (6304, 768, 3072)])
def test_every_algorithm_of_integers_is_exact(sizes: tuple[int, int, int]) -> None:
    """No sum is rounded or saturated: at the ends of i8, sums reach 2**24 and more."""
    graph = integer_product(sizes)
    found = errors(opened(), graph, 1)
    assert found and set(found) == {0.0}, found


def test_results_in_fp8_saturate_and_are_rounded_to_even() -> None:
    """Products of zeros, so that the result is the bias, of every finite number of fp16, times a scale."""
    import cupy

    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    bias = bits[np.isfinite(bits)]
    graph = fp8_product((16, bias.size, 16), ("scale", "bias"), DType.F8E4M3)
    blas, uids = opened(), [tensor.uid for tensor in graph.inputs]
    (result,) = graph.outputs
    for scale in (1.0, 8.0, 1 / 3):
        want = buffers(graph, 0)
        for uid, value in zip(uids, (0, 0, 1.0, bias, scale), strict=True):
            want[uid][:] = value
        device = {uid: cupy.asarray(array.view(np.uint8)) for uid, array in want.items()}
        simulate(graph, want)
        for choice in blas.offers(graph)[:3]:
            plan = blas.build(graph, choice)
            scratch = cupy.empty(max(plan.workspace_bytes, 1), cupy.uint8)
            plan.execute({uid: array.data.ptr for uid, array in device.items()}, scratch.data.ptr, None)
            got = device[result.uid].get().view(result.dtype.numpy).astype(np.float32)
            np.testing.assert_array_equal(got, want[result.uid].astype(np.float32))


def test_long_sums_in_fp8_keep_their_digits() -> None:
    """Without fast accumulation, a sum of numbers of one sign keeps what fp16 holds; else it would lose 1e-2."""
    import cupy

    graph = fp8_product((64, 64, 16384), ("scale",), DType.F32)
    blas, want = opened(), buffers(graph, 0)
    for uid in (1, 2):
        want[uid][:] = np.random.default_rng(uid).uniform(0.5, 2, want[uid].size)
    device = {uid: cupy.asarray(array.view(np.uint8)) for uid, array in want.items()}
    simulate(graph, want)
    (result,) = graph.outputs
    offers = blas.offers(graph)
    assert offers
    for choice in offers:
        plan = blas.build(graph, choice)
        scratch = cupy.empty(max(plan.workspace_bytes, 1), cupy.uint8)
        plan.execute({uid: array.data.ptr for uid, array in device.items()}, scratch.data.ptr, None)
        got = device[result.uid].get().view(np.float32)
        assert_close(got, want[result.uid], 1e-3)


LAYER = """graph "g" (%x: f8e4m3[ROWS,DEPTH], %z: f16[ROWS,COLUMNS]) {
  %w = constant weight("w") : f8e4m3[DEPTH,COLUMNS]
  %s = constant [SCALE] : f32[]
  %t = constant [0.125] : f32[]
  %u = constant [0.03125] : f32[]
  %b = constant weight("b") : f32[COLUMNS]
  %xf = cast(%x) {to=f32}
  %xs = mul(%xf, %s)
  %wf = cast(%w) {to=f32}
  %ws = mul(%wf, %t)
  %m = matmul(%xs, %ws)
  %a = add(%m, %b)
  END
}"""
LAYER_ENDS = {
    "residual": "%y = add(%a, %zf)\n  return %y",
    "relu": "%y = relu(%a)\n  return %y",
    "gelu and rounding": """%g = gelu(%a)
  %d = div(%g, %u)
  %c = clip(%d) {min=-448.0, max=448.0}
  %y = cast(%c) {to=f8e4m3}
  return %y""",
}


@pytest.mark.parametrize("rounding", ["fused", "fastest"])
@pytest.mark.parametrize("end", LAYER_ENDS.values(), ids=LAYER_ENDS)
def test_a_layer_in_fp8_is_right_in_whatever_form_is_fastest(
    end: str, rounding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    rows, depth, columns = int(rng.integers(1, 300)), 16 * int(rng.integers(1, 90)), 16 * int(rng.integers(1, 40))
    end = f"%zf = cast(%z) {{to=f32}}\n  {end}" if "%zf" in end else end
    text = LAYER.replace("END", end).replace("SCALE", str(1 / np.sqrt(depth)))
    for name, size in (("ROWS", rows), ("DEPTH", depth), ("COLUMNS", columns)):
        text = text.replace(name, str(size))
    weights = {"w": (4 * rng.standard_normal((depth, columns))).astype(DType.F8E4M3.numpy)}
    graph = parse(text, weights | {"b": rng.standard_normal(columns).astype(np.float32)})
    net = fusec.compile(graph, precision="fp16", rounding=rounding, tune="full")
    for seed in range(3):
        given = feeds(graph, seed)
        (want,) = evaluate(graph, given, precision=DType.F64).values()
        (got,) = net.run(None, given)
        got, want = np.asarray(got).astype(np.float64), want.astype(np.float64)
        assert np.isfinite(got).all()
        # a number next to the border of two codes of fp8 may become either
        limit = 2e-3 if "f8e4m3}" not in end else 3e-2
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want), (rows, depth, columns)


def test_the_parts_of_a_long_sum_are_stored_in_fp32() -> None:
    blas = opened()
    for epilogue in ((), ("bias", "relu")):
        graph = product((1, 64, 64, 8192), epilogue, transposed="b")
        found = errors(blas, graph, 3)
        assert found and max(found) <= 5e-4, found  # partial sums in 16 bits would be off by 1e-3 and more


FP32 = """graph "g" (%x: f32[4,64,48], %k: f32[4,80,48]) {
  %t = transpose(%k) {perm=[0,2,1]} : f32[4,48,80]
  %s = matmul(%x, %t)
  %r = relu(%s)
  %u = matmul(%r, %k)
  return %u
}"""
GELU = """graph "g" (%x: f16[512,768]) {
  %w = constant weight("w") : f16[768,3072]
  %b = constant weight("b") : f16[3072]
  %m = matmul(%x, %w)
  %a = add(%m, %b)
  %r = gelu(%a)
  return %r
}"""


def feeds(graph: Graph, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {v.name: rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in graph.inputs}


def test_products_in_true_fp32_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened()
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    graph = parse(FP32)
    net = one_program(fusec.compile(graph, precision="fp32"))
    for seed in range(3):
        given = feeds(graph, seed)
        (want,) = evaluate(graph, given, precision=DType.F64).values()
        (got,) = net.run(None, given)
        assert_close(got, want, 2e-6)
    assert list(net.libraries().values()).count("cublaslt") == 2


def test_gelu_after_a_product_is_right_in_the_fastest_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((768, 3072)) / 27, "b": rng.standard_normal(3072)}
    graph = parse(GELU, {name: array.astype(np.float16) for name, array in weights.items()})
    net = fusec.compile(graph, precision="fp16", tune="full")
    for scale in (1, 1, 30, 1000):  # far beyond where tanh and exponentials saturate
        given = {name: array * np.float16(scale) for name, array in feeds(graph, scale).items()}
        (want,) = evaluate(graph, given, precision=DType.F64).values()
        (got,) = net.run(None, given)
        assert np.isfinite(got.astype(np.float64)).all()
        assert_close(got, want, 1e-3)


GELU_BODY = """graph "g" (%x: T[64,64], %w: T[64,64]) {
  %m = matmul(%x, %w)
  %r = gelu(%m)
  return %r
}"""


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16])
def test_gelu_by_tanh_is_gelu_near_and_far(dtype: DType, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    ((_, spelled),) = faster_spellings(parse(GELU_BODY.replace("T", dtype.value)))
    lowered = lower(spelled)
    backend = CudnnBackend("full", store=PlanStore(tmp_path))
    (result,) = lowered.graph.outputs
    for most in (6, 300, 60000):
        x = np.linspace(-most, most, 4096).astype(dtype.numpy).reshape(64, 64)
        named = {"x": x, "w": np.eye(64).astype(dtype.numpy)}
        buffers = {uid: named[name].reshape(-1).copy() for uid, name in lowered.inputs}
        buffers[result.uid] = np.full(4096, np.nan, dtype.numpy)
        backend.run_on_host(lowered.graph, buffers)
        exact = x.astype(np.float64).reshape(-1)
        exact *= ndtr(exact)
        off = np.abs(buffers[result.uid].astype(np.float64) - exact)
        assert (off <= np.maximum(2 * float(ml_dtypes.finfo(dtype.numpy).eps) * np.abs(exact), 1e-5)).all(), most
