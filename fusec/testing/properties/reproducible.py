"""Does another process compile a graph to the same program? One child with other string hashes, asked over pipes."""

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

PATIENCE_S = 120.0  # far beyond any compilation of a graph that properties are tried on
# its parent's end comes first: the imports take seconds
_START = (
    "from fusec.system.parent_death import hold; hold({handle}); "
    "from fusec.testing.properties.reproducible import main; main()"
)
_NAME = re.compile(r'%(?:"(?:[^"\\]|\\.)*"|[A-Za-z0-9_.$/:-]*[A-Za-z0-9_.$/-])')


def decisions(compiled: Compiled) -> str:
    """What a compilation decided: steps, spellings, lowered graphs, refusals."""
    parts = [str(compiled.program)]
    parts += ["" if lowered is None else lowered.graph.key for lowered in compiled.lowered]
    parts += [f"{[quote(n.results[0].name) for n in r.nodes]} {r.reason}" for r in compiled.program.refusals]
    return "\n".join(parts)


def digest(compiled: Compiled) -> str:
    """Equal for equal decisions, whatever numbers made-up names carry: those go on from what a graph held before."""
    known: dict[str, str] = {}
    text = _NAME.sub(lambda m: known.setdefault(m[0], f"%{len(known)}"), decisions(compiled))
    return hashlib.sha256(text.encode()).hexdigest()


class Twin:
    """A child process that compiles what it is sent. It ends with its parent (`fusec.lifeline`)."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[str] | None = None
        self._owner = 0

    def ask(self, graph: Graph, case: Case) -> str:
        """The digest of the program the child gives; a child that died is started anew, once."""
        line = json.dumps(encode(graph, case))
        answer = self._put(line) or self._put(line)
        if not answer:
            raise MismatchError("the process that compiles the graph once more died of it")
        found = json.loads(answer)
        if "error" in found:
            raise MismatchError(f"compiled here, the graph fails in another process:\n{found['error']}")
        return found["digest"]

    def _put(self, line: str) -> str:
        """What the child answers; nothing if it died, or said nothing for long."""
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
            self.close()  # its pipes, too
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
        """The child's process id, while there is one."""
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
                with suppress(BrokenPipeError):  # what was not written yet is of no use now
                    pipe.close()


TWIN = Twin()
atexit.register(TWIN.close)


def _answer(line: str) -> dict[str, Any]:
    try:
        graph, case = decode(json.loads(line))
        return {"digest": digest(compile_once(graph, case))}
    except Exception:  # noqa: BLE001 - whatever it is, the parent is told
        return {"error": traceback.format_exc()}


def main() -> None:
    """Answer one line of JSON for each that comes, until there are no more."""
    for line in sys.stdin:
        print(json.dumps(_answer(line)), flush=True)
