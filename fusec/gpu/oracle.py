"""Ask the real cuDNN whether graphs are legal for a target: in child processes, with a memory.

cuDNN runs in workers so that a graph that kills it is a refusal, not the end of this process, and so that
two cores answer twice as fast (it holds Python's lock while it plans).
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.metadata
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from fusec.cache import Store
from fusec.cudnn_graph import CudnnGraph
from fusec.errors import TargetError
from fusec.gpu.deviceless import find_library
from fusec.gpu.worker import decode, encode
from fusec.hazards import deadly, misread
from fusec.target import Target
from fusec.verdict import Refused, Verdict

SCHEMA = 1  # of remembered answers: raise it when their meaning changes
TIMEOUT_S = 300.0  # a graph of 64 pointwise ops was measured to build in 43 s
MAX_WORKERS = 4


class _Worker:
    """One child process and its two pipes."""

    def __init__(self, target: Target, device: bool):
        command = [sys.executable, "-m", "fusec.gpu.worker", target.name, *(["device"] if device else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        hello = json.loads(self._line() or "{}")
        if "ready" not in hello:
            self.close()
            raise TargetError(hello.get("failed", "the cuDNN worker did not start; see `fusec doctor`"))
        self.versions: dict[str, Any] = hello["ready"]

    def ask(self, graph: CudnnGraph) -> Verdict | None:
        """The verdict, or None if the process died or hung over it."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(graph.to_json()) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        line = self._line()
        return decode(json.loads(line)) if line.endswith("\n") else None

    def _line(self) -> str:
        """One whole line within TIMEOUT_S, else the empty string."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            return self.process.stdout.readline() if selector.select(TIMEOUT_S) else ""

    def death(self) -> str:
        """How the process ended, in words."""
        try:
            code = self.process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return f"cuDNN gave no answer in {TIMEOUT_S:.0f} s"
        if code < 0:
            return f"cuDNN killed its process with {signal.Signals(-code).name}"
        return f"cuDNN ended its process with status {code}"

    def close(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        self.process.wait()


class Oracle:
    """Verdicts on graphs for one target. `device` asks this machine's GPU instead of the description.

    Answers are remembered in memory and in `store`, by graph, target and the versions of cuDNN, its
    frontend and NVRTC. Raises TargetError if a piece that honest answers need is missing.
    """

    def __init__(self, target: Target, *, store: Store | None = None, workers: int | None = None, device: bool = False):
        self.target = target
        self.device = device
        self.asked = 0  # graphs put to cuDNN in earnest
        self._store = store if store is not None else Store()
        self._limit = workers or min(os.cpu_count() or 1, MAX_WORKERS)
        self._memory: dict[str, Verdict] = {}
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._all: list[_Worker] = []
        self._lock = threading.Lock()
        self._environment = _environment(target, device)
        atexit.register(self.close)

    def judge(self, graphs: Sequence[CudnnGraph], progress: Callable[[int, int], None] | None = None) -> list[Verdict]:
        """One verdict per graph, in order; equal graphs are asked once."""
        new = {g.key: g for g in graphs if g.key not in self._memory}
        for key, graph in list(new.items()):
            hazard = deadly(graph) or misread(graph)
            if hazard:
                self._memory[key] = Refused("validate", "FUSEC_HAZARD", hazard)
                del new[key]
        remembered = self._store.get(self._entry(key) for key in new) if new else {}
        for key in list(new):
            text = remembered.get(self._entry(key))
            if text is not None:
                self._memory[key] = decode(json.loads(text))
                del new[key]
        if new:
            self._ask(list(new.values()), progress)
        return [self._memory[g.key] for g in graphs]

    def _ask(self, graphs: list[CudnnGraph], progress: Callable[[int, int], None] | None) -> None:
        with ThreadPoolExecutor(min(self._limit, len(graphs))) as pool:
            futures = {pool.submit(self._put, graph): graph for graph in graphs}
            for done, future in enumerate(as_completed(futures), 1):
                key, verdict = futures[future].key, future.result()
                self._memory[key] = verdict
                # at once: an interrupted run keeps what it learned
                self._store.put({self._entry(key): json.dumps(encode(verdict))})
                if progress is not None:
                    progress(done, len(graphs))

    def _put(self, graph: CudnnGraph) -> Verdict:
        worker = self._take()
        verdict = worker.ask(graph)
        with self._lock:
            self.asked += 1
        if verdict is not None:
            self._idle.put(worker)
            return verdict
        death = worker.death()
        with self._lock:
            self._all.remove(worker)
        worker.close()
        return Refused("crash", "FUSEC_CRASH", death)

    def _take(self) -> _Worker:
        """An idle worker, else a new one: there are never more questions under way than the limit."""
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self.target, self.device)
            with self._lock:
                self._all.append(worker)
            return worker

    def _entry(self, key: str) -> str:
        return f"{self._environment}:{key}"

    def close(self) -> None:
        """End the workers; the oracle may be asked again and starts new ones."""
        atexit.unregister(self.close)
        with self._lock:
            workers, self._all = self._all, []
        self._idle = queue.SimpleQueue()
        for worker in workers:
            worker.close()

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _environment(target: Target, device: bool) -> str:
    """What an answer depends on besides the graph, as a digest; nothing of CUDA is loaded for it."""
    versions = [_version("nvidia-cudnn-frontend"), _backend_version(), _nvrtc_version()]
    text = json.dumps([SCHEMA, target.digest, device, versions])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _backend_version() -> str:
    return "|".join(_version(f"nvidia-cudnn-cu{major}") for major in (13, 12))


def _nvrtc_version() -> str:
    path = find_library("libnvrtc-builtins.so.*")
    return path.name if path else ""
