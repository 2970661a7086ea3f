"""Run chunks of examples in a child process: JSON lines in, JSON lines out, until the input ends.

The current example is written to a file, so that the parent knows the example on which the process died.
A property that runs longer than `Task.hang_s` ends the process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusec.errors import FusecError
from fusec.ir import Graph
from fusec.system.json_child import ParentPipe
from fusec.testing.case import Case
from fusec.testing.child_process import HUNG_STATUS
from fusec.testing.example_codec import decode, encode
from fusec.testing.failure import Failure, SkippedError, attempt
from fusec.testing.finding_folder import check, load
from fusec.testing.resolve import property_of
from fusec.testing.runner.task import Task

TICK_S = 0.5
_HEAD = 16  # bytes of the first line of the file of the current example


class Current:
    """The current example, in a file that remains after the process dies.

    First line of the file: number of the running property (-1 for none), and number of examples of the process.
    since: time at which the property started, None if none runs.
    """

    def __init__(self, path: Path | None = None):
        self._file = None if path is None else os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._graph: Graph | None = None
        self.since: float | None = None

    def watch(self, number: int, graph: Graph, case: Case, examples: int = 0) -> None:
        if self._file is not None:
            if number >= 0 and graph is not self._graph:
                self._graph = graph
                data = json.dumps(encode(graph, case)).encode()
                os.pwrite(self._file, data, _HEAD)
                os.ftruncate(self._file, _HEAD + len(data))
            os.pwrite(self._file, b"%4d %10d\n" % (number, examples), 0)
        self.since = time.monotonic() if number >= 0 else None


def read_current(path: Path) -> tuple[int, int, dict[str, Any]] | None:
    """Read the file of a `Current`. Returns None if no property was running.

    Else returns the number of the property, the number of examples so far, and the encoded example.
    """
    try:
        head, _, data = path.read_bytes().partition(b"\n")
        number, examples = map(int, head.split())
        return (number, examples, json.loads(data)) if number >= 0 else None
    except (OSError, ValueError):
        return None


class Worker:
    """Worker: one thread reads commands, the main thread runs them, and a third one checks the time limit."""

    def __init__(self, pipe: ParentPipe):
        self.pipe = pipe
        self.jobs: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.chunks: Any = None  # of type Chunks, whose module needs Hypothesis; a replay does not need it
        self.current = Current()
        self.hang_s = float("inf")

    def listen(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if self.chunks is None or not self._take(message):
                self.jobs.put(message)
        os._exit(0)  # the parent is gone or has closed the pipe, so nobody needs the current result

    def _take(self, message: dict[str, Any]) -> bool:
        """Handle a message that need not wait for the current job; return False for a job."""
        if "stop" in message:
            self.chunks.stopping = True
        elif "know" in message:
            self.chunks.know(*message["know"])
        elif "without" in message:
            self.chunks.without.add(message["without"])
        else:
            return False
        return True

    def watch(self) -> None:
        while True:
            time.sleep(TICK_S)
            since = self.current.since
            if since is not None and time.monotonic() - since > self.hang_s:
                frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - the documented way to another thread
                frame = frames.get(threading.main_thread().ident or 0)
                words = "".join(traceback.format_stack(frame)) if frame is not None else ""
                self.pipe.tell({"hung": words})
                os._exit(HUNG_STATUS)

    def work(self) -> None:
        while True:
            message = self.jobs.get()
            if "task" in message:
                self._begin(message["task"])
            elif self.chunks is not None and self._take(message):
                continue  # it came while the worker started
            elif "chunk" in message:
                self._chunk(message["chunk"], message["count"])
            elif "replay" in message:
                self._replay(Path(message["replay"]))
            elif "check" in message:
                self._check(message)

    def _begin(self, task: dict[str, Any]) -> None:
        from fusec.testing.runner.chunk import Chunks  # needs Hypothesis
        from fusec.testing.runner.instrument import observe

        given = Task.from_json(task)
        self.current = Current(Path(given.current))
        self.hang_s = given.hang_s
        current = self.current

        def watch(number: int, graph: Graph, case: Case) -> None:
            current.watch(number, graph, case, chunks.counts_so_far)

        chunks = Chunks(given, self.pipe.tell, watch)
        observe(lambda: chunks.observed)
        self.chunks = chunks
        self.pipe.tell({"ready": True})

    def _chunk(self, index: int, count: int) -> None:
        from fusec.testing.runner.chunk import StopError

        before = self.chunks.counts_so_far
        try:
            self.chunks.run(index, count)
        except StopError:
            self.chunks.report()
        self.pipe.tell({"done": index, "examples": self.chunks.counts_so_far - before})

    def _replay(self, folder: Path) -> None:
        try:
            finding = load(folder)
        except FusecError as error:
            self.pipe.tell({"replayed": str(folder), "property": "", "message": f"cannot be replayed: {error}"})
            return
        failure = self._watched(finding.graph, finding.case, lambda: check(finding))
        self.pipe.tell(
            {
                "replayed": str(folder),
                "property": finding.property,
                "message": "" if failure is None else failure.message or failure.error,
                "how": "" if failure is None else failure.how,
                "doubt": failure is not None and failure.doubt,
                "signature": "" if failure is None else replace(finding, failure=failure).signature,
            }
        )

    def _check(self, message: dict[str, Any]) -> None:
        """Run one property on one example, and send its failure or None."""
        graph, case = decode(message["example"])
        property = property_of(message["check"])
        self.hang_s = message["hang_s"]
        try:
            failure = self._watched(graph, case, lambda: attempt(property, graph, case))
        except SkippedError as error:
            failure = Failure("error", "SkippedError", f"the property does not apply: {error}")
        words = ("how", "error", "message", "where", "traceback")  # the arrays stay here
        answer = None if failure is None else {name: getattr(failure, name) for name in words}
        self.pipe.tell({"checked": answer})

    def _watched(self, graph: Graph, case: Case, work: Callable[[], Failure | None]) -> Failure | None:
        self.current.watch(0, graph, case)
        try:
            return work()
        finally:
            self.current.watch(-1, graph, case)


def main() -> None:
    """Run commands until the input ends. Unexpected exceptions are sent to the parent with their traceback."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # because the parent handles Ctrl-C and closes the input
    pipe = ParentPipe()
    worker = Worker(pipe)
    for serve in (worker.listen, worker.watch):
        threading.Thread(target=serve, daemon=True).start()
    try:
        worker.work()
    except FusecError as error:
        pipe.tell({"failed": str(error)})
    except Exception:  # noqa: BLE001  # sent with its traceback; the parent raises it
        pipe.tell({"defect": traceback.format_exc()})
    os._exit(1)  # does not wait for the thread that reads the input


if __name__ == "__main__":
    main()
