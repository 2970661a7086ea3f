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

from fusec.gpu.cudnn import worker_pool
from fusec.gpu.cudnn.worker_pool import WorkerPool
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
