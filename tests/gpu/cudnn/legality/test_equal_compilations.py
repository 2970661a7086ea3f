"""Test that a compilation waits for an equal one, and for no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from gpu.cudnn_graphs import pointwise

from fusec.gpu.cudnn.legality.equal_compilations import after_equal_ones, wait_for_equal
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import Legal
from fusec.system.machine_locks import MachineLocks
from fusec.targets.target import load

FIRST, SECOND = (pointwise(mode, (1, 8, 64)) for mode in ("exp", "neg"))
FOREVER = float("inf")


def nothing() -> None: ...


def asks(folder: Path, *graphs: CudnnGraph, end: float = FOREVER, how: str = "quick") -> bool:
    """Compile what needs verdicts on these graphs; tell if that waited for another one."""
    with after_equal_ones(how):
        return wait_for_equal(graphs, MachineLocks(folder, 1), nothing, end)


@contextmanager
def other_compilation(folder: Path, *graphs: CudnnGraph) -> Generator[Callable[[], None]]:
    """Compile in another thread, as another process would; yields a function that ends it."""
    claimed, ends = threading.Event(), threading.Event()

    def compiles() -> None:
        with after_equal_ones("quick"):
            assert not wait_for_equal(graphs, MachineLocks(folder, 1), nothing, FOREVER)
            claimed.set()
            assert ends.wait(60)

    with ThreadPoolExecutor(1) as threads:
        done: Future[None] = threads.submit(compiles)
        assert claimed.wait(60)
        try:
            yield ends.set
        finally:
            ends.set()
    done.result()


def test_an_equal_compilation_waits_for_the_end_of_the_first(tmp_path: Path) -> None:
    with other_compilation(tmp_path, FIRST, SECOND) as end, ThreadPoolExecutor(1) as threads:
        waits = threads.submit(asks, tmp_path, SECOND, FIRST)
        time.sleep(0.2)
        assert not waits.done()
        end()
        assert waits.result(60)


def test_another_model_does_not_wait(tmp_path: Path) -> None:
    with other_compilation(tmp_path, FIRST):
        end = time.monotonic() + 4.0  # so that a fault shows soon
        assert not asks(tmp_path, SECOND, end=end)
        assert not asks(tmp_path, FIRST, SECOND, end=end)
        assert not asks(tmp_path, FIRST, how="full", end=end)


def test_only_the_first_graphs_of_a_compilation_make_a_claim(tmp_path: Path) -> None:
    """A process that holds a claim waits for no other, so there is no deadlock."""
    locks = MachineLocks(tmp_path, 1)
    with other_compilation(tmp_path, SECOND), after_equal_ones("quick"):
        assert not wait_for_equal([FIRST], locks, nothing, FOREVER)
        with after_equal_ones("quick"):
            assert not wait_for_equal([SECOND], locks, nothing, FOREVER)
        assert not wait_for_equal([SECOND], locks, nothing, FOREVER)


def test_without_a_compilation_nothing_is_claimed(tmp_path: Path) -> None:
    with other_compilation(tmp_path, FIRST):
        assert not wait_for_equal([FIRST], MachineLocks(tmp_path, 1), nothing, FOREVER)


def test_a_compilation_waits_no_longer_than_half_of_its_budget(tmp_path: Path) -> None:
    with other_compilation(tmp_path, FIRST):
        begin = time.monotonic()
        assert asks(tmp_path, FIRST, end=begin + 6.0)
        assert 3.0 <= time.monotonic() - begin < 6.0


@pytest.mark.cudnn
def test_who_waited_asks_nothing_that_the_other_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.sqlite"
    with (
        Oracle(load("h200"), store=Store(path), workers=1) as first,
        Oracle(load("h200"), store=Store(path), workers=1) as second,
        ThreadPoolExecutor(1) as threads,
    ):

        def compiles() -> list[object]:
            with after_equal_ones("quick"):
                return list(second.judge([FIRST, SECOND]))

        monkeypatch.setattr(second, "device", True)  # where plans are timed, too
        monkeypatch.setattr(second, "_ask", lambda *_: pytest.fail("it asks again"))
        with other_compilation(first.locks._folder.parent, FIRST, SECOND) as end:
            waits = threads.submit(compiles)
            first.judge([FIRST, SECOND])
            time.sleep(0.2)
            assert not waits.done()
            end()
            assert [type(verdict) for verdict in waits.result(60)] == [Legal, Legal]
