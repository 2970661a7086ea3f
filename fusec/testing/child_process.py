"""Start a child process that answers lines of JSON, exchange messages with it, and describe its end.

The processes of the fuzzer are such children: workers, and the twin that compiles each graph once more.
"""

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
from pathlib import Path
from typing import Any

from fusec.plans import sqlite_cache
from fusec.system import parent_death
from fusec.testing.failure import DIED, HUNG, Failure

HUNG_STATUS = 86  # exit status of a child that found out itself that it hung
# The child gets the import path of this process, so that it finds the same fusec and the user's modules.
_START = (
    "import sys; sys.path[:] = {path!r}; from fusec.system.parent_death import hold; hold({handle}); "
    "from {module} import main; main()"
)
# one thread per library, because each core already has one process
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# sender (None: a thread of the parent) and message (None: the output of the child has ended)
Inbox = queue.SimpleQueue["tuple[Child | None, dict[str, Any] | None]"]


def fuzz_folder() -> Path:
    """Return the fuzzer's folder inside fusec's cache folder."""
    return sqlite_cache.folder() / "fuzz"


class Child:
    """One process that runs `main` of a module. It ends with its parent (`fusec.system.parent_death`).

    inbox: queue for its messages; default: one of its own.
    heard: time of its last message, or of the last question.
    ended: its output has ended.
    """

    def __init__(self, module: str, inbox: Inbox | None = None, hash_seed: int = 0):
        env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), **{k: os.environ.get(k, "1") for k in _ONE_THREAD}}
        env.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(fuzz_folder() / "hypothesis"))  # else the current folder
        handle = parent_death.handle()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # see close
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START.format(path=sys.path, handle=handle, module=module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            pass_fds=[handle],
            text=True,
            encoding="utf-8",
        )
        self.heard = time.monotonic()
        self.ended = False
        self._hung = ""  # stack at which it hung, if it reported that
        self._inbox: Inbox = queue.SimpleQueue() if inbox is None else inbox
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

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Send a question and return the answer; None if there is none within the time."""
        self.heard = time.monotonic()
        self.tell(question)
        try:
            _, answer = self._inbox.get(timeout=seconds)
        except queue.Empty:
            return None
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                break  # the process died while it wrote this line
            self.heard = time.monotonic()
            message = json.loads(line)
            if "hung" in message:
                self._hung = message["hung"] or "unknown stack"
            else:
                self._inbox.put((self, message))
        self.ended = True
        self._inbox.put((self, None))

    def death(self) -> Failure:
        """Describe the end of the process. One that has not ended was silent for too long, and is killed."""
        if not self.ended:
            self._process.kill()
            return Failure(HUNG, "Hang", f"the process was silent for {time.monotonic() - self.heard:.0f} s")
        code = self._process.wait()
        if code == HUNG_STATUS or self._hung:
            return Failure(HUNG, "Hang", "the property did not return in time", traceback=self._hung)
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
