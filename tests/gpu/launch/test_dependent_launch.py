"""Test dependent launches: the arguments of the driver's function, and what a launch waits for."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import assert_same, last
from gpu.kernels.convolution.test_split_k import SAME, convolved
from gpu.kernels.product.packed.test_packed_product import Weights, alone

pytest.importorskip("cupy")

from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.launch import dependent_launch
from fusec.gpu.launch.cupy_arrays import cupy  # needs CuPy, as the next
from fusec.gpu.launch.dependent_launch import Attribute, Config, DependentFunction
from fusec.gpu.launch.kernel_launcher import Launcher
from fusec.ir import DType, TensorType, Value
from fusec.lowering.packing import pack, to_codes, unpack

REPLAYS = 20
SLOW = """extern "C" __global__ void slow(const unsigned short* from, unsigned short* to, unsigned first,
                                          unsigned count) {
  const long long begin = clock64();
  while (clock64() - begin < 40000) {}  // a launch after it that did not wait would be done by now
  for (unsigned i = first + threadIdx.x; i < first + count; i += blockDim.x) to[i] = from[i];
}"""


def test_structures_have_the_layout_of_cuda_h() -> None:
    assert ctypes.sizeof(Config) == 56 and ctypes.sizeof(Attribute) == 72
    fields = (Config.shared_bytes, Config.stream, Config.attributes, Config.count)
    assert [field.offset for field in fields] == [24, 32, 40, 48]
    assert Attribute.value.offset == 8


@pytest.mark.parametrize(
    ("error", "in_front", "asked"),
    [(0, 0, 1), (0, 1, 1), (801, 1, 1), (0, 2, 0)],  # CUDA_ERROR_NOT_SUPPORTED
)
def test_what_cannot_begin_early_is_launched_plainly(
    error: int, in_front: int, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: list[tuple[Any, ...]] = []
    counts: list[int] = []

    class Function:
        kernel = type("Kernel", (), {"ptr": 7})

        def __call__(self, *given: Any, **named: Any) -> None:
            plain.append((*given, named))

    def launched(config: Any, function: Any, places: Any, nothing: None) -> int:
        counts.append(config._obj.count)
        assert config._obj.stream == 5 and list(config._obj.grid) == [3, 1, 1] and function.value == 7
        assert ctypes.c_uint32.from_address(places[0]).value == 9
        return error

    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: type("Stream", (), {"ptr": 5}))
    monkeypatch.setattr(dependent_launch, "dependencies", lambda stream: in_front)
    DependentFunction(Function(), launched)((3,), (64,), (np.uint32(9),), shared_mem=16)
    assert counts == [1] * asked
    assert plain == ([((3,), (64,), (np.uint32(9),), {"shared_mem": 16})] if error or not asked else [])


def test_arrays_of_a_prepared_launch_are_replaced_for_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers and other arrays stay, and so do all arguments of the next call."""

    class Array:
        def __init__(self, address: int):
            self.data = type("Data", (), {"ptr": address})

    class Function:
        kernel = type("Kernel", (), {"ptr": 7})

        def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int) -> None:
            passed.append([a if isinstance(a, np.generic) else a.data.ptr for a in arguments])

    def launched(config: Any, function: Any, places: Any, nothing: None) -> int:
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
        passed.append([kind.from_address(at).value for kind, at in zip(types, places, strict=True)])
        return refused

    passed: list[list[Any]] = []
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda: type("Stream", (), {"ptr": 5}))
    monkeypatch.setattr(dependent_launch, "dependencies", lambda stream: 1)
    for refused in (0, 801):
        passed.clear()
        launch = DependentFunction(Function(), launched).prepared((3, 64, 16), (Array(1), Array(2), np.uint32(1)))
        for instead in ({1: Array(8)}, None):
            launch(instead)
        assert passed == [[8, 2, 1]] * (2 if refused else 1) + [[1, 2, 1]] * (2 if refused else 1)


