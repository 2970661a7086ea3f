"""Test what runs on a GPU with a stand-in for CuPy and NCCL whose device memory is the host's."""

from __future__ import annotations

import ctypes
import queue
import threading
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cupy")
from fusec.errors import ExecutionError, TargetError
from fusec.scale import device_transfer, nccl
from fusec.scale.batch_runner import BatchRunner
from fusec.scale.device_pool.pool_worker import start_next
from fusec.scale.shared_block import SharedBlock, layout


class DeviceArray(np.ndarray):
    """An array on the host that has its address where CuPy has it."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)


ENTERED: list[Any] = []
FAULTS: list[str] = []  # that waiting for an event raises


class Stream:
    ptr = 7

    def __init__(self, **options: Any):
        self.waits: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)

    def synchronize(self) -> None:
        self.waits.append("host")

    def __enter__(self) -> None:
        ENTERED.append(self)

    def __exit__(self, *_: object) -> None:
        ENTERED.pop()


class Recorder:
    """The functions of CuPy that are used, with what they were asked to do."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.copies: list[tuple[int, int]] = []  # bytes and stream
        self.kinds: list[int] = []
        self.current = Stream()
        runtime = SimpleNamespace(
            memcpyAsync=self._copy, hostRegister=self._register, hostUnregister=self.registered.pop
        )
        self.cuda = SimpleNamespace(
            Stream=Stream,
            Event=Event,
            runtime=runtime,
            get_current_stream=lambda: ENTERED[-1] if ENTERED else self.current,
        )
        self.uint8 = np.uint8
        self.ascontiguousarray = lambda array: np.ascontiguousarray(array).view(DeviceArray)

    def empty(self, size: int, dtype: Any) -> DeviceArray:
        return np.empty(size, dtype).view(DeviceArray)

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.kinds.append(kind)
        ctypes.memmove(target, source, nbytes)
        self.copies.append((nbytes, stream))

    def _register(self, address: int, nbytes: int, flags: int) -> None:
        self.registered[address] = nbytes


class Event:
    def __init__(self, **options: Any):
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        if FAULTS:
            raise RuntimeError(FAULTS.pop())


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(device_transfer, "cupy", made)
    monkeypatch.setattr(nccl, "cupy", made)
    return made


def test_inputs_are_copied_ahead_of_their_run(recorder: Recorder, rng: np.random.Generator) -> None:
    upload, block = device_transfer.DeviceUpload(), SharedBlock()
    arrays = {
        "x": rng.standard_normal((3, 4)).astype(np.float32),
        "half": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
        "narrow": rng.standard_normal(5).astype(ml_dtypes.float8_e4m3fn),
        "empty": np.zeros((0, 2), np.int64),
    }
    feeds = dict(zip(arrays, block.views(block.put(list(arrays.values()))), strict=True))
    wait = upload(0, [block] * 4, feeds)
    assert recorder.registered == {block.raw.ctypes.data: block.raw.nbytes}
    assert recorder.copies == [(48, Stream.ptr), (10, Stream.ptr)]
    assert not recorder.current.waits
    sent = wait()
    assert [event.stream is upload._stream for event in recorder.current.waits] == [True]
    for name, array in arrays.items():
        assert sent[name].dtype == array.dtype
        assert np.array_equal(sent[name], array)
        assert np.shares_memory(sent[name], block.raw) == (name == "narrow"), "CuPy lacks this type"
    place = sent["x"].ctypes.data
    assert upload(0, [block], feeds)()["x"].ctypes.data == place, "a slot keeps its memory"
    assert upload(1, [block], feeds)()["x"].ctypes.data != place


def test_a_block_that_grows_is_registered_again(recorder: Recorder) -> None:
    upload, block = device_transfer.DeviceUpload(), SharedBlock()
    for size in (10, 2 << 20):
        x = np.arange(size, dtype=np.float32)
        feeds = {"x": block.views(block.put([x]))[0]}
        assert np.array_equal(upload(0, [block], feeds)()["x"], x)
        assert recorder.registered == {block.raw.ctypes.data: block.raw.nbytes}


