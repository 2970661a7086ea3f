"""Test batches that the caller of a pool writes into shared memory: no copy, and no buffer that is used twice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import assert_close
from scale.device_pool.faulty_worker import KILLS, KILLS_ONCE, SLOW

import fusec
from fusec.errors import ExecutionError
from fusec.scale.device_pool.input_buffers import InputBuffers
from fusec.scale.shared_block import SharedBlock
from fusec.system import threaded_copy
from fusec.system.threaded_copy import ThreadedCopy

Array = np.ndarray[Any, Any]
Meaning = Callable[[Array], Array]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the number of bytes of each array that this process copies into shared memory."""
    sizes: list[int] = []
    put = SharedBlock.put

    def counted(self: SharedBlock, arrays: Any, copy: Any = np.copyto) -> Any:
        sizes.extend(array.nbytes for array in arrays)
        return put(self, arrays, copy)

    monkeypatch.setattr(SharedBlock, "put", counted)
    return sizes


def filled(pool: Any, array: Array) -> Array:
    (buffer,) = pool.input_buffers().values()
    buffer[...] = array
    return buffer


def test_filled_buffers_are_not_copied_and_come_back_in_order(
    model: Path, meaning: Meaning, rng: np.random.Generator, copied: list[int]
) -> None:
    batches = rng.standard_normal((100, 4, 6)).astype(np.float32)
    with fusec.pool(model, devices=["cpu", "cpu"]) as pool:
        results = list(pool.map(filled(pool, batch) for batch in batches))
        assert not copied
        assert_close(results, meaning(batches), 1e-6)
        buffers = pool.input_buffers()
        assert {name: (array.shape, array.dtype) for name, array in buffers.items()} == {
            "x": ((4, 6), np.dtype(np.float32))
        }
        for batch in batches[:3]:  # one buffer may be filled again after its batch is done
            buffers["x"][...] = batch
            assert_close(pool(**buffers), meaning(batch), 1e-6)
        assert not copied
        assert_close(pool(batches[0]), meaning(batches[0]), 1e-6)
        assert copied == [batches[0].nbytes]
    assert buffers["x"].tolist() == batches[2].tolist(), "it is valid after the end of the pool"


@pytest.mark.usefixtures("faulty")
def test_a_buffer_is_not_lent_again_while_a_batch_waits_or_runs(
    model: Path, meaning: Meaning, rng: np.random.Generator
) -> None:
    """A slow worker makes the caller wait for buffers. One that came too early would spoil a batch that waits."""
    batches = rng.standard_normal((30, 4, 6)).astype(np.float32)
    batches[::10, 0, 0] = SLOW
    with fusec.pool(model, devices="cpu", depth=1) as pool:
        futures = [pool.submit(filled(pool, batch)) for batch in batches]
        assert_close([future.result() for future in futures], meaning(batches), 1e-6)


@pytest.mark.usefixtures("faulty")
def test_filled_buffers_outlive_their_workers(model: Path, meaning: Meaning, rng: np.random.Generator) -> None:
    batches = rng.standard_normal((30, 4, 6)).astype(np.float32)
    batches[7, 0, 0] = KILLS_ONCE
    with fusec.pool(model, devices=["cpu", "cpu"]) as pool:
        results: list[Array] = []
        for result in pool.map(filled(pool, batch) for batch in batches):
            results.append(result)
            if len(results) == 15:
                os.kill(pool.pids[0], signal.SIGKILL)
        assert pool.replaced == 2
        assert_close(results, meaning(batches), 1e-6)
        batches[7, 0, 0] = KILLS
        Path(os.environ["FAIL_ONCE_FILE"]).unlink()
        with pytest.raises(ExecutionError, match="2 workers ended"):
            pool(filled(pool, batches[7]))
        held = [pool.input_buffers() for _ in range(2 * 3 * 2 + 2)]  # none is lost with a batch that failed
        assert len({buffers["x"].ctypes.data for buffers in held}) == len(held)


