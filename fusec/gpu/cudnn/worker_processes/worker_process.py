"""Start a worker process, ask it, and report how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from typing import Any

from fusec.errors import TargetError
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.system import parent_death
from fusec.targets.target import Target

TIMEOUT_S = 300.0  # far above what the longest graphs take to build (benchmarks/compile_time/plan_builds.py)
# Signals that a library causes itself; other signals come from outside.
OWN_FAULT = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
# Variables of the user's shell that change what cuDNN offers, although verdicts do not depend on them.
_NOT_PASSED_ON = ("NVIDIA_TF32_OVERRIDE", "CUDNN_FRONTEND_ENABLE_FROST_ENGINES")
# The import path is this process's, so that the same fusec and cudnn answer.
_START = (
    "import sys; sys.path[:] = {path!r}; from fusec.system.parent_death import hold; hold({handle}); "
    "from {module} import main; sys.exit(main({name!r}, {device}))"
)


@dataclass(frozen=True)
class WorkerDeath:
    """End of a worker that did not answer: it died, or it was killed after a timeout.

    by_own_fault: a library in it caused the signal
    closed: its pool closed it meanwhile
    """

    words: str
    signal: str = ""
    by_own_fault: bool = False
    timeout: bool = False
    closed: bool = False


class EndedError(TargetError):
    """Error for a question whose workers were closed before it was answered."""

    def __init__(self) -> None:
        super().__init__("the workers that ask cuDNN were closed before they answered")


class WorkerProcess:
    """Child process that runs `main` of a module, and its pipes.

    The constructor starts it; it can be asked after `wait_ready`. Any thread may `close` it, also before it is ready.
    """

    def __init__(self, target: Target, device: bool, module: str = "fusec.gpu.cudnn.worker"):
        handle = parent_death.handle()
        start = _START.format(path=sys.path, module=module, name=target.name, device=device, handle=handle)
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # see close
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON},
            pass_fds=[handle],
            text=True,
        )
        # held while the pipes are read, because closing a pipe does not wake a thread that reads it
        self._reading = threading.Lock()
        self._ended = False
        self.versions: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Wait until cuDNN is loaded in the worker.

        Raises TargetError if it does not load, naming what is missing; EndedError when it is closed meanwhile.
        """
        with self._reading:
            line = self._line()
            hello = json.loads(line) if line.endswith("\n") else {}
            reason = hello.get("failed") or f"the cuDNN worker did not start: {self._last_words()}; see `fusec doctor`"
        if "ready" not in hello:
            if self._ended:
                raise EndedError
            self.close()
            raise TargetError(reason)
        self.versions = hello["ready"]

    @property
    def pid(self) -> int:
        return self._process.pid

    def exchange(self, question: dict[str, Any]) -> dict[str, Any] | WorkerDeath:
        """Send a question and return its answer, both JSON: see `worker.main`.

        Raises RuntimeError for a defect of fusec in the worker.
        """
        assert self._process.stdin is not None
        with self._reading:
            line = ""
            if not self._process.stdin.closed:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.write(json.dumps(question) + "\n")
                    self._process.stdin.flush()
                    line = self._line()
            if not line.endswith("\n"):
                return self._death()
        answer = json.loads(line)
        if "defect" in answer:
            subject = f" for\n{CudnnGraph.from_json(question['graph'])}" if "graph" in question else ""
            raise RuntimeError(f"fusec failed in a cuDNN worker{subject}\n{answer['defect']}")
        return answer

    def _line(self) -> str:
        """Read one line; empty after TIMEOUT_S, and incomplete if the process ends."""
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return ""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return self._process.stdout.readline() if selector.select(TIMEOUT_S) else ""

    def _death(self) -> WorkerDeath:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return WorkerDeath(f"cuDNN gave no answer in {TIMEOUT_S:.0f} s", timeout=True)
        if code >= 0:
            return WorkerDeath(f"the cuDNN worker ended with status {code}: {self._last_words()}")
        name = signal.Signals(-code).name
        by_own_fault = -code in OWN_FAULT
        words = f"cuDNN killed its process with {name}" if by_own_fault else f"the cuDNN worker was ended by {name}"
        return WorkerDeath(words, name, by_own_fault)

    def _last_words(self) -> str:
        if self._errors.closed:
            return "it was ended"
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1][-300:] if lines else "it printed nothing"

    def close(self) -> None:
        """Kill the process and wait for its end; safe to call twice, and while another thread waits for an answer."""
        self._ended = True
        self._process.kill()
        with self._reading:  # so that a waiting thread reads the end of the output first
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # unsent input is not needed
                        pipe.close()
            self._errors.close()

    @staticmethod
    def close_all(*groups: list[WorkerProcess]) -> None:
        """Kill all workers of these lists, then wait for each; the lists are empty afterwards."""
        ended = [workers.pop() for workers in groups for _ in range(len(workers))]
        for worker in ended:
            worker._ended = True
            worker._process.kill()
        for worker in ended:
            worker.close()
