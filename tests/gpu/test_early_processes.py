"""Test what a first compilation starts before most of fusec is imported."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from fusec.compiler import early_processes
from fusec.compiler.early_processes import with_early_processes
from fusec.gpu.cudnn import worker_pool, worker_process
from fusec.gpu.cudnn.worker_pool import WorkerPool
from fusec.gpu.cudnn.worker_process import EarlyWorkers
from fusec.plans.cache_folder import ANSWERS
from fusec.targets.target import load

H200 = load("h200")


class Worker:
    """A process that is only closed."""

    def __init__(self, target: Any, device: bool) -> None:
        self.is_closed = False
        self.versions: dict[str, Any] = {"cudnn": 1}
        MADE.append(self)

    def wait_ready(self) -> None:
        pass

    def close(self) -> None:
        self.is_closed = True

    @staticmethod
    def close_all(*groups: list[Worker]) -> None:
        for group in groups:
            for worker in group:
                worker.close()


MADE: list[Worker] = []


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A machine with an H200 and an empty cache, on which processes only seem to start. The list says what started."""
    what: list[str] = []
    early = EarlyWorkers()
    MADE.clear()
    for module in (worker_pool, worker_process):
        monkeypatch.setattr(module, "WorkerProcess", Worker)
    for module in (worker_pool, early_processes):
        monkeypatch.setattr(module, "EARLY", early)
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    monkeypatch.setenv("FUSEC_WORKERS", "4")
    monkeypatch.setattr(early_processes.device, "wanted", lambda target: H200 if target in ("auto", "h200") else None)
    monkeypatch.setattr(early_processes.device, "is_described", lambda target: True)
    monkeypatch.setattr(early_processes.device, "hold_context", lambda: what.append("context"))
    monkeypatch.setattr(early_processes.driver_stand_in, "is_available", lambda: True)
    monkeypatch.setattr(early_processes, "start_compilers", lambda libraries: what.append("compilers"))
    return what


def joined() -> None:
    for thread in threading.enumerate():
        if thread.name == "fusec-early":
            thread.join()


@with_early_processes
def compile(model: object = None, **options: Any) -> list[Worker]:
    joined()
    return list(MADE)


def test_half_of_the_workers_start_before_the_rest_is_imported(started: list[str]) -> None:
    assert len(compile()) == 2
    assert sorted(started) == ["compilers", "context"]
    assert all(worker.is_closed for worker in MADE), "nobody took them"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"target": "cpu"}, []),
        ({"target": "t4"}, []),
        ({"simulate": True}, []),
        ({"oracle": object()}, []),
        ({"family": object()}, []),
        ({"target": "h200"}, ["compilers", "context"]),
    ],
)
def test_they_start_only_for_this_gpu_and_for_one_model(
    started: list[str], options: dict[str, Any], expected: list[str]
) -> None:
    assert bool(compile(**options)) == bool(expected)
    assert sorted(started) == expected


def test_nothing_but_the_context_starts_where_answers_are_stored(started: list[str], tmp_path: Path) -> None:
    (tmp_path / ANSWERS).touch()
    assert compile() == []
    assert started == ["context"]


def test_a_pool_takes_the_workers_that_were_started_for_its_target(started: list[str], tmp_path: Path) -> None:
    @with_early_processes
    def asks() -> list[Any]:
        joined()
        taken: list[Any] = []
        for target, device in ((load("t4"), False), (H200, True), (H200, False)):
            pool = WorkerPool(target, tmp_path, workers=1, device=device)
            taken.append(pool._take())
            pool._finalizer.detach()
        return taken

    other, on_device, same = asks()
    assert [MADE.index(worker) for worker in (other, on_device, same)] == [2, 3, 0]
    assert [worker.is_closed for worker in MADE] == [False, True, False, False]


def test_workers_end_although_they_start_after_the_compilation(started: list[str]) -> None:
    early = EarlyWorkers()
    early.open()
    early.close()
    early.start(H200, device=False)
    assert MADE[-1].is_closed


def test_threads_have_ended_when_a_compilation_fails(started: list[str]) -> None:
    @with_early_processes
    def fails() -> None:
        raise ValueError("no model")

    with pytest.raises(ValueError, match="no model"):
        fails()
    assert not any(thread.name == "fusec-early" for thread in threading.enumerate())
    assert all(worker.is_closed for worker in MADE)


def test_driver_is_imported_without_the_packages_that_take_long() -> None:
    code = "import sys, fusec.driver; print([name for name in ('numpy', 'onnx', 'fusec.ir') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
