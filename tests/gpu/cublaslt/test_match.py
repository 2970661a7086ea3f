"""Test cuBLASLt without a GPU: which graphs are one call of it, how it reads their memory, and who is chosen."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu.cublaslt.product_graphs import (
    INTEGER_SIZES,
    POINTWISE,
    buffers,
    convolution,
    fp8_grid,
    fp8_product,
    gradient,
    grid,
    integer_product,
    product,
)
from gpu.stand_in_blaslt import Bindings
from helpers import assert_close

from fusec.errors import ExecutionError
from fusec.gpu.cublaslt import algorithms
from fusec.gpu.cublaslt import bindings as cublaslt_library
from fusec.gpu.cublaslt.algorithms import Blas, is_algorithm
from fusec.gpu.cublaslt.bindings import BlasError, MatmulDescAttribute
from fusec.gpu.cublaslt.descriptors import Descriptors
from fusec.gpu.cublaslt.match import product_of
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph
from fusec.lowering.simulator import simulate
from fusec.plans.plan_record import BLAS, Choice


def run(graph: CudnnGraph, seed: int = 0) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
    """Return the results of the library's first algorithm and of the simulator, of the same memory."""
    blas = Blas(lambda: 1)
    plan = blas.build(graph, blas.offers(graph)[0])
    got, want = buffers(graph, seed), buffers(graph, seed)
    plan.execute(plan.addresses({uid: array.ctypes.data for uid, array in got.items()}), 0, None)
    simulate(graph, want)
    return got, want


def test_every_epilogue_type_and_layout_reads_and_writes_the_right_memory(bindings: Bindings) -> None:
    count = 0
    for seed, (name, graph) in enumerate(grid()):
        (result,) = graph.outputs
        try:
            got, want = run(graph, seed)
            nothing = np.isnan(want[result.uid].astype(np.float64))  # gaps stay as they were
            np.testing.assert_array_equal(np.isnan(got[result.uid].astype(np.float64)), nothing)
            assert_close(
                got[result.uid][~nothing], want[result.uid][~nothing], 1e-2 if result.dtype is DType.BF16 else 2e-3
            )
        except (AssertionError, IndexError) as error:
            raise AssertionError(name) from error
        count += 1
    assert count > 600


def test_every_epilogue_and_result_of_fp8_is_computed(bindings: Bindings) -> None:
    count = 0
    for seed, (name, graph) in enumerate(fp8_grid()):
        (result,) = graph.outputs
        got, want = (each[result.uid].astype(np.float32) for each in run(graph, seed))
        assert np.isfinite(want).all(), name
        # a value next to the border of two codes may become either
        limit = {DType.BF16: 1e-2, DType.F8E4M3: 2e-2}.get(result.dtype, 2e-3)
        assert np.linalg.norm(got - want) <= limit * np.linalg.norm(want), name
        count += 1
    assert count == 4 * (8 * 3 + 2 + 2)


@pytest.mark.parametrize("sizes", INTEGER_SIZES)
def test_sums_of_integers_are_exact(bindings: Bindings, sizes: tuple[int, int, int]) -> None:
    graph = integer_product(sizes)
    got, want = (each[graph.outputs[0].uid] for each in run(graph))
    np.testing.assert_array_equal(got, want)
    assert np.abs(want).max() > 1 << 12


def test_results_in_fp8_saturate_and_are_rounded_to_even(bindings: Bindings) -> None:
    blas, made = Blas(lambda: 1), buffers(FP8, 0)
    scale, bias, end = (tensor.uid for tensor in FP8.inputs[2:])
    made[1][:], made[scale][:], made[end][:] = 0, 1.0, 8.0
    numbers = [0, 1, -1, 56, -56, 57, 1000, -60000, 0.1328125, 0.1171875, 1.0625, 1.1875, 0.0002, 3e-5, -3e-5, 0.5]
    made[bias][:] = numbers
    plan = blas.build(FP8, blas.offers(FP8)[0])
    plan.execute({uid: array.ctypes.data for uid, array in made.items()}, 0, None)
    got = made[FP8.outputs[0].uid].astype(np.float32).reshape(24, 16)
    eight = [0, 8, -8, 448, -448, 448, 448, -448, 1.0, 0.9375, 8, 10, 0.001953125, 0, 0, 4]
    np.testing.assert_array_equal(got, np.tile(np.array(eight, np.float32), (24, 1)))


def without_tensor_cores(graph: CudnnGraph) -> CudnnGraph:
    return dataclasses.replace(graph, tensor_cores=False)


