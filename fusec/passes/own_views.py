"""Let each attention have the views it reads through for itself.

A step takes in the parts and turns between a packed projection and its heads only if nothing else reads them; forward
and backward half read the same, which would then be copied. Views cost nothing, so the second reader gets its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fusec.ir import Graph, Node, Value
from fusec.ops import AttentionBackward, Reshape, Slice, Split, Transpose
from fusec.passes.base import Options


@dataclass(frozen=True)
class OwnViews:
    """See the module."""

    name: ClassVar[str] = "own_views"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if isinstance(node.op, AttentionBackward):
                copies: dict[Node, Node] = {}
                for index, value in enumerate(node.operands):
                    graph.set_input(node, index, _own(graph, value, node, copies))


def _own(graph: Graph, value: Value, reader: Node, copies: dict[Node, Node]) -> Value:
    """The value by views of the reader's own, as far as they go."""
    view = value.node
    if view is None or not isinstance(view.op, (Reshape, Slice, Split, Transpose)):
        return value
    if all(user is reader for v in view.results for user in v.users):
        return value
    if view not in copies:
        source = _own(graph, view.operands[0], reader, copies)
        types = [v.type for v in view.results]
        copies[view] = graph.insert(view.op, [source], before=reader, types=types, origin=view.origin)
    return copies[view].results[value.index]
