"""Run the processes of `fusec serve`: start them, start dead ones again, and end all when asked.

A worker process has the models and a device, a front end speaks HTTP. A crash of the CUDA driver or of a library ends
one worker only: its requests are refused, and another process takes its place.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace

from fusec.errors import FusecError
from fusec.serving.server.connection_dealer import ConnectionDealer
from fusec.serving.server.server_options import ServerOptions
from fusec.system import parent_death
from fusec.system.dataclass import dataclass

EXIT_BAD_MODEL = 3  # of a worker process that cannot load a model
_START = (
    "import sys; sys.path[:] = {path!r}; from fusec.system.parent_death import hold; hold({handle}); "
    "from fusec.serving.server.{module} import main; main()"
)
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
_STEADY_S = 10.0  # a process that ran for so long is started again immediately
_LONGEST_PAUSE_S = 30.0
_LONGEST_FOLDER = 70  # bytes: the path of a socket has at most 107 (unix(7)), and the names in the folder some 30
_log = logging.getLogger("fusec.serving")


@dataclass
class _Member:
    """One of the processes.

    again_at: the time at which it is started again.
    deaths: how often it died soon after its start, without a longer run in between.
    """

    name: str
    command: list[str]
    handles: tuple[int, ...]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    again_at: float = 0.0
    deaths: int = 0


def serve(options: ServerOptions, announce: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT. What is in progress then is still answered, within `drain_s`.

    announce: called with the URL once all models are ready.
    Raises FusecError if a package is missing, the port is taken, or a worker cannot load a model.
    """
    for package in ("aiohttp", "prometheus_client"):
        if importlib.util.find_spec(package) is None:
            raise FusecError(f"fusec serve needs {package}: pip install 'fusec[serve]'")
    with _listening(options) as listening, _signals() as signals:
        folder = tempfile.mkdtemp(prefix="fusec-serve-")  # only this user may enter it
        try:
            if len(folder.encode()) > _LONGEST_FOLDER:
                raise FusecError(f"{folder}: is too long a path for sockets: set TMPDIR to a shorter one")
            _Supervisor(replace(options, folder=folder), listening, signals).run(announce)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _signals() -> Generator[int]:
    """Return a descriptor from which the numbers of signals are read, as long as the block runs."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    handler = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda number, stack: None) for number in _SIGNALS}
    try:
        yield read
    finally:
        for number, action in before.items():
            signal.signal(number, action)
        signal.set_wakeup_fd(handler)
        os.close(read)
        os.close(write)


def _listening(options: ServerOptions) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FusecError(f"cannot listen on {options.host}:{options.port}: {reason}") from error


class _Supervisor:
    def __init__(self, options: ServerOptions, listening: socket.socket, signals: int):
        self._options, self._listening, self._signals = options, listening, signals
        text = options.to_json()
        self._workers = [self._member("worker.model_worker", n, text, str(n)) for n in range(len(options.devices))]
        self._dealer = ConnectionDealer(listening, options.front_ends)
        self._front_ends: list[_Member] = []
        for number in range(options.front_ends):
            handle = self._dealer.handle(number)
            member = self._member("front_end.front_end", number, text, str(number), str(handle), handles=(handle,))
            self._front_ends.append(member)

    def _member(self, module: str, number: int, *arguments: str, handles: tuple[int, ...] = ()) -> _Member:
        held = parent_death.handle()
        start = _START.format(path=sys.path, handle=held, module=module)
        name = module.rpartition(".")[2]
        return _Member(f"{name} {number}", [sys.executable, "-P", "-c", start, *arguments], (held, *handles))

    def run(self, announce: Callable[[str], None]) -> None:
        """Start all processes and watch them. The status of this process is that of the signal, or 0 after SIGTERM."""
        asked: int | None = None
        try:
            for member in (*self._workers, *self._front_ends):
                self._start(member)
            self._dealer.start(self._lives)
            announced = False
            while asked is None:
                asked = self._wait(0.05 if not announced else 1.0)
                self._watch(announced)
                if not announced and all(self._options.ready(n).exists() for n in range(len(self._front_ends))):
                    announced = True
                    announce(self._url())
            self._drain()
        finally:
            self._dealer.close()
            self._kill()
            self._dealer.close_channels()
        if asked == signal.SIGINT:
            raise KeyboardInterrupt

    def _lives(self, number: int) -> bool:
        process = self._front_ends[number].process
        return process is not None and process.poll() is None

    def _url(self) -> str:
        host, port = self._listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def _wait(self, seconds: float) -> int | None:
        """Wait for a signal; return one that asks this process to end."""
        ready = select.poll()  # because select takes no descriptor from 1024 on
        ready.register(self._signals, select.POLLIN)
        if not ready.poll(seconds * 1000):
            return None
        return next((number for number in os.read(self._signals, 256) if number != signal.SIGCHLD), None)

    def _start(self, member: _Member) -> None:
        env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": self._options.folder}
        member.started_at = time.monotonic()
        member.process = subprocess.Popen(
            member.command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if _has_descriptor() else subprocess.DEVNULL,
            env=env,
            pass_fds=member.handles,
            process_group=0,  # Ctrl-C reaches this process only, which lets the others answer first
        )

    def _watch(self, announced: bool) -> None:
        """Start dead processes again: immediately, or after a pause if they die soon after their start."""
        now = time.monotonic()
        for member in (*self._workers, *self._front_ends):
            process = member.process
            if process is not None and process.poll() is not None:
                self._died(member, process, announced, now)
            if member.process is None and now >= member.again_at:
                self._start(member)

    def _died(self, member: _Member, process: subprocess.Popen[bytes], announced: bool, now: float) -> None:
        from prometheus_client import multiprocess  # the extra `serve` installs it

        multiprocess.mark_process_dead(process.pid, self._options.folder)
        if process.returncode == EXIT_BAD_MODEL or not announced:
            raise FusecError(f"{member.name} did not start: status {process.returncode}, see above")
        member.deaths = 0 if now - member.started_at > _STEADY_S else member.deaths + 1
        pause_s = min(_LONGEST_PAUSE_S, 2.0 ** (member.deaths - 2)) if member.deaths > 1 else 0.0
        _log.warning("%s ended with status %d: started again in %g s", member.name, process.returncode, pause_s)
        member.process, member.again_at = None, now + pause_s

    def _drain(self) -> None:
        """End the front ends once they have answered; the workers are needed until then. Another signal ends all."""
        self._dealer.close()
        end = time.monotonic() + self._options.drain_s + 2.0
        processes = [member.process for member in self._front_ends if member.process is not None]
        for process in processes:
            process.terminate()
        while time.monotonic() < end and any(process.poll() is None for process in processes):
            if self._wait(0.2) is not None:
                return

    def _kill(self) -> None:
        for member in (*self._front_ends, *self._workers):
            if member.process is not None:
                member.process.kill()
                member.process.wait()


def _has_descriptor() -> bool:
    try:
        return sys.stderr.fileno() >= 0
    except (OSError, ValueError, AttributeError):
        return False
