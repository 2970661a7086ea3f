"""Say where dynamo ended a graph, and which op it could not capture."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from fusec.system.dataclass import dataclass

_CONTEXT = "Developer debug context:"  # in dynamo's messages


@dataclass(frozen=True)
class GraphBreak:
    """The end of a graph at an op that dynamo cannot capture. Python runs that op, and torch computes it."""

    reason: str
    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        place = f" at {PurePath(self.file).name}:{self.line}, `{self.code.strip()}`" if self.file else ""
        return f"a graph breaks{place}: {self.reason}"


def break_of(gm: Any) -> GraphBreak | None:
    """Return the graph break that ended a graph of dynamo; None if it ends where its function returns."""
    found = getattr(gm, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return None
    reason = first_line(found.reason)
    if reason.startswith("generic_jump"):  # dynamo's name of the bytecode
        reason = "a branch depends on the value of a tensor"
    if not found.user_stack:
        return GraphBreak(reason)
    place = found.user_stack[-1]
    return GraphBreak(reason, place.filename, place.lineno or 0, place.line or "")


def first_line(text: str) -> str:
    """Return the first line of a message of dynamo, which has many, and the op that it names."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    context = [line.removeprefix(_CONTEXT).strip() for line in lines if line.startswith(_CONTEXT)]
    return f"{lines[0]} ({', '.join(context)})" if context else (lines or ["no reason is given"])[0]
