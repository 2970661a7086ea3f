"""Test that batches are copied while others run, on a stand-in for a device that reads its inputs late."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import assert_close

import fusec
from fusec.errors import ExecutionError
from fusec.scale import batch_pipeline
from fusec.scale.batch_pipeline import DEPTH, BatchPipeline
from fusec.scale.row_batches import BatchOptions, run_rows

Array = np.ndarray[Any, Any]
ROWS = 4
SECONDS = 20.0  # after which a test that waits has failed


class Later:
    """Stands for an array on a device: a copy of memory of the host that may not have happened yet."""

    def __init__(self, source: Array):
        self.source = source


class Device:
    """Stands for an executable on a GPU. A batch reads its inputs and writes its results when its result is asked for.

    events: what was asked, with the first number of each batch.
    fails: the first number of the batch that fails.
    refused: the first number of the batch that cannot be started.
    held: events that the results of batches wait for, by first number.
    """

    def __init__(self) -> None:
        self.inputs = [SimpleNamespace(name="x", shape=(ROWS, 2))]
        self.outputs = [SimpleNamespace(name="y", dtype=np.dtype(np.float32), shape=(ROWS, 2))]
        self.events: list[tuple[str, int]] = []
        self.fails = self.refused = -1
        self.held: dict[int, threading.Event] = {}

    def run(self, names: None, feeds: dict[str, Later]) -> list[Later]:
        return [feeds["x"]]

    def upload(self, slot: int, blocks: Any, feeds: dict[str, Array]) -> Any:
        return lambda: {name: Later(array) for name, array in feeds.items()}

    def download(self, block: Any, places: list[Array], results: list[Later]) -> Any:
        (place,), source = places, results[0].source
        number = int(source[0, 0])
        if number == self.refused:
            raise ExecutionError("the batch does not fit")
        self.events.append(("start", number))

        def wait() -> None:
            if number in self.held:
                assert self.held[number].wait(SECONDS)
            self.events.append(("end", number))
            if number == self.fails:
                raise ExecutionError("the GPU reported an error")
            place[...] = source * 2

        return wait


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr("fusec.runtime.Executable", Device)
    monkeypatch.setattr(batch_pipeline, "transfer_for", lambda model: (model.upload, model.download))
    return made


def numbered(count: int) -> Array:
    """Return rows whose first number is the number of the row."""
    return np.stack([np.arange(count), np.ones(count)], 1).astype(np.float32)


def test_batches_start_before_the_results_of_others_are_there(device: Device) -> None:
    pipeline, rows = BatchPipeline(device), numbered(6 * ROWS - 1)  # type: ignore[arg-type]
    for _ in range(2):  # the memory is used again
        result = run_rows(pipeline, {"x": rows}, BatchOptions(pad=True))["y"]
        np.testing.assert_array_equal(result, 2 * rows)
    firsts, ahead = range(0, 6 * ROWS, ROWS), DEPTH - 1  # a slot is being filled
    events = [("start", first) for first in firsts[:ahead]]
    for ended, started in zip(firsts, firsts[ahead:-1], strict=False):
        events += [("end", ended), ("start", started)]
    events += [("start", firsts[-1]), *(("end", first) for first in firsts[-DEPTH:])]
    assert device.events == 2 * events


def in_thread(run: Callable[[], Array]) -> Callable[[], Array]:
    """Begin a call in a thread, and return a function that waits for its result."""
    found: list[Array] = []
    thread = threading.Thread(target=lambda: found.append(run()), daemon=True)
    thread.start()

    def wait() -> Array:
        thread.join(SECONDS)
        assert found, "the call failed, or did not end"
        return found[0]

    return wait


def test_a_call_starts_while_the_last_batches_of_another_run(device: Device) -> None:
    """So the GPU is not idle between two files of a worker with two threads."""
    device.held = {ROWS: threading.Event()}  # the last batch of the first call
    pipeline, rows, later = BatchPipeline(device), numbered(2 * ROWS), 1000 + numbered(6 * ROWS)  # type: ignore[arg-type]
    first = in_thread(lambda: run_rows(pipeline, {"x": rows})["y"])
    while ("end", 0) not in device.events:
        threading.Event().wait(0.001)
    second = in_thread(lambda: run_rows(pipeline, {"x": later})["y"])
    np.testing.assert_array_equal(second(), 2 * later)
    assert ("end", ROWS) not in device.events
    device.held[ROWS].set()
    np.testing.assert_array_equal(first(), 2 * rows)


def test_calls_of_several_threads_get_their_own_results(device: Device, rng: np.random.Generator) -> None:
    pipeline = BatchPipeline(device)  # type: ignore[arg-type]
    for _ in range(20):
        given = [1000 * number + numbered(int(rng.integers(1, 8 * ROWS))) for number in range(4)]
        calls = [in_thread(lambda x=x: run_rows(pipeline, {"x": x}, BatchOptions(pad=True))["y"]) for x in given]
        for rows, result in zip(given, calls, strict=True):
            np.testing.assert_array_equal(result(), 2 * rows)


@pytest.mark.parametrize("where", ["device", "start", "batches", "take"])
def test_no_batch_runs_any_more_after_an_error(device: Device, where: str) -> None:
    """Else it would read its inputs while the next call writes over them."""
    pipeline = BatchPipeline(device)  # type: ignore[arg-type]
    given = numbered(ROWS)

    def batches() -> Iterator[dict[str, Array]]:
        for number in range(DEPTH + 1):
            if where == "batches" and number == DEPTH:
                raise ExecutionError("no more rows")
            yield {"x": given + number}

    def take(results: list[Array]) -> None:
        if where == "take":
            raise ExecutionError("no room")

    words = {"device": "GPU", "start": "fit", "batches": "rows", "take": "room"}
    for _ in range(DEPTH):  # memory that one of them did not give back would be missing in the end
        device.fails, device.refused = 0 if where == "device" else -1, 1 if where == "start" else -1
        with pytest.raises(ExecutionError, match=words[where]):
            pipeline.run(batches(), take)
    started, ended = ([first for what, first in device.events if what == word] for word in ("start", "end"))
    assert sorted(ended) == sorted(started)
    device.fails = device.refused = -1
    rows = numbered((DEPTH + 1) * ROWS)
    np.testing.assert_array_equal(in_thread(lambda: run_rows(pipeline, {"x": rows})["y"])(), 2 * rows)


@pytest.mark.gpu
def test_rows_run_on_the_gpu(model: Path, meaning: Callable[[Array], Array], rng: np.random.Generator) -> None:
    """More batches than are in flight, and twice, so that memory is used again and the steps are replayed."""
    pipeline = BatchPipeline(fusec.compile(model, tune="none"))
    for count in (4 * (2 * DEPTH + 1), 4 * DEPTH - 1, 3):
        rows = rng.standard_normal((count, 6)).astype(np.float32)
        assert_close(run_rows(pipeline, {"x": rows}, BatchOptions(pad=True))["z"], meaning(rows), 1e-5)


@pytest.mark.gpu
def test_rows_of_two_threads_run_on_the_gpu(
    model: Path, meaning: Callable[[Array], Array], rng: np.random.Generator
) -> None:
    """As those of a Dask worker with two tasks."""
    pipeline = BatchPipeline(fusec.compile(model, tune="none"))
    given = [rng.standard_normal((4 * int(rng.integers(1, 4 * DEPTH)), 6)).astype(np.float32) for _ in range(10)]
    for first, second in zip(given[::2], given[1::2], strict=True):
        calls = [in_thread(lambda x=x: run_rows(pipeline, {"x": x})["z"]) for x in (first, second)]
        for rows, result in zip((first, second), calls, strict=True):
            assert_close(result(), meaning(rows), 1e-5)


def test_outputs_that_cannot_be_joined_are_refused() -> None:
    """A model of any shapes may give rows of another shape for each batch."""
    shapes = iter([(ROWS, 2), (ROWS, 1)])
    specs = Device()
    model = SimpleNamespace(
        inputs=specs.inputs, outputs=specs.outputs, run=lambda names, feeds: [np.ones(next(shapes), np.float32)]
    )
    with pytest.raises(ExecutionError, match=r"output %y has rows of the shapes \[2\] and \[1\]"):
        run_rows(BatchPipeline(model), {"x": numbered(2 * ROWS)})  # type: ignore[arg-type]
