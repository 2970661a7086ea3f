"""Run a server in processes of its own, and count their CPU time."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from benchmarks.common.result_files import ROOT

# Each is in the command of a front end, the latter with a stub.
_FRONT_END = ("server.front_end.front_end import", "run('front_end.front_end')")
REGION = "images"  # name of the shared memory


@dataclass(frozen=True)
class Clients:
    """The load of a server: client processes, their connections and the rows of a request.

    stub_us: microseconds of a row and of a batch, if the server has a device that only waits. options: of the server.
    shared_memory: images are in shared memory, and requests refer to them.
    """

    processes: int
    connections: int
    seconds: float
    front_ends: int
    rows: int = 1
    stub_us: tuple[float, float] | None = None
    options: tuple[str, ...] = ()
    shared_memory: bool = False


@dataclass(frozen=True)
class Server:
    """A server that runs."""

    address: str
    pid: int


@contextmanager
def served(path: Path, clients: Clients) -> Generator[Server]:
    """Run `fusec serve`, and yield its address and its first process."""
    options = ["--port", "0", "--front-ends", str(clients.front_ends), *clients.options]
    options += ["--shared-memory"] * clients.shared_memory
    serve = ["fusec", "serve", str(path)]
    if clients.stub_us:
        serve = ["benchmarks.serving.stub_device", str(path), *(str(us / 1e6) for us in clients.stub_us)]
    command = [sys.executable, "-m", *serve, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    with killed_at_end([process]):  # its other processes end when the first one is killed
        try:
            assert process.stdout is not None
            yield Server(urlparse(process.stdout.readline().split()[-1]).netloc, process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)


@contextmanager
def killed_at_end(processes: Sequence[subprocess.Popen[str]]) -> Generator[None]:
    """Kill the processes that still run at the end of the block, also where an error or a time limit ends it."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def register(address: str, key: str, nbytes: int) -> None:
    """Tell a server about shared memory."""
    body = json.dumps({"key": key, "offset": 0, "byte_size": nbytes})
    connection = http.client.HTTPConnection(address)
    connection.request("POST", f"/v2/systemsharedmemory/region/{REGION}/register", body)
    reply = connection.getresponse()
    if reply.status != 200:
        raise SystemExit(reply.read().decode())
    connection.close()


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the CPU time of the processes of a server, by what they do."""
    found = {"front_ends": 0.0, "workers": 0.0}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            folder = Path("/proc") / child
            is_front_end = any(text in (folder / "cmdline").read_bytes().decode() for text in _FRONT_END)
            part = "front_ends" if is_front_end else "workers"
            ticks = (folder / "stat").read_text().rpartition(")")[2].split()[11:13]
            found[part] += sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")
    return found
