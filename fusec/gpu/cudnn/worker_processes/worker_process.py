"""Start a worker process that asks cuDNN, ask it, and report how it ended."""

from __future__ import annotations

import os
import threading
from typing import Any

from fusec.errors import TargetError
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.system.dataclass import dataclass
from fusec.system.json_child import JsonChild
from fusec.targets.target import Target

TIMEOUT_S = 300.0  # far above what the longest graphs take to build (benchmarks/compile_time/plan_builds.py)
# Signals that a library causes itself; other signals come from outside.
OWN_FAULT = ("SIGSEGV", "SIGFPE", "SIGABRT", "SIGBUS", "SIGILL")
# Variables of the user's shell that change what cuDNN offers, although verdicts do not depend on them.
_NOT_PASSED_ON = ("NVIDIA_TF32_OVERRIDE", "CUDNN_FRONTEND_ENABLE_FROST_ENGINES")


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
    """Child process that answers questions about cuDNN.

    The constructor starts it; it can be asked after `wait_ready`. Any thread may `close` it, also before it is ready.
    """

    def __init__(self, target: Target, device: bool, module: str = "fusec.gpu.cudnn.worker"):
        self._child = JsonChild(module, {k: v for k, v in os.environ.items() if k not in _NOT_PASSED_ON})
        self._child.tell({"target": target.name, "device": device})
        self._asking = threading.Lock()  # held until the reason is read why there was no answer
        self._closed = False
        self.versions: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Wait until cuDNN is loaded in the worker.

        Raises TargetError if it does not load, naming what is missing; EndedError when it is closed meanwhile.
        """
        with self._asking:
            hello = self._child.receive(TIMEOUT_S) or {}
            if "ready" in hello:
                self.versions = hello["ready"]
                return
            last = self._child.last_line()
        if self._closed:
            raise EndedError
        self.close()
        raise TargetError(hello.get("failed") or f"the cuDNN worker did not start: {last}; see `fusec doctor`")

    @property
    def pid(self) -> int:
        return self._child.pid

    def exchange(self, question: dict[str, Any]) -> dict[str, Any] | WorkerDeath:
        """Send a question and return its answer, both JSON: see `worker.main`.

        Raises RuntimeError for a defect of fusec in the worker.
        """
        with self._asking:
            answer = None if self._child.ended else self._child.ask(question, TIMEOUT_S)
            if answer is None:
                return self._death()
        if "defect" in answer:
            subject = f" for\n{CudnnGraph.from_json(question['graph'])}" if "graph" in question else ""
            raise RuntimeError(f"fusec failed in a cuDNN worker{subject}\n{answer['defect']}")
        return answer

    def _death(self) -> WorkerDeath:
        if not self._child.ended:
            return WorkerDeath(f"cuDNN gave no answer in {TIMEOUT_S:.0f} s", timeout=True)
        name, words = self._child.end("the cuDNN worker")
        by_own_fault = name in OWN_FAULT
        return WorkerDeath(f"cuDNN killed its process with {name}" if by_own_fault else words, name, by_own_fault)

    def close(self) -> None:
        """Kill the process and wait for its end; safe to call twice, and while another thread waits for an answer."""
        self._kill()
        with self._asking:
            self._child.close()

    def _kill(self) -> None:
        self._closed = True
        self._child.kill()

    @staticmethod
    def close_all(*groups: list[WorkerProcess]) -> None:
        """Kill all workers of these lists, then wait for each; the lists are empty afterwards."""
        ended = [workers.pop() for workers in groups for _ in range(len(workers))]
        for worker in ended:
            worker._kill()
        for worker in ended:
            worker.close()
