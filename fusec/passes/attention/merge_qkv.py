"""One product for the queries, keys and values that are projected from the same tensor.

Their weights stand side by side; attention reads its parts of the result by strides. What else could read a part
would have to copy it, so only what goes to attention alone is merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fusec.ir import Array, DType, Graph, Literal, Node, TensorType, Value
from fusec.ops import Attention, MatMul, Reshape, Slice, Transpose, pw
from fusec.passes.base import Options
from fusec.passes.rewriting.affine_ops import single_use
from fusec.passes.rewriting.derived_constants import derive
from fusec.passes.rewriting.rewriter import substitute

ALIGNED = 8  # columns: the parts begin on 16 bytes, as the kernels of attention want
HALVES = (DType.F16, DType.BF16)


@dataclass(frozen=True)
class Branch:
    """A product by a constant, perhaps a constant bias, and the value that then goes to attention."""

    product: Node
    weight: Literal
    bias: Literal | None
    end: Value


@dataclass(frozen=True)
class MergeSiblings:
    """Products of one tensor that go to attention become one."""

    name: ClassVar[str] = "merge_siblings"

    def run(self, graph: Graph, options: Options) -> None:
        siblings: dict[tuple[Value, TensorType], list[Branch]] = {}
        for node in graph.nodes:
            if isinstance(node.op, MatMul) and (branch := _branch(node)) is not None:
                rows = TensorType(node.result.type.shape[:-1], node.result.type.dtype)
                siblings.setdefault((node.operands[0], rows), []).append(branch)
        for branches in siblings.values():
            if len(branches) > 1:
                _merge(graph, branches)


def _branch(product: Node) -> Branch | None:
    found = linear(product)
    return found if found is not None and goes_to_attention(found.end) else None


def linear(product: Node) -> Branch | None:
    """A product in 16 bits by a constant whose columns can stand beside others, with its bias if it has one."""
    x, w = product.operands
    columns = product.result.type.shape[-1]
    if w.literal is None or w.type.rank != 2 or x.literal is not None or x.type.dtype not in HALVES:
        return None
    if columns % ALIGNED or 0 in product.result.type.shape or not single_use(product.result):
        return None
    end, bias = product.result, None
    (user,) = end.users
    if user.op.name == "add":
        b = user.operands[1] if user.operands[0] is end else user.operands[0]
        vector = b.literal is not None and b.type.size == columns == b.type.shape[-1]
        if not vector or user.result.type.shape != end.type.shape:
            return None
        end, bias = user.result, b.literal
    return Branch(product, w.literal, bias, end)


def goes_to_attention(value: Value) -> bool:
    """Whether all that is done with a value is to view it, once, as heads of an attention."""
    while single_use(value):
        ((user, place),) = value.uses
        if isinstance(user.op, Attention):
            return place < 3
        if not isinstance(user.op, (Reshape, Transpose)):
            return False
        value = user.result
    return False


def together(graph: Graph, branches: Sequence[Branch]) -> Value:
    """The results of the branches, which share an operand, side by side."""
    first = branches[0].product
    x, dtype = first.operands[0], first.result.type.dtype
    sizes = [b.weight.type.shape[1] for b in branches]
    wide = TensorType((branches[0].weight.type.shape[0], sum(sizes)), dtype)
    weights = derive(graph, first, wide, [b.weight for b in branches], _beside, branches[0].weight)
    origin = [o for b in branches for o in b.product.origin]
    total = graph.insert(MatMul(), [x, weights], before=first, origin=origin).result
    if any(b.bias is not None for b in branches):
        biases = [b.bias or Literal.of(np.zeros(n, dtype.numpy)) for b, n in zip(branches, sizes, strict=True)]
        bias = derive(graph, first, TensorType((sum(sizes),), dtype), biases, _in_a_row, biases[0])
        total = graph.add(pw("add"), total, bias, before=first)
    return total


def _merge(graph: Graph, branches: Sequence[Branch]) -> None:
    total = together(graph, branches)
    sizes = [b.weight.type.shape[1] for b in branches]
    start, shape = 0, total.type.shape
    for branch, size in zip(branches, sizes, strict=True):
        part = Slice((*(0 for _ in shape[1:]), start), (*shape[:-1], size), (1,) * len(shape))
        node = branch.end.node
        assert node is not None
        substitute(graph, branch.end, graph.add(part, total, before=node), fresh=True)
        start += size


def _beside(*weights: Array) -> Array:
    return np.concatenate(weights, axis=1)


def _in_a_row(*biases: Array) -> Array:
    return np.concatenate([b.reshape(-1) for b in biases])
