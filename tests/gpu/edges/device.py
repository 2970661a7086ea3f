"""Rows on the GPU, in processes of which each may die of a row without loss of the others."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gpu.edges import forms
from gpu.edges.judged import Disagreement, disagreements
from gpu.edges.row import Row
from gpu.edges.table import table
from gpu.kernels.cases import on_the_device

from fusec.errors import ExecutionError, FusecError

PATIENCE_S = 90.0
WORKERS = 14
STAND_IN = "FUSEC_EDGES_STAND_IN"  # set: workers use stand-ins for CuPy and cuDNN


@dataclass
class Result:
    """The outcome of one form of a row: `ran`, `no plan`, `nothing` (no such form), `failed` or `died`."""

    row: str
    form: str
    status: str
    said: str = ""
    found: list[Disagreement] = field(default_factory=list[Disagreement])

    @property
    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self.__dict__, "found": [d.data for d in self.found]}

    @staticmethod
    def of(data: dict[str, Any]) -> Result:
        named: dict[str, Any] = {**data, "found": [Disagreement(**d) for d in data["found"]]}
        return Result(**named)


def run_row(row: Row, skip: Sequence[str] = ()) -> Iterator[tuple[str, Result | None]]:
    """Each form of a row on the GPU of this process: announced by its name, then run."""
    for form, run in _forms(row):
        if form in skip:
            continue
        yield form, None
        try:
            found = [d for feeds in row.feeds for d in disagreements(row, feeds, run(feeds))]
            yield form, Result(row.name, form, "ran", found=found)
        except ExecutionError as error:
            status = "no plan" if "plan" in str(error) and "failed to run" not in str(error) else "failed"
            yield form, Result(row.name, form, status, _short(str(error)))
        except (FusecError, RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            yield form, Result(row.name, form, "failed", _short(f"{type(error).__name__}: {error}"))


def _short(words: str) -> str:
    """Without the graph in the middle."""
    return words if len(words) < 400 else f"{words[:100]} ... {words[-280:]}"


def _forms(row: Row) -> Iterator[tuple[str, Any]]:
    if row.whole:
        yield "compiled", lambda feeds: forms.compiled(row)(feeds)
        return
    for spelling, made in forms.lowered(row):
        yield (
            f"cudnn {spelling}".strip(),
            lambda feeds, made=made: forms.by_graph(row, made, feeds, forms.backend().run_on_host),
        )
    found = forms.kernels(row)
    for way, kernel in found:

        def launched(feeds: Any, kernel: Any = kernel) -> Any:
            arrays = forms.operands(row, feeds)
            launcher = forms.launcher()
            if not launcher.runs(kernel):
                raise ExecutionError("no plan: the kernel does not run on this GPU")
            return forms.ordered(row, on_the_device(launcher, kernel, arrays, row.outputs))

        yield f"kernel {way}".strip(), launched
    if not found and not os.environ.get(STAND_IN):
        import cupy

        yield "cupy", lambda feeds: forms.by_reference(row, feeds, cupy)


def _stand_in() -> None:
    """A dry run where no GPU is."""
    from gpu.stand_in_gpu import Machine, install

    machine = Machine()
    install(machine, setattr)
    sys.modules["cupy"] = machine.cupy()


def work() -> None:
    """Serve rows over pipes: a line with a row's title and forms to skip, then lines with what happened."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever libraries print
    if os.environ.get(STAND_IN):
        _stand_in()
    rows = table()
    for line in sys.stdin:
        title, skip = json.loads(line)
        with np.errstate(all="ignore"):
            for form, result in run_row(rows[title], skip):
                message = {"begin": form} if result is None else {"result": result.data}
                out.write(json.dumps(message) + "\n")
        out.write(json.dumps({"end": title}) + "\n")


class _Child:
    """A process that runs rows, started anew when it dies."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self._rest = b""

    def ask(self, title: str) -> list[Result]:
        """All forms of a row; those that the process died of say so."""
        results: list[Result] = []
        while True:
            skip = [r.form for r in results]
            begun, reason = self._put(title, skip, results)
            if not reason:
                return results
            if not begun:
                return [*results, Result(title, "?", "died", reason)]
            results.append(Result(title, begun, "died", reason))

    def _put(self, title: str, skip: list[str], results: list[Result]) -> tuple[str, str]:
        if self.process is None or self.process.poll() is not None:
            self.close()
            command = [sys.executable, "-m", "gpu.edges", "--work"]
            self._rest = b""
            # rows that are compiled whole ask cuDNN nothing
            env = {**os.environ, "FUSEC_WORKERS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        process, begun = self.process, ""
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write((json.dumps([title, skip]) + "\n").encode())
            process.stdin.flush()
        while True:
            line = self._line(process)
            if not line:
                process.kill()
                code = process.wait()
                return begun, f"the process ended ({code}) or said nothing for {PATIENCE_S:.0f} s"
            message = json.loads(line)
            if "end" in message:
                return "", ""
            if "begin" in message:
                begun = message["begin"]
                continue
            result = Result.of(message["result"])
            results.append(result)
            lost = ("illegal", "misaligned", "CUDARuntimeError", "CUDADriverError", "unspecified launch")
            if result.status == "failed" and any(word in result.said for word in lost):
                process.kill()  # whose context is lost, and all that it said next with it
                process.wait()
                return begun, "" if self._last(title, results) else "lost"

    def _last(self, title: str, results: list[Result]) -> bool:
        """Run what is left of the row in another process."""
        begun, reason = self._put(title, [r.form for r in results], results)
        if reason and begun:
            results.append(Result(title, begun, "died", reason))
        return True

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        while b"\n" not in self._rest:
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
            data = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not data:
                return b""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def close(self) -> None:
        """End the process, and close its pipes."""
        if self.process is None:
            return
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def run_all(titles: Sequence[str], workers: int = WORKERS, say: Any = None) -> list[Result]:
    """All forms of these rows on the GPU, many rows side by side."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for title in titles:
        waiting.put(title)
    results: list[Result] = []

    def serve() -> None:
        child = _Child()
        while True:
            try:
                title = waiting.get_nowait()
            except queue.Empty:
                break
            results.extend(child.ask(title))
            if say is not None:
                say(len(titles) - waiting.qsize(), len(titles))
        child.close()

    threads = [threading.Thread(target=serve) for _ in range(min(workers, len(titles)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    order = {title: i for i, title in enumerate(titles)}
    return sorted(results, key=lambda r: order[r.row])
