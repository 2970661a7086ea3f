"""Check that another process compiles a graph to the same program.

The other process has another seed for string hashes.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import sys
import traceback
from typing import Any

from fusec.execution.compilation import Compiled
from fusec.ir import Graph, quote
from fusec.testing.case import Case, MismatchError
from fusec.testing.child_process import Child
from fusec.testing.example_codec import decode, encode
from fusec.testing.properties.fixtures import compile_once

PATIENCE_S = 120.0  # far longer than any compilation of a test graph takes
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
    """A child process that compiles the graphs it receives."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._owner = 0

    def ask(self, graph: Graph, case: Case) -> str:
        """Return the digest of the child's program; a child that died is restarted once."""
        question = encode(graph, case)
        for _ in range(2):
            answer = self._alive().ask(question, PATIENCE_S)
            if answer is not None:
                break
            self.close()
        else:
            raise MismatchError("the other process that compiles the graph died twice")
        if "error" in answer:
            raise MismatchError(f"compiled here, the graph fails in another process:\n{answer['error']}")
        return answer["digest"]

    def _alive(self) -> Child:
        """Return the child; start one if there is none, or only that of a process that this one was forked from."""
        if self._child is None or self._owner != os.getpid() or self._child.ended:
            self.close()
            seed = 2 if os.environ.get("PYTHONHASHSEED") == "1" else 1
            self._child, self._owner = Child("fusec.testing.properties.reproducible", hash_seed=seed), os.getpid()
        return self._child

    @property
    def pid(self) -> int | None:
        """Return the child's process id; None if no child runs."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None and self._owner == os.getpid():
            child.close()


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
