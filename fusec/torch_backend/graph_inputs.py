"""Sort the inputs and results of a captured graph: parameters, tensors, sizes, numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked

from fusec.errors import ModelError
from fusec.system.dataclass import dataclass
from fusec.torch_backend.tensors import is_tensor


def is_static(node: Any, example: Any) -> bool:
    """Tell if dynamo marks an input as a module's parameter or buffer."""
    marked = (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type") is not None
    return is_tensor(example) and (marked or isinstance(example, torch.nn.Parameter))


def is_float(node: Any, example: Any) -> bool:
    """Tell if an input is a number that dynamo passes as a tensor, and of which the graph reads only the number."""
    alone = is_tensor(example) and example.ndim == 0 and example.device.type == "cpu"
    return alone and bool(node.users) and all(n.op == "call_method" and n.target == "item" for n in node.users)


def sizes(examples: Sequence[Any], tensors: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return, for each input that is a symbolic number, the tensor and dim whose size it is."""
    found: dict[int, tuple[int, int]] = {}
    for place, number in enumerate(examples):
        if isinstance(number, torch.SymInt):
            for tensor in tensors:
                for dim, size in enumerate(examples[tensor].shape):
                    if isinstance(size, torch.SymInt) and size.node.expr == number.node.expr:
                        found.setdefault(place, (tensor, dim))
    return found


def dynamic(example: Any, tensor: Any) -> dict[int, Any]:
    """Return the dims of a tensor that dynamo keeps symbolic."""
    return {
        dim: torch.export.Dim.AUTO
        for dim, size in enumerate(example.shape)
        if isinstance(size, torch.SymInt) and tensor.shape[dim] > 1
    }


def require_one_device(inputs: Sequence[Any], results: Sequence[Any]) -> None:
    """Raise ModelError unless all tensors are on the CPU, or all on the GPU of fusec, as results are with inputs."""
    found = sorted({str(device) for device in (*inputs, *results)})
    if not inputs:
        raise ModelError("it takes no tensor")
    if found not in (["cpu"], ["cuda:0"]):
        raise ModelError(f"its tensors are on {', '.join(found)}: all must be on the CPU, or all on cuda:0")


@dataclass(frozen=True)
class SizeResult:
    """A result that is a number computed of sizes of inputs, as the backward pass reads it.

    symbols: those in the expression, each with the input and the dim whose size it is.
    """

    expression: Any
    symbols: tuple[tuple[Any, int, int], ...]

    def value(self, args: Sequence[Any]) -> int:
        """Return the number for the inputs of a call."""
        return int(self.expression.subs({symbol: args[tensor].shape[dim] for symbol, tensor, dim in self.symbols}))


def _size_of(number: Any, places: Sequence[Any]) -> SizeResult | None:
    """Return a symbolic number as an expression of sizes; None for other values."""
    if not isinstance(number, torch.SymInt):
        return None
    known: dict[Any, tuple[int, int]] = {}
    for tensor, node in enumerate(places):
        example = node.meta.get("example_value")
        for dim, size in enumerate(example.shape if is_tensor(example) else ()):
            if isinstance(size, torch.SymInt):
                known.setdefault(size.node.expr, (tensor, dim))
    expression = number.node.expr
    if not expression.free_symbols <= known.keys():
        return None
    return SizeResult(expression, tuple((symbol, *known[symbol]) for symbol in expression.free_symbols))


def results_of(gm: Any, places: Sequence[Any]) -> tuple[list[tuple[str, Any]], Any, list[Any]]:
    """Return the kind of each result, a graph of the made ones, and their examples.

    The kinds are `input`, `made`, `size` (a SizeResult) and `fixed`.
    """
    copy = torch.fx.Graph()
    twins: dict[Any, Any] = {}
    copy.graph_copy(gm.graph, twins)
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    made: dict[Any, int] = {}
    results: list[tuple[str, Any]] = []
    for result in output.args[0]:
        if not isinstance(result, torch.fx.Node):
            results.append(("fixed", result))
        elif result.op == "placeholder":
            results.append(("input", places.index(result)))
        elif (size := _size_of(result.meta.get("example_value"), places)) is not None:
            results.append(("size", size))
        elif not is_tensor(result.meta.get("example_value")):
            raise ModelError(f"it returns {result.name}, which is no tensor")
        else:
            results.append(("made", made.setdefault(result, len(made))))
    if not made:
        raise ModelError("it computes no tensor")
    copy.output(tuple(twins[node] for node in made))
    return results, torch.fx.GraphModule(gm, copy), [node.meta["example_value"] for node in made]
