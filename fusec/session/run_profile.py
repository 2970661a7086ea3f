"""Record the runs of a session, and write them as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fusec.errors import writing
from fusec.runtime import Executable
from fusec.schedule.program import Kind
from fusec.system import atomic_write


class RunProfile:
    """Events of a session: loading, compiling, each run, and the steps of each run.

    The steps of a run are timed alone after it, because a run replays them as one CUDA graph. They have a track of
    their own, on which they begin with the run.
    """

    def __init__(self, prefix: str):
        self.started_ns = time.time_ns()
        self._start = time.perf_counter()
        stamp = time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(self.started_ns // 10**9))
        self._path = f"{prefix}_{stamp}_{self.started_ns // 10**6 % 1000:03}.json"
        self._events: list[dict[str, Any]] = []

    @contextmanager
    def event(self, name: str) -> Generator[None]:
        """Record what happens inside as one event of the session."""
        start = self._now_us()
        try:
            yield
        finally:
            self._add("Session", name, start, self._now_us() - start, {})

    def steps(self, program: Executable, provider: str) -> None:
        """Time each step of the program that ran, over the values of the last run."""
        start_us = next(event["ts"] for event in reversed(self._events) if event["name"] == "model_run")
        _, times = program.time_us(1)
        libraries = program.libraries()
        for index, step in enumerate(program.compiled.program.steps):
            if step.kind is Kind.VIEW:
                continue
            arguments = {
                "op_name": step.signature,
                "node_index": str(index),
                "provider": provider,
                "library": libraries.get(step, step.kind.value),
                "output_type_shape": [{v.type.dtype.numpy.name: list(v.type.shape)} for v in step.outputs],
                "origin": [name for node in step.nodes for name in node.origin],
            }
            self._add("Node", f"{step.signature}_kernel_time", start_us, times[index][0], arguments, track=1)
            start_us += times[index][0]

    def write(self) -> str:
        """Write the events to a file, and return its name. Raises FusecError if it cannot be written."""
        with writing(self._path), atomic_write.written(Path(self._path).resolve(), durable=False) as file:
            file.write(json.dumps(self._events, indent=1).encode())
        return self._path

    def _now_us(self) -> float:
        return 1e6 * (time.perf_counter() - self._start)

    def _add(self, kind: str, name: str, start_us: float, us: float, arguments: dict[str, Any], track: int = 0) -> None:
        thread = track or threading.get_native_id()
        place = {"cat": kind, "pid": os.getpid(), "tid": thread, "ph": "X", "ts": start_us, "dur": us}
        self._events.append({**place, "name": name, "args": arguments})
