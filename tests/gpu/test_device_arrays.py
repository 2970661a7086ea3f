"""Test copies of arrays of the host to the stand-in for a GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gpu.stand_in_gpu import Array, Machine

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int8, ml_dtypes.bfloat16])
@pytest.mark.parametrize("copied", ["large", "small", "transposed", "empty"])
def test_arrays_of_the_host_come_to_the_device_as_they_are(machine: Machine, dtype: type, copied: str) -> None:
    """Contiguous ones are copied directly, because CuPy would allocate as much pinned memory."""
    from fusec.gpu.device_arrays import DeviceArrays

    rows = {"large": 1 << 14, "small": 4, "transposed": 1 << 14, "empty": 0}[copied]
    array = np.random.default_rng(0).standard_normal((rows, 64)).astype(dtype)
    array = array.T if copied == "transposed" else array
    moved = DeviceArrays().from_any(array)
    assert isinstance(moved, Array) and (moved.dtype, moved.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(moved.get(), array)
    assert len(machine.copied) == (copied in ("large", "small"))


def test_a_number_becomes_an_array(machine: Machine) -> None:
    from fusec.gpu.device_arrays import DeviceArrays

    assert DeviceArrays().from_any(np.float32(3)).get() == 3


@pytest.mark.parametrize(
    ("shape", "order"),
    [((64, 8192), ()), ((64, 8192), (1, 0)), ((64, 8, 1024), (2, 0, 1)), ((64, 8, 1024), ())],
    ids=["row-major", "as stored", "split", "split row-major"],
)
def test_a_transposed_array_is_packed_in_any_order(
    machine: Machine, shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    """It is copied as it is stored, so that the host need not transpose it."""
    from fusec.gpu.device_arrays import DeviceArrays
    from fusec.ir import DType, TensorType

    stored = np.random.default_rng(0).standard_normal((8192, 64)).astype(np.float16)
    type = TensorType(shape, DType.F16, order)
    packed = DeviceArrays().packed(stored.T, type)
    want = stored.T.reshape(shape).transpose(order or range(len(shape))).reshape(-1)
    np.testing.assert_array_equal(packed.get(), want)
    assert len(machine.copied) == 1
