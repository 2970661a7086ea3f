"""List the graphs of a model under torch.compile: what fusec compiled, what torch runs, and where graphs break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked
from torch._dynamo.utils import counters  # pyright: ignore[reportMissingImports] - as above

from fusec.system.dataclass import dataclass
from fusec.torch_backend.captured_graph import CapturedGraph
from fusec.torch_backend.dynamo import GraphCompiler
from fusec.torch_backend.graph_breaks import GraphBreak, first_line


@dataclass(frozen=True)
class TorchReport:
    """The graphs of one call of a model under torch.compile.

    result: result of the call.
    graphs: in the order of their capture. Those that were not called have no program.
    breaks: the ends of graphs at ops that dynamo cannot capture. Python and torch run these ops.
    skipped: the number of functions of which dynamo captured nothing.
    """

    result: Any
    graphs: tuple[CapturedGraph, ...]
    breaks: tuple[GraphBreak, ...]
    skipped: int

    @property
    def in_torch(self) -> tuple[str, ...]:
        """Return the reasons why torch runs graphs itself."""
        return tuple(graph.in_torch for graph in self.graphs if graph.in_torch)

    def __str__(self) -> str:
        lines = [f"{_count(len(self.graphs), 'graph')}, {_count(len(self.breaks), 'graph break')}"]
        for number, graph in enumerate(self.graphs):
            lines.append(f"graph {number} ({graph.role}, {_count(graph.ops, 'op')}): {graph.summary}")
            if graph.broken is not None:
                lines.append(f"  then {graph.broken}")
        known = {graph.broken for graph in self.graphs}
        lines += [f"without a graph before it, {broken}" for broken in self.breaks if broken not in known]
        if self.skipped:
            lines.append(f"dynamo captured nothing of {_count(self.skipped, 'function')}: Python and torch ran it")
        return "\n".join(lines)


def explain(model: Callable[..., Any], **options: Any) -> Callable[..., TorchReport]:
    """Return a function that runs a model once, compiled by fusec, and reports its graphs.

    options: options of `fusec.compile_dynamic`. The call computes gradients as the model's own call would: use
    `torch.inference_mode()` around the call to see the graphs of inference.
    """

    def run(*args: Any, **kwargs: Any) -> TorchReport:
        compiler = GraphCompiler(options)
        before, missed = dict(counters["graph_break"]), _missed()
        result = torch.compile(model, backend=compiler)(*args, **kwargs)
        new = [reason for reason, count in counters["graph_break"].items() if count > before.get(reason, 0)]
        named = {broken.reason for broken in compiler.breaks}
        alone = [GraphBreak(line) for line in map(first_line, new) if line not in named]
        return TorchReport(result, tuple(compiler.graphs), (*compiler.breaks, *alone), _missed() - missed)

    return run


def _missed() -> int:
    """Return the number of functions that dynamo has failed to capture so far."""
    frames = counters["frames"]
    return frames["total"] - frames["ok"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
