"""Test copies of arrays into another memory order, on the stand-in for a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine, on_device

from fusec.ir import DType, TensorType
from fusec.lowering.packing import pack, to_codes

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
def test_the_kernel_comes_from_the_cache_if_it_is_there(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.gpu.launch import reorder
    from fusec.gpu.launch.cubins import Cubins, entry_of, source_of
    from fusec.gpu.launch.kernel_launcher import Launcher
    from fusec.plans.plan_record import Entry

    kernels, known = reorder.kernels_of_weights(), dict[str, Entry]()
    launcher = Launcher(Cubins(known.get))
    assert launcher.loaded(kernels) == {}, "neither is compiled for this"
    for source in (source_of(launch, 90) for kernel in kernels for launch in kernel.launches):
        known[source.key] = entry_of(source.key, source.code.encode())
    reorder.use(launcher.loaded(kernels))
    monkeypatch.setattr(reorder, "module", lambda width: pytest.fail("it is compiled"))
    array = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float16)
    np.testing.assert_array_equal(reorder.reordered(on_device(array), (1, 0)).get(), array.T.reshape(-1))


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


@needs_compiler
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_narrow], ids=lambda dtype: dtype.value)
@pytest.mark.parametrize(
    ("shape", "split", "order"),
    [
        ((8, 12), (8, 12), ()),
        ((8, 12), (8, 12), (1, 0)),
        ((7, 3), (7, 3), (1, 0)),  # its last byte is not full
        ((16, 24), (2, 2, 2, 2, 3, 1, 2, 2, 2), (0, 4, 8, 1, 3, 7, 6, 5, 2)),
        ((5,), (5,), (0,)),
        ((), (), ()),
        ((0, 4), (0, 4), (1, 0)),
    ],
)
def test_narrow_weights_are_packed_as_on_the_host(
    machine: Machine, dtype: DType, shape: tuple[int, ...], split: tuple[int, ...], order: tuple[int, ...]
) -> None:
    from fusec.gpu.device_arrays import DeviceArrays

    codes = np.random.default_rng(0).integers(0, 1 << dtype.bits, shape).astype(np.uint8)
    array, type = np.asarray(codes).view(dtype.numpy), TensorType(split, dtype, order)
    got = DeviceArrays().packed(array, type).get()
    np.testing.assert_array_equal(got.view(np.uint8), to_codes(pack(np, array, type), dtype))


@needs_compiler
@pytest.mark.parametrize("dtype", [DType.I4, DType.F16])
def test_a_constant_is_copied_once_for_all_orders(machine: Machine, dtype: DType) -> None:
    from fusec.gpu.launch.device_constants import LARGE_BYTES, DeviceConstants

    rows = LARGE_BYTES // 512
    array = np.random.default_rng(0).integers(0, 8, (rows, 512)).astype(np.int8).astype(dtype.numpy)
    constants = DeviceConstants()
    for type in (TensorType((rows, 512), dtype, (1, 0)), TensorType((rows, 8, 64), dtype, (1, 0, 2))):
        want = pack(np, array, type)
        want = to_codes(want, dtype) if dtype.is_narrow else want
        np.testing.assert_array_equal(constants(array, type).get(), want)
    assert len(machine.copied) == 1