def test_all_buffers_in_use_is_an_error_and_none_is_lost(model: Path) -> None:
    with fusec.pool(model, devices="cpu", depth=1) as pool:
        held = [pool.input_buffers() for _ in range(4)]
        with pytest.raises(ExecutionError, match="all 4 input buffers are in use, and no batch runs"):
            pool.input_buffers()
        part = held.pop()["x"][1:]
        with pytest.raises(ExecutionError, match="all 4 input buffers"):
            pool.input_buffers()  # a view holds its buffer
        del part
        held.append(pool.input_buffers())
    with pytest.raises(ExecutionError, match="the pool is closed"):
        pool.input_buffers()


def test_shapes_of_symbolic_inputs(tmp_path: Path, rng: np.random.Generator, copied: list[int]) -> None:
    from onnx import TensorProto, helper, save

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 1000]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Tanh", ["x"], ["y"])], "g", [x], [y])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), tmp_path / "m.onnx")
    with fusec.pool(tmp_path / "m.onnx", devices=["cpu"], shapes={"n": "1..1000"}) as pool:
        with pytest.raises(ExecutionError, match=r"shape of %x is .*give its sizes, as input_buffers\(x=\(8, 3\)\)"):
            pool.input_buffers()
        with pytest.raises(ExecutionError, match="no input %q"):
            pool.input_buffers(q=(3, 1000))
        for rows in (3, 700, 1):
            whole = pool.input_buffers(x=(rows + 1, 1000))["x"]
            whole[...] = rng.standard_normal(whole.shape)
            for part in (whole, whole[1:]):
                assert_close(pool(part), np.tanh(part.astype(np.float64)), 1e-6)
    assert not copied


def test_arrays_that_a_worker_cannot_read_in_place_are_copied(rng: np.random.Generator) -> None:
    lent, own = InputBuffers(1), np.zeros((4, 6), np.float32)
    x = lent.lend({"x": (np.dtype(np.float32), (4, 6))}, lambda: False)["x"]
    assert lent.place(x) == (0, ["f32", [4, 6], 0])
    assert lent.place(x[2:]) == (0, ["f32", [2, 6], 48])
    for array in (own, x[:, 1:], x.T, x.view(x.dtype.newbyteorder())):
        assert lent.place(array) is None


def test_a_waiting_caller_gets_the_buffer_that_is_let_go() -> None:
    lent = InputBuffers(1)
    held = [lent.lend({"x": (np.dtype(np.float32), (4,))}, lambda: True)]
    thread = threading.Timer(0.2, held.clear)
    thread.start()
    start = time.monotonic()
    assert lent.lend({"x": (np.dtype(np.int64), (9,))}, lambda: True)["x"].shape == (9,)
    assert time.monotonic() - start > 0.1


@pytest.mark.parametrize("shape", [(3, 1 << 20), (1, 3 << 20), (2, 3)])
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_copies_in_threads(
    shape: tuple[int, int], strided: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set[str]()
    copyto = np.copyto

    def watched(target: Array, source: Array) -> None:
        threads.add(threading.current_thread().name)
        copyto(target, source)

    monkeypatch.setattr(threaded_copy.np, "copyto", watched)
    source = rng.standard_normal((shape[0], shape[1] * (2 if strided else 1)), np.float32)[:, :: 2 if strided else 1]
    copy = ThreadedCopy(workers=1, threads=3)
    assert np.array_equal(copy.copy_of(source), source)
    large = source.nbytes > threaded_copy.PART_BYTES
    assert (len(threads) > 1) == large


@pytest.mark.parametrize("count", [1, 2, 64, 200])
def test_many_arrays_are_copied_in_threads(count: int, rng: np.random.Generator) -> None:
    sources = [rng.integers(0, 256, (1 + number % 3, 50_000), np.uint8) for number in range(count)]
    target = np.zeros((sum(map(len, sources)), 50_000), np.uint8)
    ends = np.cumsum([len(source) for source in sources])
    places = [target[end - len(source) : end] for source, end in zip(sources, ends, strict=True)]
    ThreadedCopy(workers=1, threads=3).each(list(zip(places, sources, strict=True)))
    assert np.array_equal(target, np.concatenate(sources))


def test_workers_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    assert [threaded_copy.threads_for(workers) for workers in (1, 2, 4, 8)] == [4, 4, 2, 1]
