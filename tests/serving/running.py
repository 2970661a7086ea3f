"""Start `fusec serve` in a process of its own, and speak to it."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np


@dataclass
class Running:
    """A server: its address, the process that watches the others, and the folder of its temporary files."""

    address: str
    process: subprocess.Popen[str]
    folder: Path

    def children(self, module: str) -> list[int]:
        """Return the ids of the processes that run a module."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    command = (folder / "cmdline").read_bytes().decode()
                except (OSError, ValueError):
                    continue
                if parent == self.process.pid and f".{module} import" in command:
                    found.append(int(folder.name))
        return found

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Send a request, and return status, answer (JSON if it is that) and headers."""
        connection = http.client.HTTPConnection(self.address, timeout=30)
        try:
            connection.request(method, path, body, dict(headers or {}))
            answer = connection.getresponse()
            data = answer.read()
            told = json.loads(data) if "json" in answer.headers["Content-Type"] else data
            return answer.status, told, dict(answer.headers)
        finally:
            connection.close()

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def serving(*arguments: object) -> Generator[Running]:
    folder = tempfile.mkdtemp()  # tmp_path is too long for sockets
    process = subprocess.Popen(
        [sys.executable, "-m", "fusec", "serve", *map(str, arguments), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FUSEC_DEVICE": "none", "OMP_NUM_THREADS": "1", "TMPDIR": folder},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert " on http://" in line, line
        yield Running(urlparse(line.split()[-1]).netloc, process, Path(folder))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)  # processes that end at this moment may write there


def binary_request(arrays: Mapping[str, np.ndarray], datatype: str, **more: Any) -> tuple[bytes, dict[str, str]]:
    """Write a request with binary tensors by hand."""
    inputs = [
        {"name": n, "datatype": datatype, "shape": list(a.shape), "parameters": {"binary_data_size": a.nbytes}}
        for n, a in arrays.items()
    ]
    text = json.dumps({"inputs": inputs, **more}).encode()
    return text + b"".join(a.tobytes() for a in arrays.values()), {"Inference-Header-Content-Length": str(len(text))}


def at_once(count: int, run: Any) -> None:
    """Run a function with numbers 0 to count in as many threads."""
    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
