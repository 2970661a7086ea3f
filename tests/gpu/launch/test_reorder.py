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
    [((3, 5, 7, 2), (0, 2, 3, 1)), ((33, 17), (1, 0)), ((2, 3, 4, 5, 6), (4, 0, 2, 1, 3)), ((9,), (0,))],
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
def test_weights_whose_dims_are_split_are_ordered_by_the_same_kernel(machine: Machine) -> None:
    from fusec.gpu.device_arrays import DeviceArrays
    from fusec.gpu.kernels.convolution.split_k_tiling import fragments

    array = np.random.default_rng(0).standard_normal((32, 64, 3, 3)).astype(np.float16)
    type = fragments(TensorType(array.shape, DType.F16), 2)
    assert type.rank > array.ndim
    np.testing.assert_array_equal(DeviceArrays().packed(array, type).get(), pack(np, array, type))
    assert machine.launched == ["fusec_reorder2"]
