"""Fork processes from one that has loaded what all of them need.

A new Python process takes a second to load it where files are read slowly, longer if several do so at the same time.
The server is a process with one thread, so it may fork, unlike this one. It forks a process for each message, says how
each one ended, and ends with this process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO

from fusec.system import parent_death

MESSAGE_BYTES = 1 << 16
_START = (
    "import sys; sys.path[:] = {path!r}; from fusec.system.fork_server import serve; "
    "serve({channel}, {handle}, {module!r}, {arguments!r})"
)


class ForkedProcess:
    """A process that a server forks, with the part of the interface of `subprocess.Popen` that this package uses."""

    def __init__(self, server: ForkServer, number: int, stdin: TextIO, stdout: TextIO):
        self.stdin, self.stdout = stdin, stdout
        self._server, self._number = server, number
        self._ended = threading.Event()
        self._pid, self._code = threading.Event(), -signal.SIGKILL
        self._known_pid = 0

    @property
    def pid(self) -> int:
        self._pid.wait()
        return self._known_pid

    def kill(self) -> None:
        """Kill the process; safe to call when it has ended."""
        if not self._ended.is_set():
            self._server.tell({"kill": self._number})

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end. Return its status, or the negative number of the signal that ended it."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return self._code

    def note(self, message: Mapping[str, int]) -> None:
        """Note what the server says about the process."""
        if "pid" in message:
            self._known_pid = message["pid"]
            self._pid.set()
        if "code" in message:
            self._code = message["code"]
            self._pid.set()
            self._ended.set()


class ForkServer:
    """A server process. Raises OSError if it does not start.

    module, arguments: its `preload` is called with these before the first process is forked
    environment: all variables of the server and its processes
    """

    def __init__(self, module: str, arguments: Sequence[Any], environment: Mapping[str, str]):
        handle = parent_death.handle()
        self._channel, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = {"channel": channel.fileno(), "handle": handle, "module": module, "arguments": list(arguments)}
        with channel:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START.format(path=sys.path, **given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[handle, channel.fileno()],
            )
        self._lock = threading.Lock()
        self._processes: dict[int, ForkedProcess] = {}  # that have not ended
        self._count = 0
        self._is_closing = self.has_ended = False
        threading.Thread(target=self._read, name="fusec-fork-server", daemon=True).start()

    def fork(self, module: str, arguments: Sequence[Any], errors: int) -> ForkedProcess:
        """Fork a process that runs `main` of a module. Raises OSError if the server has ended.

        errors: descriptor of its stderr
        """
        inner_in, outer_in = os.pipe()
        outer_out, inner_out = os.pipe()
        stdin, stdout = os.fdopen(outer_in, "w", encoding="utf-8"), os.fdopen(outer_out, encoding="utf-8")
        with self._lock:
            self._count += 1
            process = ForkedProcess(self, self._count, stdin, stdout)
            self._processes[self._count] = process
            order = {"fork": self._count, "module": module, "arguments": list(arguments)}
            try:
                if self.has_ended or self._is_closing:
                    raise BrokenPipeError("the server that forks processes has ended")
                socket.send_fds(self._channel, [json.dumps(order).encode()], [inner_in, inner_out, errors])
            except OSError:
                del self._processes[self._count]
                stdin.close()
                stdout.close()
                raise
            finally:
                os.close(inner_in)
                os.close(inner_out)
        return process

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message; an ended server ignores it."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send(json.dumps(message).encode())

    def close(self) -> None:
        """Fork no more, and end the server when its last process has ended."""
        with self._lock:
            self._is_closing = True
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        with self._lock:
            if self._is_closing and not self._processes:
                with contextlib.suppress(OSError):
                    self._channel.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        """Note what the server says until it ends."""
        while True:
            try:
                text = self._channel.recv(MESSAGE_BYTES)
            except OSError:
                text = b""
            if not text:
                break
            message = json.loads(text)
            with self._lock:
                process = self._processes[message["number"]]
                if "code" in message:
                    del self._processes[message["number"]]
            process.note(message)
            self._end_if_unused()
        with self._lock:
            self.has_ended = True
            left, self._processes = list(self._processes.values()), {}
            self._channel.close()
        for process in left:
            process.note({"code": -signal.SIGKILL})
        self._process.kill()
        self._process.wait()


class OpenServer:
    """The server that this process has open, or none, for as long as somebody wants it.

    It belongs to a key, which says what it has loaded.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key, self._wanted = "", 0
        self._server: ForkServer | None = None

    def want(self) -> None:
        """Hold a server that is opened from now on, until `release`."""
        with self._lock:
            self._wanted += 1

    def open(self, key: str, start: Callable[[], ForkServer]) -> None:
        """Start a server, unless there is one or nobody wants it. Raises OSError if it does not start."""
        with self._lock:
            if self._wanted and self._server is None:
                self._key, self._server = key, start()

    def of(self, key: str | None = None) -> ForkServer | None:
        """Return the server if it belongs to a key; None stands for any."""
        with self._lock:
            return self._server if key in (None, self._key) else None

    def release(self) -> None:
        """Close the server if nobody wants it any more."""
        with self._lock:
            self._wanted -= 1
            server = None if self._wanted else self._server
            self._server = self._server if self._wanted else None
        if server is not None:
            server.close()


OPEN = OpenServer()


def serve(channel: int, handle: int, module: str, arguments: Sequence[Any]) -> None:
    """Fork processes until the parent closes the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    held = os.dup(handle)  # for the processes, since `hold` closes it
    parent_death.hold(handle)
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes)
    with contextlib.suppress(Exception):  # a process that needs what is missing says so
        importlib.import_module(module).preload(*arguments)
    with socket.socket(fileno=channel) as parent, selectors.DefaultSelector() as selector:
        selector.register(parent, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        numbers: dict[int, int] = {}  # by process id
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            with contextlib.suppress(BlockingIOError):
                os.read(woken, MESSAGE_BYTES)
            for pid, code in _ended(numbers):
                parent.send(json.dumps({"number": numbers.pop(pid), "code": code}).encode())
            if parent not in ready:
                continue
            text, descriptors, *_ = socket.recv_fds(parent, MESSAGE_BYTES, 3)
            if not text:
                break
            message = json.loads(text)
            if "kill" in message:
                for pid, number in numbers.items():
                    if number == message["kill"]:
                        os.kill(pid, signal.SIGKILL)
                continue
            pid = os.fork()
            if not pid:
                selector.close()
                parent.close()
                os.close(woken)
                _run(message["module"], message["arguments"], descriptors, held)
            for descriptor in descriptors:
                os.close(descriptor)
            numbers[pid] = message["fork"]
            parent.send(json.dumps({"number": message["fork"], "pid": pid}).encode())
    for pid in numbers:
        os.kill(pid, signal.SIGKILL)


def _ended(pids: Mapping[int, int]) -> list[tuple[int, int]]:
    """Return the processes that have ended, with their status."""
    found: list[tuple[int, int]] = []
    for pid in pids:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            found.append((pid, os.waitstatus_to_exitcode(status)))
    return found


def _run(module: str, arguments: Sequence[Any], descriptors: Sequence[int], held: int) -> None:
    """Run `main` of a module in a forked process, and exit."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for place, descriptor in enumerate(descriptors):
            os.dup2(descriptor, place)
            os.close(descriptor)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
        parent_death.hold(held)
        code = int(importlib.import_module(module).main(*arguments) or 0)
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001  # a forked process must not return to the loop of the server
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)
