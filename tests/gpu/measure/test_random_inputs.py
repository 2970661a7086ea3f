"""Test random data of every type, and distances that show wrong results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine, on_device

from fusec.ir import DType, Graph, TensorType
from fusec.lowering.cudnn_graph import CudnnTensor
from fusec.lowering.packing import code_bytes, from_codes
from fusec.lowering.simulator import extent
from fusec.ops import Scatter

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


@pytest.mark.parametrize(
    "dtype", [dtype for dtype in DType if dtype.is_narrow and dtype is not DType.F8E8M0], ids=lambda dtype: dtype.value
)
@pytest.mark.parametrize("count", [1, 7, 300_001])
def test_narrow_types_are_drawn_once_and_repeated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, dtype: DType, count: int
) -> None:
    """Drawing each of the millions of 4-bit weights of a product took seconds."""
    from fusec.gpu.measure import random_inputs

    first = random_inputs.random_array(TensorType((count,), dtype)).get()
    assert first.dtype == np.uint8 and first.size == code_bytes(count, dtype)
    numbers = from_codes(np.asarray(first), count, dtype).astype(np.float32)
    assert set(np.unique(numbers)) <= {-2.0, 0.0, 1.0, 2.0}  # -2 has the bits of 2 in i2
    assert count < 100 or len(np.unique(numbers)) >= 2
    monkeypatch.setattr(random_inputs.np.random, "default_rng", None)
    assert random_inputs.random_array(TensorType((count,), dtype)).size == first.size


def tensor(dtype: DType, *dims: int, uid: int = 1) -> CudnnTensor:
    strides = tuple(int(np.prod(dims[i + 1 :])) for i in range(len(dims)))
    return CudnnTensor(uid, dims, strides, dtype)


@pytest.mark.parametrize("dtype", [DType.F16, DType.BF16, DType.F32, DType.F64, DType.I32, DType.I8, DType.BOOL])
def test_random_data_fills_a_tensor_of_any_type(machine: Machine, dtype: DType) -> None:
    from fusec.gpu.measure.random_inputs import PERIOD, as_float64, random_data

    for dims in ((2, 3, 5), (1, 1, 5 * PERIOD + 5)):
        wanted = tensor(dtype, *dims)
        data = random_data(wanted)
        assert data.dtype == np.uint8 and data.size == extent(wanted) * dtype.numpy.itemsize
        numbers = as_float64(np.asarray(data.get()), dtype)
        assert np.isfinite(numbers).all()
        if dtype.is_float and numbers.size > PERIOD:
            assert abs(numbers.mean()) < 0.01 and abs(numbers.std() - 1.0) < 0.01
            np.testing.assert_array_equal(numbers[PERIOD:], numbers[:-PERIOD])
        other = random_data(tensor(dtype, *dims, uid=2))
        assert (other.get() != data.get()).any(), "operands of one graph are no copies of each other"


def test_indices_of_written_rows_are_different_places(machine: Machine) -> None:
    """With equal ones, one block of a kernel would write all rows, and seem slower than it is."""
    from fusec.gpu.measure.random_inputs import RandomInputs

    graph = Graph("writes")
    types = [TensorType((300, 8), DType.F16), TensorType((7,), DType.I32), TensorType((7, 8), DType.F16)]
    names = ("cache", "indices", "new")
    cache, indices, new = (graph.add_input(name, type) for name, type in zip(names, types, strict=True))
    graph.set_outputs([graph.add(Scatter(), cache, indices, new)])
    places = RandomInputs().memory(indices, indices.type).get()
    assert places.dtype == np.int32 and len(set(places.tolist())) == 7
    assert places.min() >= 0 and places.max() < 300
    assert all(0 < gap < 50 for gap in np.diff(places)), "the rows of a cache are in the order of sequences"


def test_filters_have_about_unit_gain(machine: Machine) -> None:
    from fusec.gpu.measure.random_inputs import as_float64, random_data

    filters = as_float64(random_data(tensor(DType.F32, 64, 64, 3, 3)).get(), DType.F32)
    assert 0.7 < filters.std() * np.sqrt(64 * 9) < 1.5


@needs_compiler
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(DType.F16, "f2"), (DType.F32, "f4"), (DType.F64, "f8"), (DType.BF16, ""), (DType.I8, "i1"), (DType.F8E4M3, "")],
)
def test_the_device_measures_large_results(machine: Machine, dtype: DType, name: str) -> None:
    from fusec.gpu.measure.device_distance import BLOCK, GRID, device_norms

    rng, size = np.random.default_rng(0), 2 * GRID * BLOCK + 77
    got, want = ((9 * rng.standard_normal(size)).astype(name or dtype.numpy) for _ in range(2))
    norms = device_norms(dtype, *(on_device(each.view(np.uint8)) for each in (got, want)))
    apart = got.astype(np.float64) - want.astype(np.float64)
    np.testing.assert_allclose(norms, (np.linalg.norm(apart), np.linalg.norm(want.astype(np.float64))), 1e-12)


@pytest.mark.parametrize("host_bytes", [1 << 22, pytest.param(0, marks=needs_compiler)])
def test_distances_see_what_is_wrong(machine: Machine, monkeypatch: pytest.MonkeyPatch, host_bytes: int) -> None:
    from fusec.gpu.measure import random_inputs

    monkeypatch.setattr(random_inputs, "HOST_BYTES", host_bytes)
    t = tensor(DType.F32, 1, 1, 4)

    def far(got: Any, want: Any) -> float:
        raw = [on_device(np.array(each, np.float32).view(np.uint8)) for each in (got, want)]
        return random_inputs.distance({t: raw[0]}, {t: raw[1]})

    nan, inf = float("nan"), float("inf")
    assert far([1, 2, 3, 4], [1, 2, 3, 4]) == 0.0
    assert far([1, nan, inf, -inf], [1, nan, inf, -inf]) == 0.0
    assert far([3, 0, 0, 4.5], [3, 0, 0, 4]) == pytest.approx(0.1)
    assert far([1, 0, 0, 0], [0, 0, 0, 0]) == 1.0
    assert np.isnan(far([nan, 0, 0, 0], [1, 0, 0, 0]))
    assert not far([inf, 0, 0, 0], [1, 0, 0, 0]) <= 1e9
    u = tensor(DType.F32, 1, 1, 4, uid=2)
    same, off = (on_device(np.array(each, np.float32).view(np.uint8)) for each in ([1, 0, 0, 0], [2, 0, 0, 0]))
    assert random_inputs.distance({t: same, u: off}, {t: same, u: same}) == 1.0, "the worst counts"