def test_blocks_are_registered_as_long_as_they_are_used(recorder: Recorder) -> None:
    """Memory that is freed while it is registered cannot be registered again."""
    upload, block = device_transfer.DeviceUpload(), SharedBlock()
    upload(0, [block], {"x": block.views(block.put([np.arange(3)]))[0]})
    assert recorder.registered
    del upload
    assert not recorder.registered


def test_inputs_in_several_blocks(recorder: Recorder) -> None:
    """A batch may lie in buffers that the caller filled, and in the slot's own block."""
    upload, blocks = device_transfer.DeviceUpload(), [SharedBlock(), SharedBlock()]
    arrays = {"x": np.arange(3, dtype=np.float32), "y": np.arange(5)}
    feeds = {
        name: block.views(block.put([array]))[0] for (name, array), block in zip(arrays.items(), blocks, strict=True)
    }
    sent = upload(0, blocks, feeds)()
    assert recorder.registered == {block.raw.ctypes.data: block.raw.nbytes for block in blocks}
    for name, array in arrays.items():
        assert np.array_equal(sent[name], array)


def test_results_are_copied_without_a_wait(recorder: Recorder, rng: np.random.Generator) -> None:
    """Into page-locked memory, on the stream that computes them. An error of the device is raised by the wait."""
    download, block = device_transfer.DeviceDownload(), SharedBlock()
    results = [rng.standard_normal((4, 3)).astype(np.float32), np.zeros((0, 2), np.float32), np.arange(6).reshape(2, 3)]
    given = [results[0], results[1], np.asfortranarray(results[2])]
    places = block.views(layout([(array.dtype, array.shape) for array in results]))
    wait = download(block, places, [array.view(DeviceArray) for array in given])
    assert recorder.registered == {block.raw.ctypes.data: block.raw.nbytes}
    assert recorder.copies == [(48, Stream.ptr), (48, Stream.ptr)]
    assert recorder.kinds == [device_transfer.TO_HOST] * 2
    assert recorder.current.waits == [], "nothing waits before it is asked to"
    wait()
    for place, result in zip(places, results, strict=True):
        np.testing.assert_array_equal(place, result)
    FAULTS.append("misaligned address")
    with pytest.raises(ExecutionError, match="the GPU reported an error: misaligned address"):
        download(block, places, [array.view(DeviceArray) for array in given])()


class OnDevice:
    """Stands for an array on a device, which is none of NumPy."""

    def __init__(self, array: np.ndarray):
        self.array = array

    def __mul__(self, factor: int) -> np.ndarray:
        return self.array * factor


class Device:
    """Stands for an executable on a GPU: its results are computed when the wait ends."""

    def __init__(self, dtype: str):
        self.inputs = [SimpleNamespace(name="x")]
        self.outputs = [SimpleNamespace(name="y", dtype=np.dtype(dtype), shape=(3,))]
        self.outs: list[Any] = []

    def run(self, names: Any, feeds: Any, out: Any = None) -> list[Any]:
        self.outs.append(out)
        result = np.asarray(feeds["x"] * 2).astype(self.outputs[0].dtype)
        if out:
            out["y"][...] = result
        return [result]


