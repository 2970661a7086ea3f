"""Test processes that are forked from a server, and how their ends are told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from fusec.system.fork_server import ForkedProcess, ForkServer, OpenServer

CHILD = """
import os, signal, sys
loaded = []
def preload(*arguments): loaded.extend(arguments)
def main(what="echo"):
    if what == "fail": raise ValueError("no luck")
    if what == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    for line in sys.stdin:
        print(what, *loaded, os.environ["MARK"], line.strip(), flush=True)
    return 3
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "forked_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = ForkServer("forked_child", ("a", "b"), {**os.environ, "MARK": "mark"})
    yield made
    for process in FORKED:
        process.kill()
        process.stdin.close()
        process.stdout.close()
    FORKED.clear()
    made.close()
    wait_until(lambda: made.has_ended)


FORKED: list[ForkedProcess] = []


def fork(server: ForkServer, *arguments: str, errors: IO[bytes] | None = None) -> ForkedProcess:
    FORKED.append(server.fork("forked_child", arguments, 2 if errors is None else errors.fileno()))
    return FORKED[-1]


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_has_what_the_server_loaded_and_ends_with_its_input(server: ForkServer) -> None:
    one, other = fork(server), fork(server, "say")
    for process, what in ((other, "say"), (one, "echo")):
        process.stdin.write("hello\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{what} a b mark hello\n"
    assert one.pid != other.pid != server._process.pid
    one.stdin.close()
    assert one.wait(20) == 3
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.05)
    other.kill()
    assert other.wait(20) == -signal.SIGKILL
    assert other.stdout.read() == ""


def test_a_signal_and_an_error_end_one_process_alone(server: ForkServer) -> None:
    with tempfile.TemporaryFile() as errors:
        lives, dead, failed = fork(server), fork(server, "crash"), fork(server, "fail", errors=errors)
        assert dead.wait(20) == -signal.SIGSEGV
        assert failed.wait(20) == 1
        errors.seek(0)
        assert b"ValueError: no luck" in errors.read()
    lives.stdin.write("x\n")
    lives.stdin.flush()
    assert lives.stdout.readline() == "echo a b mark x\n"


def test_a_closed_server_ends_after_its_last_process(server: ForkServer) -> None:
    process = fork(server)
    server.close()
    with pytest.raises(OSError, match="has ended"):
        fork(server)
    time.sleep(0.1)
    assert not server.has_ended
    process.stdin.close()
    assert process.wait(20) == 3
    wait_until(lambda: server.has_ended)


def test_processes_end_where_the_server_is_killed(server: ForkServer) -> None:
    process = fork(server)
    assert process.pid
    server._process.kill()
    assert process.wait(20) == -signal.SIGKILL
    with pytest.raises(OSError, match="has ended"):
        fork(server)


def test_server_and_processes_end_with_the_parent(tmp_path: Path) -> None:
    (tmp_path / "forked_child.py").write_text(CHILD)
    code = (
        f"import sys, os, time; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from fusec.system.fork_server import ForkServer\n"
        "server = ForkServer('forked_child', (), dict(os.environ))\n"
        "print(server._process.pid, server.fork('forked_child', (), 2).pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(is_alive(pid) for pid in pids))


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_server_is_open_as_long_as_somebody_wants_it(server: ForkServer) -> None:
    open_server, started = OpenServer(), list[int]()

    def start() -> ForkServer:
        started.append(1)
        return server

    open_server.open("h200", start)
    assert open_server.of() is None and not started, "nobody wants it"
    for _ in range(2):
        open_server.want()
        open_server.open("h200", start)
    assert started == [1]
    assert open_server.of() is open_server.of("h200") is server and open_server.of("t4") is None
    open_server.release()
    assert open_server.of("h200") is server
    open_server.release()
    assert open_server.of() is None
    wait_until(lambda: server.has_ended)