def test_fp32_is_rounded_to_tf32_only_where_the_graph_allows_it(bindings: Bindings) -> None:
    for graph, compute in (
        (product(dtype=DType.F32), 77),
        (without_tensor_cores(product(dtype=DType.F32)), 68),
        (product(), 68),
    ):
        blas = Blas(lambda: 1)
        plan = blas.build(graph, blas.offers(graph)[0])
        assert [told[-1] for told in bindings.operations.values()] == [compute]
        del plan
        assert not bindings.operations and not bindings.layouts and not bindings.preferences, "descriptors are freed"


@pytest.mark.parametrize("fast", [False, True])
def test_sums_have_fewer_bits_only_where_the_graph_asks_for_that(bindings: Bindings, fast: bool) -> None:
    graph = fp8_product(epilogue=("scale", "bias"))
    product, *epilogue = graph.calls
    if fast:
        product = dataclasses.replace(product, attributes=(("fast_sums", True),))
    graph = dataclasses.replace(graph, calls=(product, *epilogue))
    blas = Blas(lambda: 1)
    plan = blas.build(graph, blas.offers(graph)[0])
    assert [told.get(MatmulDescAttribute.FAST_ACCUM, 0) for told in bindings.operations.values()] == [int(fast)]
    del plan


def changed(graph: CudnnGraph, uid: int, **changes: Any) -> CudnnGraph:
    tensors = tuple(dataclasses.replace(t, **changes) if t.uid == uid else t for t in graph.tensors)
    return dataclasses.replace(graph, tensors=tensors)


def transferred(graph: CudnnGraph, mode: str, **attributes: float) -> CudnnGraph:
    """The graph with one more op of one operand after its result."""
    (last,) = graph.outputs
    virtual = changed(graph, last.uid, virtual=True, dtype=DType.F32)
    end = dataclasses.replace(last, uid=len(graph.tensors) + 1)
    call = CudnnCall("pointwise", (last.uid,), (end.uid,), mode, tuple(attributes.items()))
    return dataclasses.replace(virtual, tensors=(*virtual.tensors, end), calls=(*graph.calls, call))


FP8 = fp8_product(epilogue=("scale", "bias"), result=DType.F8E4M3)
BIAS, BOTH = product(epilogue=("bias",)), product(epilogue=("bias", "c"))
PADDED = tuple((k, (1, 1) if k == "pre_padding" else v) for k, v in POINTWISE)
STRIDED = tuple((k, (2, 2) if k == "stride" else v) for k, v in POINTWISE)
REFUSED = {
    "erf is not the library's gelu": transferred(BIAS, "gelu"),
    "clipped relu": transferred(BIAS, "relu", upper_clip=6.0),
    "something after the activation": transferred(transferred(BIAS, "relu"), "relu"),
    "two residuals": product(epilogue=("c", "c")),
    "scaled after the bias": product(epilogue=("bias", "scale")),
    "a virtual value in 16 bits is rounded": changed(BIAS, 3, dtype=DType.F16),
    "a bias in another type": changed(BIAS, 4, dtype=DType.F32),
    "a bias with gaps": changed(BIAS, 4, strides=(10, 10, 2)),
    "a bias for each row": changed(BIAS, 4, dims=(1, 6, 1), strides=(6, 1, 1)),
    "a residual by columns": product(epilogue=("c",), transposed="c"),
    "a bias of a result by columns": product(epilogue=("bias",), transposed="d"),
    "every other element": changed(product(), 1, strides=(84, 14, 2)),
    "overlapping rows": changed(product(), 1, strides=(42, 3, 1)),
    "two results": changed(BIAS, 3, virtual=False, dtype=DType.F16),
    "integers with sums in i8": product(dtype=DType.I8),
    "integers stored row by row": changed(integer_product(), 2, strides=(512, 16, 1)),
    "integers with columns that are no multiple of 16": integer_product((24, 24, 32)),
    "integers with an inner dim that is no multiple of 16": integer_product((24, 16, 40)),
    "scaled integers": transferred(integer_product(), "relu"),
    "a reduction": CudnnGraph(product().tensors, (CudnnCall("reduction", (1,), (3,), "add"),)),
    "nothing to sum": product((1, 6, 5, 0)),
    "windows": convolution(window=3),
    "padding": convolution(attributes=PADDED),
    "strides": convolution(attributes=STRIDED),
    "groups": changed(convolution(), 2, dims=(6, 4, 1, 1), strides=(4, 1, 1, 1)),
    "rows of channels": convolution(order=(0, 1, 2, 3)),
    "pixels column by column": convolution(order=(0, 3, 2, 1)),
    "images with gaps": changed(convolution(), 1, strides=(240, 1, 40, 8)),
    "a gradient by windows": gradient("conv_dgrad", window=3),
    "a gradient by padded images": gradient("conv_wgrad", attributes=PADDED),
    "a gradient of every other pixel": gradient("conv_dgrad", attributes=STRIDED),
    "a gradient in groups": changed(gradient("conv_wgrad"), 3, dims=(6, 4, 1, 1), strides=(4, 1, 1, 1)),
    "a sum of filters' gradients": gradient("conv_wgrad", added=True),
    "fp8 stored row by row": changed(FP8, 2, strides=(512, 16, 1)),
    "fp8 with columns that are no multiple of 16": fp8_product((24, 24, 32)),
    "fp8 with an inner dim that is no multiple of 16": fp8_product((24, 16, 40)),
    "fp8 by fp16": changed(FP8, 2, dtype=DType.F16),
    "a bias in fp32 after fp8": fp8_product(epilogue=("bias",), result=DType.F32),
    "a bias and a residual of two types": changed(
        fp8_product(epilogue=("bias", "c"), result=DType.F8E4M3), 4, dtype=DType.BF16
    ),
    "fp8 beyond its range": fp8_product(result=DType.F8E4M3, limit=480.0),
    "fp8 limited on one side": fp8_product(epilogue=("min",), result=DType.F8E4M3, ends=()),
    "fp16 limited to the range of fp8": fp8_product(epilogue=("max", "min")),
    "a scale for each column": fp8_product(epilogue=("scales",)),
    "a scale of a result in fp16": fp8_product(epilogue=("bias", "scale")),
    "a scale in memory after fp16": changed(
        changed(fp8_product(epilogue=("scale",)), 1, dtype=DType.F16), 2, dtype=DType.F16
    ),
}