@pytest.mark.parametrize(("dtype", "waits"), [("float32", True), ("bfloat16", False)])
def test_the_next_batch_starts_before_the_results_are_there(
    dtype: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Types that CuPy lacks are copied by the call itself."""
    monkeypatch.setattr("fusec.runtime.Executable", Device)
    events: list[str] = []

    def upload(slot: int, blocks: Any, feeds: Any) -> Any:
        return lambda: {name: OnDevice(array) for name, array in feeds.items()}

    def download(block: SharedBlock, places: Any, results: Any) -> Any:
        events.append("started")

        def wait() -> None:
            events.append("waited")
            places[0][...] = results[0]

        return wait

    slots = [(SharedBlock(), SharedBlock()) for _ in range(2)]
    runner = BatchRunner(Device(dtype), slots, [], (upload, download))  # type: ignore[arg-type]
    pending = []
    for slot in range(2):
        x = np.arange(3, dtype=np.float32) + slot
        job = {"slot": slot, "inputs": [("x", -1, record) for record in slots[slot][0].put([x])]}
        pending.append(runner.start(job, runner.ahead(job)()))
    assert events == ["started", "started"] * waits
    for slot, results in enumerate(pending):
        (y,) = slots[slot][1].views(results())
        np.testing.assert_array_equal(y.astype(np.float32), 2 * (np.arange(3) + slot))
    assert events == ["started", "started", "waited", "waited"] * waits


@pytest.mark.parametrize("starts_ahead", [True, False])
def test_a_batch_that_runs_alone_waits_for_the_others(starts_ahead: bool) -> None:
    """So that it is known which batch ended a worker. On the host every batch runs alone."""
    events: list[str] = []
    jobs: Any = queue.SimpleQueue()
    started: Any = queue.Queue()

    def start(job: Any, feeds: Any) -> Any:
        events.append(f"start {feeds}")
        return lambda: events.append(f"end {feeds}")

    for name, alone in (("a", False), ("b", False), ("c", True), ("d", False)):
        jobs.put(({"alone": alone}, lambda name=name: name))
    runner: Any = SimpleNamespace(starts_ahead=starts_ahead, start=start)
    running = threading.Thread(target=lambda: [start_next(runner, jobs, started) for _ in range(4)], daemon=True)
    running.start()
    if starts_ahead:
        running.join(0.5)
        assert events == ["start a", "start b"], "c waits"
    for _ in range(4):
        _, results = started.get(timeout=10)
        results()
        started.task_done()
    running.join(10)
    together, ended = ["start a", "start b"], ["end a", "end b"]
    first = [*together, *ended] if starts_ahead else [together[0], ended[0], together[1], ended[1]]
    assert events == [*first, "start c", "end c", "start d", "end d"]


class Group:
    """NCCL's group with one worker, which doubles what it averages."""

    def __init__(self, size: int, group: bytes, rank: int):
        assert (size, group, rank) == (2, b"\x01\x02\xff", 1)  # CuPy takes no other type
        self.calls: list[tuple[int, ...]] = []

    def allReduce(self, *arguments: int) -> None:  # noqa: N802  # CuPy's name
        self.calls.append(arguments)

    def broadcast(self, *arguments: int) -> None:
        self.calls.append(arguments)


def test_collectives_of_nccl(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(available=True, NcclCommunicator=Group, get_unique_id=lambda: b"\x01\x02\xff")
    monkeypatch.setattr(nccl, "_nccl", lambda: library)
    communicator = nccl.NcclCommunicator(1, 2, nccl.unique_id())
    for dtype, code in ((np.float16, 6), (np.float32, 7), (np.float64, 8), (ml_dtypes.bfloat16, 9)):
        block = np.zeros(5, dtype).view(DeviceArray)
        communicator.mean(block)
        address = block.ctypes.data
        assert communicator._nccl.calls.pop() == (address, address, 5, code, 4, Stream.ptr)
    assert communicator.calls == 4
    communicator._side.ptr = 9
    communicator.start_mean(block)  # part of a step, which counts as one call
    assert communicator.calls == 4
    assert communicator._nccl.calls.pop()[-1] == 9, "on a stream of its own"
    assert [event.stream for event in communicator._side.waits] == [recorder.current], "after what the caller queued"
    assert not recorder.current.waits
    communicator.join()
    assert [event.stream for event in recorder.current.waits] == [communicator._side]
    block = np.zeros(5, np.uint64).view(DeviceArray)
    communicator.broadcast(block)
    assert communicator._nccl.calls.pop() == (block.ctypes.data, block.ctypes.data, 40, 1, 0, Stream.ptr)


@pytest.mark.filterwarnings("ignore:(?s).*nccl library could not be loaded")
def test_missing_nccl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from cupy.cuda import nccl as library

    monkeypatch.setattr(library, "available", False, raising=False)
    with pytest.raises(TargetError, match="needs NCCL: pip install"):
        nccl.unique_id()
