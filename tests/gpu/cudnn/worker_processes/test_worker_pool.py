"""Test that the pools of several processes share the machine: as many workers compute as it has slots."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fusec.errors import TargetError
from fusec.gpu.cudnn.worker_processes import worker_pool
from fusec.gpu.cudnn.worker_processes.worker_pool import WorkerPool
from fusec.system.machine_locks import MachineLocks
from fusec.targets.target import load


class FakeProcess:
    """A worker that is ready immediately, and answers after a while."""

    lock = threading.Lock()
    running = most = 0

    def __init__(self, *_: object):
        self.versions = {"cudnn": 1}

    def wait_ready(self) -> None: ...

    def close(self) -> None: ...

    @staticmethod
    def close_all(*groups: list[Any]) -> None:
        for group in groups:
            group.clear()

    def exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            FakeProcess.running += 1
            FakeProcess.most = max(FakeProcess.most, FakeProcess.running)
        time.sleep(0.01)
        with self.lock:
            FakeProcess.running -= 1
        return question


def test_the_workers_of_eight_pools_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Locks on files exclude pools of one process as they exclude those of several."""
    monkeypatch.setattr(worker_pool, "WorkerProcess", FakeProcess)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(3)))
    with ExitStack() as stack, ThreadPoolExecutor(24) as threads:
        pools = [stack.enter_context(WorkerPool(load("h200"), tmp_path)) for _ in range(8)]
        assert {pool.workers for pool in pools} == {3}
        asked = [threads.submit(pool.exchange, {"ask": turn}) for turn in range(6) for pool in pools]
        answers = [future.result(timeout=60)[0] for future in asked]
    assert [answer["ask"] for answer in answers] == [turn for turn in range(6) for _ in pools]  # type: ignore[index]
    assert FakeProcess.most == 3


class SlowProcess(FakeProcess):
    """A worker that is ready, or fails, when the test says so."""

    go = threading.Event()
    fails = False
    begun = 0

    def __init__(self, *_: object):
        super().__init__()
        with self.lock:
            SlowProcess.begun += 1

    def wait_ready(self) -> None:
        assert self.go.wait(60)
        if self.fails:
            self.versions = {}
            raise TargetError("no such luck")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> type[SlowProcess]:
    monkeypatch.setattr(worker_pool, "WorkerProcess", SlowProcess)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(SlowProcess, "go", threading.Event())
    monkeypatch.setattr(SlowProcess, "begun", 0)
    return SlowProcess


def _begun(slow: type[SlowProcess], count: int) -> bool:
    """Wait until `count` workers have begun to start, and tell if no more do soon."""
    until = time.monotonic() + 30
    while slow.begun < count and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.1)
    return slow.begun == count


@pytest.mark.parametrize("fails", [False, True])
def test_half_of_the_workers_of_a_gpu_start_when_one_is_ready(
    tmp_path: Path, slow: type[SlowProcess], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """They also start where the first half failed, because one of them then reports the error."""
    monkeypatch.setattr(slow, "fails", fails)
    with WorkerPool(load("h200"), tmp_path, workers=8, device=True) as pool:
        pool.start(2)
        pool.start()
        assert _begun(slow, 4)
        slow.go.set()
        assert _begun(slow, 8)


def test_workers_that_wait_for_the_first_end_with_the_pool(tmp_path: Path, slow: type[SlowProcess]) -> None:
    pool = WorkerPool(load("h200"), tmp_path, workers=8, device=True)
    pool.start()
    assert _begun(slow, 4)
    pool.close()
    slow.go.set()
    assert _begun(slow, 4)


def test_workers_without_a_gpu_start_together(tmp_path: Path, slow: type[SlowProcess]) -> None:
    with WorkerPool(load("h200"), tmp_path, workers=8) as pool:
        pool.start()
        assert _begun(slow, 8)
        slow.go.set()


class HeldProcess(SlowProcess):
    """A worker that answers when the test says so."""

    asked = threading.Event()

    def wait_ready(self) -> None: ...

    def exchange(self, question: dict[str, Any]) -> dict[str, Any]:
        self.asked.set()
        assert self.go.wait(60)
        return question


def test_where_other_processes_use_all_cores_one_worker_answers_all(
    tmp_path: Path, slow: type[SlowProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight processes that each start eight workers would take minutes."""
    monkeypatch.setattr(worker_pool, "WorkerProcess", HeldProcess)
    monkeypatch.setattr(worker_pool, "RETRY_S", 0.01)
    monkeypatch.setattr(HeldProcess, "asked", threading.Event())
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(2)))
    with WorkerPool(load("h200"), tmp_path) as pool, ExitStack() as other, ThreadPoolExecutor(3) as threads:
        other.enter_context(MachineLocks(tmp_path, 2).slot(lambda: None))
        asked = [threads.submit(pool.exchange, {"ask": 0})]
        assert HeldProcess.asked.wait(60)
        asked.append(threads.submit(pool.exchange, {"ask": 1}))
        assert _begun(slow, 1), "the second question waits for the first worker"
        other.close()
        assert _begun(slow, 2), "a core is free, and that worker is busy"
        slow.go.set()
        assert [future.result(timeout=60)[0] for future in asked] == [{"ask": 0}, {"ask": 1}]
