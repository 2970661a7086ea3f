"""Check that another process compiles a graph to the same program.

A child process with another seed for string hashes is asked over pipes.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import select
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import fusec
from fusec.execution.compilation import Compiled
from fusec.ir import Graph, quote
from fusec.system import parent_death
from fusec.testing.case import Case, MismatchError
from fusec.testing.example_codec import decode, encode
from fusec.testing.properties.fixtures import compile_once

PATIENCE_S = 120.0  # far longer than any compilation of a test graph takes
# The child watches its parent first, because the imports take seconds.
_START = (
    "from fusec.system.parent_death import hold; hold({handle}); "
    "from fusec.testing.properties.reproducible import main; main()"
)
_NAME = re.compile(r'%(?:"(?:[^"\\]|\\.)*"|[A-Za-z0-9_.$/:-]*[A-Za-z0-9_.$/-])')


def decisions(compiled: Compiled) -> str:
    """Describe the decisions of a compilation: steps, spellings, lowered graphs, refusals."""
    parts = [str(compiled.program)]
    parts += ["" if lowered is None else lowered.graph.key for lowered in compiled.lowered]
    parts += [f"{[quote(n.results[0].name) for n in r.nodes]} {r.reason}" for r in compiled.program.refusals]
    return "\n".join(parts)


def digest(compiled: Compiled) -> str:
    """Hash the decisions of a compilation.

    Numbers in generated names do not count, because numbering continues from the names in the given graph.
    """
    known: dict[str, str] = {}
    text = _NAME.sub(lambda m: known.setdefault(m[0], f"%{len(known)}"), decisions(compiled))
    return hashlib.sha256(text.encode()).hexdigest()


class Twin:
    """A child process that compiles the graphs it receives. It ends with its parent (`fusec.system.parent_death`)."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._owner = 0

    def ask(self, graph: Graph, case: Case) -> str:
        """Return the digest of the child's program; a child that died is restarted once."""
        line = json.dumps(encode(graph, case))
        answer = self._put(line) or self._put(line)
        if not answer:
            raise MismatchError("the process that compiles the graph once more died of it")
        found = json.loads(answer)
        if "error" in found:
            raise MismatchError(f"compiled here, the graph fails in another process:\n{found['error']}")
        return found["digest"]

    def _put(self, line: str) -> str:
        """Send a line to the child and return its answer; empty if it died or timed out."""
        child = self._alive()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(line + "\n")
            child.stdin.flush()
            answers, _, _ = select.select([child.stdout], [], [], PATIENCE_S)
            answer = child.stdout.readline() if answers else ""
        except BrokenPipeError:
            answer = ""
        if not answer.endswith("\n"):
            self.close()
            return ""
        return answer

    def _alive(self) -> subprocess.Popen[str]:
        if self._child is not None and self._owner == os.getpid() and self._child.poll() is not None:
            self.close()  # to close its pipes
        if self._child is None or self._owner != os.getpid():
            seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
            root = str(Path(fusec.__file__).parent.parent)
            path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
            handle = parent_death.handle()
            self._child = subprocess.Popen(
                [sys.executable, "-c", _START.format(handle=handle)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[handle],
                text=True,
                env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": path},
            )
            self._owner = os.getpid()
        return self._child

    @property
    def pid(self) -> int | None:
        """Return the child's process id; None if no child runs."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):  # unwritten data is of no use now
                    pipe.close()


TWIN = Twin()
atexit.register(TWIN.close)


def _answer(line: str) -> dict[str, Any]:
    try:
        graph, case = decode(json.loads(line))
        return {"digest": digest(compile_once(graph, case))}
    except Exception:  # noqa: BLE001 - the parent gets every error
        return {"error": traceback.format_exc()}


def main() -> None:
    """Answer each line of JSON on standard input with one line, until the input ends."""
    for line in sys.stdin:
        print(json.dumps(_answer(line)), flush=True)