@pytest.mark.parametrize("graph", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_call_of_the_library_is_left_to_cudnn(graph: CudnnGraph, bindings: Bindings) -> None:
    assert product_of(graph) is None
    assert Blas(lambda: 1).offers(graph) == []
    with pytest.raises(ExecutionError, match="does not offer"):
        Blas(lambda: 1).build(graph, Choice(BLAS, ()))


def test_their_neighbours_are(bindings: Bindings) -> None:
    for graph in (
        BIAS,
        BOTH,
        transferred(BIAS, "relu"),
        transferred(BIAS, "identity"),
        convolution(),
        gradient("conv_wgrad"),
        integer_product(),
    ):
        assert product_of(graph) is not None


def test_one_row_may_have_two_biases() -> None:
    found = product_of(product((1, 1, 8, 8), ("bias", "bias")))
    assert found is not None and found.bias == 4 and found.c is not None and found.c.uid == 6
    assert product_of(product((1, 2, 8, 8), ("bias", "bias"))) is None


def test_algorithms_are_named_by_their_attributes_and_found_again(bindings: Bindings) -> None:
    blas, graph = Blas(lambda: 1), BIAS
    offers = blas.offers(graph)
    assert [dict(c.knobs)[0] for c in offers] == [66, 71, 52]
    assert [c.workspace_bytes for c in offers] == [0, 1024, 2048]
    assert all(c.engine == BLAS and c.library == "cublaslt" and len(c.knobs) == 9 for c in offers)
    plan = Blas(lambda: 1).build(graph, offers[1])
    made = buffers(graph, 0)
    scratch = np.empty(2048, np.uint8)
    plan.execute({uid: array.ctypes.data for uid, array in made.items()}, scratch.ctypes.data, None)
    assert bindings.ran == [71]
    bindings.failing = {71}
    with pytest.raises(ExecutionError, match="cuBLASLt failed to run"):
        plan.execute({uid: array.ctypes.data for uid, array in made.items()}, scratch.ctypes.data, None)


def test_an_algorithm_is_revived_from_its_numbers(bindings: Bindings) -> None:
    blas, graph = Blas(lambda: 1), BIAS
    blob = blas.build(graph, blas.offers(graph)[1]).blob
    assert is_algorithm(blob) and not is_algorithm(b"CUDNN") and len(blob) < 128
    made, want = buffers(graph, 0), buffers(graph, 0)
    plan = Blas(lambda: 1).revive(graph, blob)
    assert (plan.workspace_bytes, plan.blob) == (1024, blob)
    scratch = np.empty(1024, np.uint8)
    plan.execute({uid: array.ctypes.data for uid, array in made.items()}, scratch.ctypes.data, None)
    simulate(graph, want)
    assert_close(made[graph.outputs[0].uid], want[graph.outputs[0].uid], 2e-3)
    bindings.algorithms = (66, 52, 71)  # 71 now wants 2048 bytes
    with pytest.raises(ExecutionError, match="more workspace"):
        Blas(lambda: 1).revive(graph, blob)
    bindings.algorithms = (66,)
    for other, told, why in (
        (graph, blob, "does not take the algorithm"),
        (graph, blob[:-1], "not an algorithm"),
        (graph, b"CUDNN", "not an algorithm"),
        (product(dtype=DType.I8), blob, "does not run"),
    ):
        with pytest.raises(ExecutionError, match=why):
            Blas(lambda: 1).revive(other, told)


def test_a_library_that_declines_offers_nothing(bindings: Bindings) -> None:
    bindings.algorithms = ()
    assert Blas(lambda: 1).offers(BIAS) == []


@pytest.fixture
def unknown_version(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No package has the library."""

    monkeypatch.setattr(algorithms, "installed_version", lambda package: None)
    algorithms.version.cache_clear()
    yield
    algorithms.version.cache_clear()


@pytest.mark.usefixtures("unknown_version")
def test_without_the_library_nothing_competes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt_library, "load", _not_there)
    assert algorithms.version() == algorithms.competitor() == ""
    assert Blas.open(lambda: 1) is None


@pytest.mark.usefixtures("unknown_version")
def test_a_library_that_is_no_package_says_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt_library, "load", lambda: SimpleNamespace(version=120905))
    assert algorithms.competitor() == "cublaslt 12.9.5"
    assert Blas.open(lambda: 1) is not None


def _not_there() -> None:
    raise RuntimeError("libcublasLt.so.13 is not found")


@pytest.mark.parametrize("where", ["load", "create"])
def test_a_library_that_does_not_load_is_said_once_and_left_out(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    graph = BIAS
    blob = Blas(lambda: 1).build(graph, Blas(lambda: 1).offers(graph)[0]).blob

    def fail(*arguments: object) -> None:
        raise BlasError("cublasLtCreate: not initialized")

    if where == "load":
        monkeypatch.setattr(cublaslt_library, "load", _not_there)
    else:
        monkeypatch.setattr(bindings, "create", fail)
    blas = Blas(lambda: 1)
    with pytest.warns(UserWarning, match="cuBLASLt does not load, products are left to cuDNN"):
        assert blas.offers(graph) == []
    assert blas.offers(graph) == []
    with pytest.raises(ExecutionError, match="does not load"):
        blas.revive(graph, blob)


# the real library, as far as it goes without a GPU -----------------------------------------------------


@pytest.fixture(scope="module")
def library() -> cublaslt_library.Library:
    try:
        return cublaslt_library.load()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(str(error))


def test_numbers_are_those_of_the_header(library: cublaslt_library.Library) -> None:
    """And the struct and the functions are declared as there."""
    from cuda import pathfinder

    folder = pathfinder.find_nvidia_header_directory("cublas")
    if folder is None:
        pytest.skip("the library came without its header")
    header = Path(folder, "cublasLt.h").read_text()
    for prefix, names in (
        ("MATMUL_DESC", cublaslt_library.MatmulDescAttribute),
        ("MATRIX_LAYOUT", cublaslt_library.MatrixLayoutAttribute),
        ("MATMUL_PREF", cublaslt_library.MatmulPreferenceAttribute),
    ):
        for name in names:
            assert re.search(rf"CUBLASLT_{prefix}_{name.name} = {name.value},", header), name
    for name, parameters in cublaslt_library._FUNCTIONS.items():
        declared = re.search(rf"CUBLASWINAPI cublasLt{name}\(([^;]*)\);", re.sub("//.*", "", header))
        assert declared is not None, name
        assert len(declared[1].split(",")) == len(parameters), name
    assert cublaslt_library.RESULT.itemsize == 8 * cublaslt_library.ALGORITHM_WORDS + 8 + 4 + 4 + 16
    assert f"uint64_t data[{cublaslt_library.ALGORITHM_WORDS}];" in header


def test_products_are_described_to_the_library(library: cublaslt_library.Library) -> None:
    assert library.version >= 120000
    described = Descriptors(library, product_of(BIAS))  # type: ignore[arg-type]
    assert 0 not in (described.operation, described.a, described.b, described.c, described.d)
    with pytest.raises(BlasError, match=r"cublasLtMatmulDescSetAttribute: an unsupported value"):
        library.set_attribute("MatmulDesc", described.operation, 4711, np.uint64(0))


def test_what_is_no_library_is_said() -> None:
    with pytest.raises(OSError, match="no-such"):
        cublaslt_library.Library("/no-such-library.so")
