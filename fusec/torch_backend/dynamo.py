"""Compile the graphs that dynamo captures: `torch.compile(model, backend="fusec")`."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked

from fusec.driver import compile_dynamic
from fusec.errors import FusecError
from fusec.torch_backend.captured_graph import CapturedGraph
from fusec.torch_backend.graph_breaks import GraphBreak, break_of
from fusec.torch_backend.tensors import is_tensor
from fusec.torch_backend.training import compile_training

MODES = {"default": "quick", "reduce-overhead": "quick", "max-autotune": "full", "max-autotune-no-cudagraphs": "full"}


def _is_causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Take a mask of `nn.Transformer` as it is: dynamo cannot compare its values, and its result is only a hint."""
    return bool(is_causal)


with contextlib.suppress(AttributeError, TypeError, ValueError):  # a release without this function has no break there
    torch._dynamo.substitute_in_graph(torch.nn.modules.transformer._detect_is_causal_mask)(_is_causal)


def backend(
    gm: Any, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph for torch.compile; `options` are those of `fusec.compile_dynamic`, `mode` says how to tune.

    A graph is exported and compiled at its first call, and once for all sizes that dynamo keeps symbolic. Without the
    option `channels_last`, inputs keep their memory format, and outputs have the one of eager torch.
    Where gradients are wanted, the forward and the backward graph of AOTAutograd are compiled.
    torch runs a graph that fusec does not support, with a warning. A graph break is a warning, too.
    """
    if mode is not None and mode not in MODES:
        raise FusecError(f"the backend has no mode {mode!r}; modes are {', '.join(MODES)}")
    given = {**({} if mode is None else {"tune": MODES[mode]}), **(options or {})}
    known = [name for name in inspect.signature(compile_dynamic).parameters if name != "model"]
    if unknown := [name for name in given if name not in known]:
        raise FusecError(f"the backend has no option {unknown[0]!r}; options are {', '.join(known)}")
    return GraphCompiler(given)(gm, example_inputs)


class GraphCompiler:
    """Compile graphs of dynamo with the same options.

    graphs: the captured graphs. breaks: the graph breaks that ended some of them.
    """

    def __init__(self, options: dict[str, Any]):
        self.options = options
        self.graphs: list[CapturedGraph] = []
        self.breaks: list[GraphBreak] = []

    def __call__(self, gm: Any, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return a function that runs a graph. dynamo calls this for each graph that it captures."""
        broken = break_of(gm)
        if broken is not None:
            self.breaks.append(broken)
            warnings.warn(
                f"fusec: {broken}; what follows is another graph. `fusec.torch_backend.explain(model)(*inputs)` lists "
                "the graphs",
                stacklevel=2,
            )
        if torch.is_grad_enabled() and any(is_tensor(x) and x.requires_grad for x in example_inputs):
            return compile_training(gm, example_inputs, self.options, self.graphs)
        graph = CapturedGraph(gm, example_inputs, self.options)
        graph.broken = broken
        self.graphs.append(graph)
        return graph
