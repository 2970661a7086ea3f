"""Store floating-point tensors in the precision asked for; casts stand only at the graph's edges.

With fp16 or bf16 every fp32 (and fp64) tensor inside becomes that type, constants once and for all, and
inputs and outputs keep the types of the model's interface. With fp32 and tf32 the model's types stay.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fusec.ir import Constant, DType, Graph, Literal, Node, Value
from fusec.ops import Cast
from fusec.passes.base import Options

_WIDE = (DType.F64, DType.F32)


@dataclass(frozen=True)
class Precision:
    """See the module; the storage type is the pipeline's option."""

    name: ClassVar[str] = "precision"

    def run(self, graph: Graph, options: Options) -> None:
        storage = options.storage
        if storage is DType.F32:
            return
        first = next(graph.nodes, graph.return_node)
        for value in graph.inputs:
            if value.type.dtype in _WIDE and value.uses:
                users = value.uses
                narrow = graph.insert(Cast(storage), [value], before=first, names=(value.name,)).result
                for node, index in users:
                    graph.set_input(node, index, narrow)
        outputs = [v.type.dtype for v in graph.outputs]
        for node in list(graph.nodes):
            if isinstance(node.op, Cast) and node.op.to in _WIDE:
                graph.set_op(node, Cast(storage))
            if isinstance(node.op, Constant) and node.op.literal.type.dtype in _WIDE:
                graph.set_op(node, Constant(_narrow(node.op.literal, storage)))
            for value in node.results:
                if value.type.dtype in _WIDE:
                    graph.set_type(value, value.type.with_dtype(storage))
        last = graph.return_node
        for index, (value, dtype) in enumerate(zip(graph.outputs, outputs, strict=True)):
            if value.type.dtype is not dtype:
                graph.set_input(last, index, _widen(graph, value, dtype, last))


def _widen(graph: Graph, value: Value, dtype: DType, before: Node) -> Value:
    return graph.insert(Cast(dtype), [value], before=before, names=(value.name,)).result


def _narrow(literal: Literal, storage: DType) -> Literal:
    """The literal in the storage type, converted when it is first read; a warning if it overflows."""
    type = literal.type.with_dtype(storage)

    def load() -> np.ndarray[Any, Any]:
        with np.errstate(over="ignore"):
            array = literal.array.astype(storage.numpy)
        lost = int((np.isfinite(literal.array) & ~np.isfinite(array.astype(np.float32))).sum())
        if lost:
            warnings.warn(
                f"constant {literal.label!r}: {lost} elements are out of {storage.value}'s range and became infinite; "
                "use precision bf16 or fp32",
                stacklevel=2,
            )
        return array

    return Literal(type, load, literal.label)
