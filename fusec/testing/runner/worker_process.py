"""Control a worker from its parent: start it, send and receive messages, and describe its end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

from fusec.errors import FusecError
from fusec.ir import Graph
from fusec.system import parent_death
from fusec.testing.case import Case
from fusec.testing.example_codec import encode
from fusec.testing.failure import DIED, HUNG, Failure
from fusec.testing.finding_folder import Finding
from fusec.testing.runner.database import default_folder
from fusec.testing.runner.worker import HUNG_STATUS

CHECK_S = 60.0  # time limit when a finding runs again
# the worker gets the import path of this process, so that it finds the same fusec and the user's modules
_START = (
    "import sys; sys.path[:] = {path!r}; from fusec.system.parent_death import hold; hold({handle}); "
    "from fusec.testing.runner.worker import main; main()"
)
# one thread per library, because each core already has one process
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# sender (None: a thread of the parent) and message (None: the output of the child has ended)
Inbox = queue.SimpleQueue["tuple[Child | None, dict[str, Any] | None]"]


class Child:
    """One worker process. Its messages come to `inbox`.

    heard: time of its last message.
    hung: stack at which it hung, if it reported that.
    """

    def __init__(self, inbox: Inbox, hash_seed: int = 0):
        env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), **{k: os.environ.get(k, "1") for k in _ONE_THREAD}}
        env.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(default_folder() / "hypothesis"))  # else the current folder
        handle = parent_death.handle()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # see close
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START.format(path=sys.path, handle=handle)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            pass_fds=[handle],
            text=True,
            encoding="utf-8",
        )
        self.heard = time.monotonic()
        self.hung = ""
        self._inbox = inbox
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: Mapping[str, Any]) -> None:
        """Send a message. A dead process ignores it, since its end is reported in the inbox."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):  # ValueError: the pipe is closed
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                break  # the process died while it wrote this line
            self.heard = time.monotonic()
            message = json.loads(line)
            if "hung" in message:
                self.hung = message["hung"] or "unknown stack"
            else:
                self._inbox.put((self, message))
        self._inbox.put((self, None))

    def death(self, silent_s: float | None = None) -> Failure:
        """Wait for the end of the process and describe it. `silent_s`: kill it first, since it was silent so long."""
        if silent_s is not None:
            self._process.kill()
            return Failure(HUNG, "Hang", f"the process was silent for {silent_s:.0f} s")
        code = self._process.wait()
        if code == HUNG_STATUS or self.hung:
            return Failure(HUNG, "Hang", "the property did not return in time", traceback=self.hung)
        if code < 0:
            name = signal.Signals(-code).name
            return Failure(DIED, name, f"the process was killed by {name}: {self.last_line()}")
        return Failure(DIED, "exit", f"the process ended with status {code}: {self.last_line()}")

    def kill(self) -> None:
        self._process.kill()

    def last_line(self) -> str:
        """Return the last line of its stderr."""
        self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, self._errors.tell() - 4000))
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1][-300:] if lines else "it wrote nothing to stderr"

    def close(self) -> None:
        """Kill the process and free its resources. Safe to call twice."""
        self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # unsent messages can be lost, since the process is dead
                    pipe.close()
        self._errors.close()


class Prober:
    """Runner of a property in its own process. A new process replaces one that dies."""

    def __init__(self, property: str, hang_s: float):
        self.property = property
        self.hang_s = hang_s
        self._inbox: Inbox = queue.SimpleQueue()
        self._child: Child | None = None

    def check(self, graph: Graph, case: Case) -> Failure | None:
        """Run the property on an example. Returns its failure, or None if it holds."""
        if self._child is None:
            self._child = Child(self._inbox)
        self._child.tell({"check": self.property, "example": encode(graph, case), "hang_s": self.hang_s})
        silent = None
        try:
            _, message = self._inbox.get(timeout=self.hang_s + 20.0)  # 20: to start and import
        except queue.Empty:
            message, silent = None, self.hang_s + 20.0
        if message is not None and "checked" in message:
            told = message["checked"]
            return None if told is None else Failure(*told[:3], where=told[3], traceback=told[4])
        if message is not None:
            self.close()
            raise FusecError(str(message.get("failed") or message.get("defect")))
        failure = self._child.death(silent)
        self.close()
        return failure

    def end(self) -> None:
        """Kill the process from another thread. `check` then sees its death."""
        child = self._child
        if child is not None:
            child.kill()

    def close(self) -> None:
        """Kill the process and free its resources."""
        if self._child is not None:
            self._child.close()
            self._child = None
            self._inbox = queue.SimpleQueue()  # drops late messages of the old process


def check_apart(finding: Finding, hang_s: float = CHECK_S) -> Failure | None:
    """Run a finding's property in its own process."""
    prober = Prober(finding.property, hang_s)
    try:
        return prober.check(finding.graph, finding.case)
    finally:
        prober.close()
