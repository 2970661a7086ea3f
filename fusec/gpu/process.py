"""The parent's side of a worker: start it, ask it, and say how it ended."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import TargetError
from fusec.gpu.worker import Identity, decode
from fusec.target import Target
from fusec.verdict import Verdict

TIMEOUT_S = 300.0  # far above what the longest graphs take to build (benchmarks/builds.py)
# Ends a library brings about itself; any other signal came from outside.
OWN_FAULT = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
# Settings of the user's shell that change what cuDNN offers, and are no part of the question.
_NOT_PASSED_ON = ("NVIDIA_TF32_OVERRIDE", "CUDNN_FRONTEND_ENABLE_FROST_ENGINES")
# the same import path as here, so that the very same fusec and cudnn answer
_START = "import sys; sys.path[:] = {path!r}; from {module} import main; sys.exit(main({name!r}, {device}))"


@dataclass(frozen=True)
class Died:
    """A worker ended, or was ended for its silence, instead of answering."""

    words: str
    signal: str = ""
    by_own_fault: bool = False
    timeout: bool = False


class WorkerProcess:
    """One child process and its pipes, running `main` of a module. TargetError if it cannot come up, naming
    what is missing."""

    def __init__(self, target: Target, device: bool, module: str = "fusec.gpu.worker"):
        start = _START.format(path=sys.path, module=module, name=target.name, device=device)
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # see close
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON},
            text=True,
        )
        hello = json.loads(self._line() or "{}")
        if "ready" not in hello:
            reason = hello.get("failed") or f"the cuDNN worker did not start: {self._last_words()}; see `fusec doctor`"
            self.close()
            raise TargetError(reason)
        self.versions: dict[str, Any] = hello["ready"]
        self.blob = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, graph: CudnnGraph, proven: Collection[Identity] = (), hand_over: bool = False) -> Verdict | Died:
        """The verdict. proven: see `worker.Judge`. hand_over: `blob` is cuDNN's first plan then, serialized, if it was
        built. RuntimeError for a defect of fusec in the worker: no answer."""
        answer = self.exchange({**graph.to_json(), "proven": sorted(proven), "hand_over": hand_over})
        if isinstance(answer, Died):
            return answer
        if "defect" in answer:
            raise RuntimeError(f"fusec failed to put this graph to cuDNN:\n{graph}\n{answer['defect']}")
        self.blob = base64.b64decode(answer.get("blob", ""))
        return decode(answer)

    def exchange(self, question: dict[str, Any]) -> dict[str, Any] | Died:
        """One question and its answer, both JSON."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._line()
        except (BrokenPipeError, ValueError):  # ValueError: the oracle was closed meanwhile
            line = ""
        if not line.endswith("\n"):
            return self._death()
        return json.loads(line)

    def _line(self) -> str:
        """One whole line within TIMEOUT_S, else the empty string."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return self._process.stdout.readline() if selector.select(TIMEOUT_S) else ""

    def _death(self) -> Died:
        try:
            code = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            return Died(f"cuDNN gave no answer in {TIMEOUT_S:.0f} s", timeout=True)
        if code >= 0:
            return Died(f"the cuDNN worker ended with status {code}: {self._last_words()}")
        name = signal.Signals(-code).name
        by_own_fault = -code in OWN_FAULT
        words = f"cuDNN killed its process with {name}" if by_own_fault else f"the cuDNN worker was ended by {name}"
        return Died(words, name, by_own_fault)

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors if line.strip()]
        return lines[-1][-300:] if lines else "it said nothing"

    def close(self) -> None:
        """End the process and collect it; safe to call twice."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what was not sent is of no use to anyone
                    pipe.close()
        self._errors.close()
