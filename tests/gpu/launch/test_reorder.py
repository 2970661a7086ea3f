"""Copy arrays into another memory order on the stand-in for a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine, on_device

from fusec.ir import DType, TensorType
from fusec.lowering.packing import pack

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


@needs_compiler
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((3, 5, 7, 2), (0, 2, 3, 1)),
        ((33, 17), (1, 0)),
        ((2, 3, 4, 5, 6), (4, 0, 2, 1, 3)),
        ((9,), (0,)),
        ((4, 2, 3, 1, 2, 4, 2, 2, 2, 1, 3), (0, 3, 9, 10, 4, 6, 2, 5, 7, 1, 8)),
    ],
)
def test_every_element_comes_to_its_place(
    machine: Machine, dtype: type, shape: tuple[int, ...], order: tuple[int, ...]
) -> None:
    from fusec.gpu.launch.reorder import can_reorder, reordered

    array = np.random.default_rng(0).integers(0, 200, shape).astype(dtype)
    assert can_reorder(on_device(array)) and not can_reorder(on_device(array)[:0])
    flat = reordered(on_device(array), order)
    np.testing.assert_array_equal(flat.get(), array.transpose(order).reshape(-1))


@needs_compiler
@pytest.mark.parametrize("order", [(), (0, 1, 2, 3), (0, 2, 3, 1)])
def test_weights_are_packed_as_on_the_host(machine: Machine, order: tuple[int, ...]) -> None:
    from fusec.gpu.device_arrays import DeviceArrays

    type = TensorType((4, 6, 3, 3), DType.F16, order)
    array = np.random.default_rng(0).standard_normal(type.shape).astype(np.float16)
    np.testing.assert_array_equal(DeviceArrays().packed(array, type).get(), pack(np, array, type))
    assert bool(machine.launched) == (order == (0, 2, 3, 1))


@needs_compiler
def test_weights_whose_dims_are_split_are_packed_as_on_the_host(machine: Machine) -> None:
    """A kernel's weights may have more dims than the model's. CuPy would compile a copy for each number of dims."""
    from fusec.gpu.device_arrays import DeviceArrays

    type = TensorType((4, 2, 8, 1, 2, 4, 2, 2, 2, 1, 1), DType.F16, (0, 3, 9, 10, 4, 6, 2, 5, 7, 1, 8))
    array = np.random.default_rng(0).standard_normal((64, 64, 1, 1)).astype(np.float16)
    assert array.size == type.size
    np.testing.assert_array_equal(DeviceArrays().packed(array, type).get(), pack(np, array, type))
    assert machine.launched
