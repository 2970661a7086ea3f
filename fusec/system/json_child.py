"""Start a child process that exchanges lines of JSON with this one, and describe its end.

The child is a new Python process with the import path of this one. It ends with this process
(`fusec.system.parent_death`).
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
from collections.abc import Mapping, Sequence
from typing import Any

from fusec.system import parent_death

# The child gets the import path of this process, so that it finds the same fusec and the user's modules.
_START = (
    "import sys; sys.path[:] = {path!r}; from fusec.system.parent_death import hold; hold({handle}); "
    "from {module} import main; main()"
)

# sender (a JsonChild, or None: a thread of the parent) and message (None: the output of the child has ended)
Inbox = queue.SimpleQueue[tuple[Any, dict[str, Any] | None]]


class JsonChild:
    """One process that runs `main` of a module.

    heard: time of its last message, or of the last question.
    ended: its output has ended.
    """

    def __init__(
        self,
        module: str,
        environment: Mapping[str, str] | None = None,
        handles: Sequence[int] = (),
        inbox: Inbox | None = None,
    ):
        """Start the process.

        environment: all its variables; default: those of this process.
        handles: descriptors that it shares, under the same numbers.
        inbox: queue for its messages; default: one of its own.
        """
        handle = parent_death.handle()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # see close
        self._reading_errors = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _START.format(path=sys.path, handle=handle, module=module)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            pass_fds=[handle, *handles],
            text=True,
            encoding="utf-8",
        )
        self.heard = time.monotonic()
        self.ended = False
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

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None if its output has ended, or there is no message within the time."""
        try:
            return self._inbox.get(timeout=seconds)[1]
        except queue.Empty:
            return None

    def ask(self, question: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
        """Send a question and return the answer; None if there is none within the time."""
        self.heard = time.monotonic()
        self.tell(question)
        return self.receive(seconds)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith("\n"):
                break  # the process died while it wrote this line
            self.heard = time.monotonic()
            message = json.loads(line)
            if not self._handled(message):
                self._inbox.put((self, message))
        self.ended = True
        self._inbox.put((self, None))

    def _handled(self, message: dict[str, Any]) -> bool:
        """Handle a message that is not for the inbox; return False for all others."""
        return False

    def end(self, who: str = "the process") -> tuple[str, str]:
        """Wait for the end of the process, whose output has ended. Return the signal (or "") and a description.

        who: the subject of the description
        """
        code = self._process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return name, f"{who} was killed by {name}: {self.last_line()}"
        return "", f"{who} ended with status {code}: {self.last_line()}"

    def kill(self) -> None:
        self._process.kill()

    def last_line(self) -> str:
        """Return the last line of its stderr. Another thread may `close` it meanwhile."""
        with self._reading_errors:
            if self._errors.closed:
                return "it was closed"
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
        with self._reading_errors:
            self._errors.close()


class ParentPipe:
    """Pipe of a child to its parent that any thread can write whole lines to."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)  # stdout becomes stderr, so that prints of libraries do not break the protocol

    def tell(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()
