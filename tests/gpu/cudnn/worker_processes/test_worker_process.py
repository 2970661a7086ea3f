"""Test workers that are closed while a thread waits for them: the thread wakes, and no process stays."""

from __future__ import annotations

import io
import os
import selectors
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from gpu.cudnn_graphs import conv

from fusec.errors import TargetError
from fusec.gpu.cudnn import worker
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.worker_processes import worker_process
from fusec.gpu.cudnn.worker_processes.worker_process import EndedError, WorkerDeath, WorkerProcess
from fusec.plans.sqlite_cache import Store
from fusec.targets.target import Target, load

SOON_S = 2.0


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose worker comes up, then reads for ever and answers nothing."""
    program = """
        import sys, time
        def main(name, device):
            print('{"ready": {"cudnn": 1}}', flush=True)
            time.sleep(600)
    """
    (tmp_path / "silent_worker.py").write_text(textwrap.dedent(program))
    monkeypatch.syspath_prepend(tmp_path)
    return "silent_worker"


@pytest.fixture
def mute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose worker does not even come up."""
    (tmp_path / "mute_worker.py").write_text("import time\ndef main(name, device): time.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "mute_worker"


def started(action: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """A thread that waits for a worker by now, and what it will have got."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(action())
        except TargetError as error:
            got.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(0.1)
    return thread, got


def test_a_thread_that_waits_for_an_answer_wakes_when_the_worker_is_closed(
    silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between `register` and `select` the pipe was closed: epoll forgets it, and the thread slept for 300 s."""

    class Slow(selectors.EpollSelector):
        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            time.sleep(0.3)
            return super().select(timeout)

    worker = WorkerProcess(load("h200"), False, silent)
    worker.wait_ready()
    monkeypatch.setattr(worker_process.selectors, "DefaultSelector", Slow)
    thread, got = started(lambda: worker.exchange({}))
    start = time.monotonic()
    worker.close()
    thread.join(SOON_S)
    assert not thread.is_alive()
    assert time.monotonic() - start < SOON_S
    assert [type(answer) for answer in got] == [WorkerDeath]
    assert isinstance(worker.exchange({}), WorkerDeath)
    worker.close()


def test_a_worker_that_is_not_up_yet_can_be_closed(mute: str) -> None:
    worker = WorkerProcess(load("h200"), False, mute)
    thread, got = started(worker.wait_ready)
    worker.close()
    thread.join(SOON_S)
    assert [type(answer) for answer in got] == [EndedError]
    assert not Path(f"/proc/{worker.pid}").exists()


def test_an_oracle_that_is_closed_ends_the_workers_that_come_up(
    mute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a thread asks for afterwards, on behalf of a question from before."""
    monkeypatch.setattr("fusec.gpu.cudnn.worker_processes.worker_process.WorkerProcess.__init__.__defaults__", (mute,))
    oracle = Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=2)
    oracle.start()
    thread, got = started(lambda: oracle.judge([conv("relu")]))
    end = time.monotonic() + 10
    while oracle._waiting != 2 or len(oracle._new) != 2:
        assert time.monotonic() < end
        time.sleep(0.01)
    pids = [worker.pid for worker in oracle._new]
    oracle.close()
    thread.join(SOON_S)
    assert [(verdict.stage, verdict.code) for verdict in got[0]] == [("crash", "FUSEC_WORKER_ENDED")], (
        "no budget was set"
    )
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(EndedError):
        oracle._take(epoch=0)


def test_a_worker_dies_with_its_parent_while_it_computes(tmp_path: Path) -> None:
    """It holds Python's lock and reads nothing. The thread that started it has ended, which must not matter."""
    program = """
        import sys, threading
        from fusec.gpu.cudnn.worker_processes.worker_process import WorkerProcess
        from fusec.targets.target import Target, load
        workers = []
        def start():
            workers.append(WorkerProcess(load("h200"), False, "busy_worker"))
            workers[-1].wait_ready()
        for _ in range(2):
            thread = threading.Thread(target=start); thread.start(); thread.join()
        print(*(w.pid for w in workers), flush=True)
        sys.stdin.read()
    """
    (tmp_path / "busy_worker.py").write_text(
        'def main(name, device):\n    print(\'{"ready": {"cudnn": 1}}\', flush=True)\n    sum(range(10**12))\n'
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(worker_process.__file__).parents[4]}"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as parent:
        assert parent.stdout is not None
        pids = parent.stdout.readline().split()
        assert len(pids) == 2
        time.sleep(0.2)
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    end = time.monotonic() + 0.5
    while time.monotonic() < end and any(_runs(pid) for pid in pids):
        time.sleep(0.01)
    assert not any(_runs(pid) for pid in pids)


def _runs(pid: str) -> bool:
    """Tell if a process runs, and is no zombie that nobody has collected yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("device", [True, False])
def test_the_gpu_is_initialised_while_a_worker_loads_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, device: bool
) -> None:
    opened: list[str] = []

    @contextmanager
    def woken(target: str) -> Generator[None]:
        opened.append(target)
        yield
        opened.append("answers")

    def answers(target: Target, on_gpu: bool) -> tuple[int, dict[str, Any]]:
        assert opened == (["h200"] if device else [])
        return 1, {}

    monkeypatch.setattr(worker, "woken", woken)
    monkeypatch.setattr(worker, "_answers", answers)
    for name in ("check_nvrtc", "load_nvrtc", "bring_up", "load_cudnn"):
        monkeypatch.setattr(worker, name, lambda *_: "13.0")
    for name in ("dup", "dup2"):  # the output stays this process's
        monkeypatch.setattr(worker.os, name, lambda *_: None)
    monkeypatch.setattr(worker.os, "fdopen", lambda *_, **__: io.StringIO())
    monkeypatch.setattr(worker.signal, "signal", lambda *_: None)
    monkeypatch.setattr(worker.sys, "stdin", [])
    assert worker.main("h200", device) == 0
    assert opened == (["h200", "answers"] if device else [])
