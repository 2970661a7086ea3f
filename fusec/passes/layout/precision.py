"""Store floating-point tensors in the precision asked for, with casts only at the graph's edges.

With fp16 or bf16 every fp32 (and fp64) tensor inside becomes that type, constants at compile time. Inputs and outputs
keep the types of the model's interface. With fp32 and tf32 the model's types stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from fusec.ir import Constant, DType, Graph, Literal, Node, Op, Value
from fusec.ops import AttentionBackward, AttentionTrain, BatchNormBySums, Cast, ChannelSums
from fusec.passes.base import Options

_WIDE = (DType.F64, DType.F32)
INFINITE_FROM = 1e30  # a mask's finite constant from here on means infinity
# results that are sums, and operands that expect such sums
SUMS: Mapping[type[Op], tuple[int, ...]] = {AttentionTrain: (1,), ChannelSums: (0, 1)}
READS_SUMS: Mapping[type[Op], tuple[int, ...]] = {AttentionBackward: (5,), BatchNormBySums: (3, 4)}


@dataclass(frozen=True)
class Precision:
    """Store tensors in `Options.storage`; the pass has no options of its own."""

    name: ClassVar[str] = "precision"

    def run(self, graph: Graph, options: Options) -> None:
        storage = options.storage
        if storage is DType.F32:
            return
        interface = [v.type.dtype for v in graph.outputs]
        nodes = list(graph.nodes)
        for value in graph.inputs:
            if value.type.dtype in _WIDE:
                _narrow_input(graph, value, storage, nodes[0] if nodes else graph.return_node)
        narrowed: dict[Literal, Literal] = {}
        for node in nodes:
            _widen_sums(graph, node)
            if isinstance(node.op, Constant) and all(user is graph.return_node for user in node.result.users):
                continue
            if isinstance(node.op, Cast) and node.op.to in _WIDE:
                graph.set_op(node, Cast(storage))
            if isinstance(node.op, Constant) and node.op.literal.type.dtype in _WIDE:
                literal = node.op.literal
                if literal not in narrowed:
                    narrowed[literal] = _narrow(literal, storage, literal.label or node.result.name)
                graph.set_op(node, Constant(narrowed[literal]))
            for value in node.results:
                if value.type.dtype in _WIDE:
                    graph.set_type(value, value.type.with_dtype(storage))
            for place in SUMS.get(type(node.op), ()):
                _keep_wide(graph, node.results[place], storage)
        last, wide = graph.return_node, dict[Value, Value]()
        for index, (value, dtype) in enumerate(zip(graph.outputs, interface, strict=True)):
            if value.type.dtype is dtype:
                continue
            if value not in wide or wide[value].type.dtype is not dtype:
                wide[value] = graph.add(Cast(dtype), value, name=value.name, before=last)
            graph.set_input(last, index, wide[value])


def _keep_wide(graph: Graph, sums: Value, storage: DType) -> None:
    """Keep sums of attention and of channels in f32; readers that are not made for f32 get them rounded."""
    assert sums.node is not None
    readers = [(n, i) for n, i in sums.uses if i not in READS_SUMS.get(type(n.op), ())]
    graph.set_type(sums, sums.type.with_dtype(DType.F32))
    if readers:
        narrow = graph.insert(Cast(storage), [sums], before=_next_node(graph, sums.node)).result
        for node, index in readers:
            graph.set_input(node, index, narrow)


def _widen_sums(graph: Graph, node: Node) -> None:
    """Cast sums that an op reads to f32, unless they have the type of their source."""
    for place in READS_SUMS.get(type(node.op), ()):
        sums = node.operands[place]
        if sums.type.dtype not in (DType.F32, node.operands[0].type.dtype):
            graph.set_input(node, place, graph.add(Cast(DType.F32), sums, before=node))


def _next_node(graph: Graph, node: Node) -> Node:
    """Return the node after one in the graph's order."""
    nodes = list(graph.nodes)
    place = nodes.index(node) + 1
    return nodes[place] if place < len(nodes) else graph.return_node


def _narrow_input(graph: Graph, value: Value, storage: DType, before: Node) -> None:
    """Insert one cast of an input for all its users.

    The return, casts, and readers of f32 sums read the input itself and lose nothing.
    """
    users = [
        (n, i)
        for n, i in value.uses
        if n is not graph.return_node
        and not isinstance(n.op, Cast)
        and not (value.type.dtype is DType.F32 and i in READS_SUMS.get(type(n.op), ()))
    ]
    if not users:
        return
    narrow = graph.add(Cast(storage), value, name=value.name, before=before)
    for node, index in users:
        graph.set_input(node, index, narrow)


def _narrow(literal: Literal, storage: DType, name: str) -> Literal:
    """Convert the literal to the storage type when it is first read.

    Finite numbers stay finite: a mask's lowest number becomes the lowest of the storage type and hides as much, where
    an infinity would make rows of NaN. A warning tells of lost numbers that may have been meant.
    """

    def load() -> np.ndarray[Any, Any]:
        wide, most = literal.array, ml_dtypes.finfo(storage.numpy).max
        with np.errstate(over="ignore"):
            narrow = wide.astype(storage.numpy)
        beyond = np.isfinite(wide) & np.isinf(narrow)
        lost = int((beyond & (np.abs(wide) < INFINITE_FROM)).sum())
        if lost:
            warnings.warn(
                f"constant {name!r}: {lost} of {wide.size} elements are out of {storage.value}'s range and became its "
                "largest numbers; use precision bf16 or fp32",
                stacklevel=2,
            )
        narrow[beyond] = np.copysign(most, narrow[beyond])
        return narrow

    return Literal(literal.type.with_dtype(storage), load, literal.label, ("narrow", storage, name, literal.key))
