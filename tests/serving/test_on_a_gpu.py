"""Test the device of a worker, on stand-ins: which GPU it takes, and how batches get there."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.stand_in_gpu import Array, Machine, install
from gpu.test_backend import build

from fusec.errors import ExecutionError, TargetError
from fusec.serving import choose_device
from fusec.serving.choose_device import choose, devices_of
from fusec.serving.server.memory.request_memory import RequestMemory
from fusec.serving.server.memory.shared_arena import SharedArena
from fusec.serving.server.worker.batch_buffer import BatchBuffer, fetch, joined
from fusec.system.threaded_copy import ThreadedCopy

TEXT = """graph "g" (%x: f32[4,3,2,2], %k: i64[4]) {
  %y = relu(%x)
  %n = neg(%k)
  return %y, %n
}"""


def driver(gpus: int, in_use: bool = False) -> Callable[[], Any]:
    """A CUDA driver with GPUs, of which CUDA_VISIBLE_DEVICES shows some once it is initialised."""
    state = {"ready": in_use}

    def count(pointer: Any) -> int:
        if not state["ready"]:
            return 3
        visible = choose_device.os.environ.get("CUDA_VISIBLE_DEVICES")
        pointer._obj.value = gpus if visible is None else sum(int(name) < gpus for name in visible.split(","))
        return 0

    def init(flags: int) -> int:
        state["ready"] = True
        return 0

    return lambda: types.SimpleNamespace(cuInit=init, cuDeviceGetCount=count)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has not chosen a GPU."""
    monkeypatch.setattr(choose_device, "_chosen", {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    return monkeypatch


def test_a_number_hides_all_other_gpus(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(choose_device, "_driver", driver(4))
    assert choose("auto") is False
    assert choose("simulated") is True
    assert choose(2) is False
    assert choose_device.os.environ["CUDA_VISIBLE_DEVICES"] == "2"
    assert choose(2) is False
    with pytest.raises(TargetError, match="GPU 1 was asked for, but this process uses GPU 2"):
        choose(1)


def test_numbers_count_the_gpus_that_the_process_sees(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(choose_device, "_driver", driver(8))
    fresh.setenv("CUDA_VISIBLE_DEVICES", "5, 6")
    with pytest.raises(TargetError, match="GPU 2 was asked for, but the GPUs that this process sees are 0 to 1"):
        choose(2)
    choose(1)
    assert choose_device.os.environ["CUDA_VISIBLE_DEVICES"] == "6"


def test_a_gpu_must_exist_and_be_chosen_first(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(choose_device, "_driver", driver(2))
    with pytest.raises(TargetError, match="the driver finds no such GPU"):
        choose(2)
    fresh.delenv("CUDA_VISIBLE_DEVICES")
    fresh.setattr(choose_device, "_driver", driver(2, in_use=True))
    with pytest.raises(TargetError, match="CUDA is in use in this process already"):
        choose(0)


def test_devices_of_a_server(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(choose_device, "_driver", driver(3))
    assert devices_of("all") == [0, 1, 2]
    assert devices_of("0,2") == [0, 2]
    assert devices_of("simulated") == ["simulated"]
    fresh.setattr(choose_device, "_driver", lambda: None)
    assert devices_of("all") == ["simulated"]
    for wrong in ("", "gpu", "1,1", "-1"):
        with pytest.raises(TargetError, match="must be all, simulated, or numbers of GPUs"):
            devices_of(wrong)


@pytest.mark.parametrize("way", ["one call", "a call for each", "gathered"])
def test_rows_get_to_the_device(way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From where requests are, if that memory is page-locked, or from a page-locked copy."""
    pytest.importorskip("cupy")
    pytest.importorskip("cudnn")
    from fusec.gpu.launch import batched_copy

    machine, calls = Machine(), list[int]()
    install(machine, monkeypatch.setattr)

    def copy(target: int, spans: Sequence[tuple[int, int]], stream: int) -> None:
        calls.append(len(spans))
        for start, nbytes in spans:
            ctypes.memmove(target, start, nbytes)
            target += nbytes

    monkeypatch.setattr(batched_copy, "batched_copy", lambda: copy if way == "one call" else None)
    net = build(tmp_path, text=TEXT)
    rng = np.random.default_rng(0)
    requests = [
        {"x": rng.standard_normal((rows, 3, 2, 2)).astype(np.float32), "k": rng.integers(-9, 9, rows)}
        for rows in (1, 2)
    ]
    buffer = BatchBuffer(net, ThreadedCopy(1))
    for _ in range(3):  # step by step, recorded, replayed
        machine.copied.clear()
        calls.clear()
        feeds = buffer.fill(requests, 4, way != "gathered")
        copies = [kind for kind, _ in machine.copied]
        assert copies == [1] * (6 * (way == "a call for each")), "of each input: two requests, and a row of padding"
        assert calls == [3, 3] * (way == "one call")
        assert all(isinstance(array, Array) for array in feeds.arrays.values())
        waited = len(machine.waits)
        feeds.wait()
        assert len(machine.waits) == waited + 1, "the stream of the program waits for the copies"
        pending = fetch(net, ["y", "n"], net.run(None, feeds.arrays))
        assert pending.event is not None
        y, n = pending.wait().values()
        x = np.concatenate([request["x"] for request in requests])
        k = np.concatenate([request["k"] for request in requests])
        np.testing.assert_array_equal(y[:3], np.maximum(x, 0))
        np.testing.assert_array_equal(y[3], y[2], "padded with copies of the last row")
        np.testing.assert_array_equal(n[:3], -k)
        requests.reverse()


def test_spans_are_copied_by_one_call_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    from fusec.gpu.launch import batched_copy

    source, target, status = np.arange(50, dtype=np.uint8), np.zeros(12, np.uint8), 0
    asked: list[tuple[int, ...]] = []

    def driver(targets: int, sources: int, sizes: int, count: int, attributes: int, first: int, *more: int) -> int:
        table = [(ctypes.c_uint64 * count).from_address(place) for place in (targets, sources, sizes)]
        for place, start, nbytes in zip(*table, strict=True):
            ctypes.memmove(place, start, nbytes)
        order = ctypes.c_int.from_address(attributes).value
        asked.append((count, order, ctypes.c_uint64.from_address(first).value, *more))
        return status

    monkeypatch.setattr(batched_copy, "driver_function", {"cuMemcpyBatchAsync_v2": driver}.get)
    copy = batched_copy.batched_copy.__wrapped__()
    assert copy is not None
    start = source.ctypes.data
    copy(target.ctypes.data, [(start + 40, 3), (start, 4), (start + 7, 5)], 9)
    assert target.tolist() == [40, 41, 42, 0, 1, 2, 3, 7, 8, 9, 10, 11]
    assert asked == [(3, 1, 0, 1, 9)], "in the order of the stream, with one set of attributes from the first on"
    status = 801
    with pytest.raises(ExecutionError, match="refused to copy 1 spans to the device: CUDA error 801"):
        copy(target.ctypes.data, [(start, 1)], 9)
    monkeypatch.setattr(batched_copy, "driver_function", lambda name: None)
    assert batched_copy.batched_copy.__wrapped__() is None


def test_neighbours_in_memory_are_one_copy() -> None:
    assert joined([(0, 8), (8, 8), (24, 8), (16, 8), (24, 4), (28, 4)]) == [(0, 16), (24, 8), (16, 16)]
    assert joined([]) == []


def test_memory_of_requests_is_page_locked_until_it_is_released() -> None:
    machine = Machine()
    cupy = machine.cupy()
    arena = SharedArena(1 << 16)
    memory = RequestMemory(arena.handle, cupy)
    assert memory.page_locked
    assert len(machine.page_locked) == 1
    arena.memory[100:105] = b"bytes"
    rows = np.ndarray(5, np.uint8, memory.data, 100)
    assert machine.page_locked == [rows.ctypes.data - 100]
    del memory
    assert not machine.page_locked
    assert bytes(rows) == b"bytes", "it stays mapped while something reads it"


def test_memory_that_cannot_be_page_locked_is_named(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    machine.refuses_page_locks = True
    arena = SharedArena(1 << 16)
    assert not RequestMemory(arena.handle, machine.cupy()).page_locked
    assert "cannot be page-locked, so their rows are copied once more: operation not supported" in caplog.text
    assert not RequestMemory(arena.handle, np).page_locked