@pytest.mark.parametrize(("status", "count", "told"), [(0, 3, 0), (1, 1, 1), (1, 2, 2), (2, 1, 0)])
def test_what_the_next_launch_waits_for(status: int, count: int, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def info(stream: Any, *places: Any) -> int:
        assert stream.value == 5
        places[0]._obj.value, places[4]._obj.value = status, count
        return 0

    monkeypatch.setattr(dependent_launch, "_capture_info", lambda: info)
    assert dependent_launch.dependencies(5) == told
    monkeypatch.setattr(dependent_launch, "_capture_info", lambda: lambda *places: 1)
    assert dependent_launch.dependencies(5) == 2, "the driver does not say"


@pytest.mark.gpu
def test_the_driver_tells_what_a_launch_waits_for() -> None:
    one, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    kernel = cupy.RawKernel(SLOW, "slow")
    kernel.compile()
    a, b = (cupy.zeros(64, cupy.uint16) for _ in range(2))
    cupy.cuda.get_current_stream().synchronize()
    assert dependent_launch.dependencies(one.ptr) == 0
    with one:
        one.begin_capture(mode=2)
        kernel((1,), (64,), (a, b, np.uint32(0), np.uint32(1)))
        told = [dependent_launch.dependencies(one.ptr)]
        other.wait_event(recorded(one))
        with other:
            kernel((1,), (64,), (a, b, np.uint32(1), np.uint32(1)))
        kernel((1,), (64,), (a, b, np.uint32(2), np.uint32(1)))
        one.wait_event(recorded(other))
        told.append(dependent_launch.dependencies(one.ptr))
        one.end_capture()
    assert told == [1, 2]


def recorded(stream: Any) -> Any:
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


@pytest.mark.gpu
@pytest.mark.parametrize("front", ["memset", "copy", "slow kernel", "two lanes"])
@pytest.mark.parametrize("kind", ["split_k", "packed_product"])
def test_an_early_launch_waits_for_the_launch_before_it(front: str, kind: str, rng: np.random.Generator) -> None:
    """Within a graph, in each way; and one after the other, the second of which writes over what the first reads."""
    if kind == "split_k":
        case = convolved("early", last(DType.F16, 1, 256, 14, 14), SAME, (3, 3), 256)
    else:
        case = alone(DType.F16, (2, 4096), Weights(DType.I4, 4096, 4096, 32))
    assert case.kernel is not None
    launcher = Launcher()
    slow = cupy.RawKernel(SLOW, "slow")
    slow.compile()
    (x,), (y,) = case.graph.inputs, case.outputs
    assert x.type == y.type
    count = x.type.size
    tried = 0
    for way in variants_of(case.kernel):
        if not (way.launches[0].dependent and launcher.runs(way)):
            continue
        tried += 1
        arrays = case.arrays(rng)
        held: dict[tuple[Value, TensorType], Any] = {}

        def memory(value: Value, type: TensorType, held: Any = held, arrays: Any = arrays) -> Any:
            if (value, type) not in held:
                array = arrays[value] if value in arrays else np.zeros(type.shape, type.dtype.numpy)
                held[value, type] = cupy.asarray(to_codes(pack(np, array, type), type.dtype))
            return held[value, type]

        there, back = memory(x, x.type), memory(y, y.type)
        later = cupy.empty_like(there)
        first = launcher.bind(way, memory)
        # the second reads what the first has written, and writes over what it read
        second = launcher.bind(way, lambda v, t: back if v is x else there if v is y else memory(v, t))  # noqa: B023
        stream, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture(mode=2)
            if front == "memset":
                there.data.memset_async(0x3A, there.nbytes, stream)
            elif front == "copy":
                there.data.copy_from_device_async(later.data, there.nbytes, stream)
            else:
                lanes = [stream, other] if front == "two lanes" else [stream]
                if other in lanes:
                    other.wait_event(recorded(stream))
                each = count // len(lanes)
                for i, lane in enumerate(lanes):
                    with lane:
                        slow((1,), (256,), (later, there, np.uint32(i * each), np.uint32(each)))
                if other in lanes:
                    stream.wait_event(recorded(other))
            first()
            second()
            graph = stream.end_capture()
        for _ in range(REPLAYS):
            new = rng.standard_normal(x.type.shape).astype(np.float16)
            if front == "memset":
                new = np.full(x.type.shape, np.array([0x3A3A], np.uint16).view(np.float16)[0])
            later.set(pack(np, new, x.type).view(np.uint8), stream=stream)  # other streams do not wait for this copy
            graph.launch(stream)
            stream.synchronize()
            got = [unpack(a.get().view(np.float16), x.type) for a in (back, there)]
            want = case.reference({**arrays, x: new})
            assert_same(case, got[:1], want)
            assert_same(case, got[1:], case.reference({**arrays, x: got[0]}))
    assert tried >= 2
