"""Compile training: AOTAutograd gives a forward and a backward graph, and fusec compiles both.

A step of an optimiser changes the parameters, so they are inputs of both graphs and no constants.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked
from functorch.compile import make_boxed_func  # pyright: ignore[reportMissingImports] - as above
from torch._dynamo.backends.common import aot_autograd  # pyright: ignore[reportMissingImports] - as above
from torch._dynamo.exc import RestartAnalysis  # pyright: ignore[reportMissingImports] - as above
from torch.nn.attention import SDPBackend, sdpa_kernel  # pyright: ignore[reportMissingImports] - as above

from fusec.errors import ModelError
from fusec.frontends.torch_export import reason
from fusec.torch_backend.backward_ops import decompositions
from fusec.torch_backend.captured_graph import CapturedGraph
from fusec.torch_backend.graph_breaks import break_of

# torch has no common base class for errors of its tracing
TRACE_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ModelError)


def compile_training(
    gm: Any, example_inputs: Sequence[Any], options: dict[str, Any], graphs: list[CapturedGraph]
) -> Callable[..., Any]:
    """Return a function that computes a graph and, in its backward pass, the gradients.

    graphs: the forward and the backward graph are appended; the latter when autograd first needs it.
    """
    broken = break_of(gm)

    def compiler(role: str) -> Callable[[Any, Sequence[Any]], Any]:
        def compile_graph(traced: Any, inputs: Sequence[Any]) -> Any:
            _require_values(traced)
            for node in traced.graph.nodes:
                node.meta.setdefault("example_value", node.meta.get("val"))
            graph = CapturedGraph(traced, inputs, options)
            graph.role = role
            graph.broken = broken if role == "forward" else None
            graphs.append(graph)
            return make_boxed_func(graph)

        return compile_graph

    compile_both = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), decompositions=decompositions()
    )
    try:
        with sdpa_kernel(SDPBackend.MATH):  # because ONNX has no gradient of attention as one op
            return compile_both(gm, example_inputs)
    except RestartAnalysis:  # dynamo captures the graph again, with other sizes fixed
        raise
    except TRACE_ERRORS as error:
        warnings.warn(f"fusec: training runs in torch itself: {reason(error)}", stacklevel=3)
        return gm.forward


def _require_values(traced: Any) -> None:
    """Make a graph independent of the strides of its inputs, because fusec's results are packed.

    Raises ModelError if an op reads memory by strides.
    """
    aten = torch.ops.aten
    for node in traced.graph.nodes:
        if node.target in (aten.as_strided.default, aten.as_strided_scatter.default):
            raise ModelError("the graph reads memory by strides (as_strided)")
        if node.target is aten.view.default:
            node.target = aten.reshape.default
    traced.recompile()
