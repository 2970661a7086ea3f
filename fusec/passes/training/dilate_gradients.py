"""Compute the image's gradient of a strided 1x1 convolution at the size of its result, and put the zeros in later.

Only one of four pixels (with strides of 2) has a gradient. The kernel of the norm that reads the gradient's sum with
another one reads the small gradient, so that no zeros are written and read.
"""

from __future__ import annotations

from dataclasses import replace

from fusec.ir import HALVES, Graph, Node, Value
from fusec.ops import BatchNormBackward, ConvTranspose, Dilate, Pointwise
from fusec.passes.base import Options, Pass
from fusec.passes.rewriting.rewriter import replace_node
from fusec.passes.rewriting.value_facts import is_pointwise

MAX_OPS = 4  # from the sum to the norm


class DilateGradients(Pass):
    """Write a strided transposed convolution of 1x1 windows as one without strides and a dilate.

    conv_transpose(x, w, strides) = dilate(conv_transpose(x, w), strides)
    """

    name = "dilate_gradients"

    def run(self, graph: Graph, options: Options) -> None:
        for node in list(graph.nodes):
            if _spreads(node) and _is_read_by_norm(node.result):
                _dilate(graph, node)


def _spreads(node: Node) -> bool:
    """Tell if a node only puts the pixels of a product apart, in 16 bits."""
    op = node.op
    if not isinstance(op, ConvTranspose) or node.result.type.dtype not in HALVES or any(op.pads):
        return False
    steps = set(op.strides) - {1}  # kernels read a tensor with one step other than 1
    return len(steps) == 1 and all(size == 1 for size in node.operands[1].type.shape[2:])


def _is_read_by_norm(value: Value) -> bool:
    """Tell if only an addition reads a gradient, and pointwise ops lead from its sum to the gradient of a norm."""
    if len(value.uses) != 1 or not _adds(value.users[0], value):
        return False
    reached = [value.users[0].result]
    for _ in range(MAX_OPS):
        users = [user for v in reached for user in v.users]
        if any(isinstance(user.op, BatchNormBackward) and user.operands[0] in reached for user in users):
            return True
        reached = [user.results[0] for user in users if user.results and is_pointwise(user.results[0])]
    return False


def _adds(node: Node, value: Value) -> bool:
    """Tell if a node adds a tensor of the same type to a value."""
    op = node.op
    return isinstance(op, Pointwise) and op.name == "add" and all(v.type == value.type for v in node.operands)


def _dilate(graph: Graph, node: Node) -> None:
    op, (x, w) = node.op, node.operands
    assert isinstance(op, ConvTranspose)
    plain = replace(op, strides=(1,) * len(op.strides), output_padding=(0,) * len(op.strides))
    small = graph.insert(plain, [x, w], before=node, origin=node.origin).result
    made = graph.insert(Dilate((1, 1, *op.strides), node.result.type.shape), [small], before=node, origin=node.origin)
    replace_node(graph, node, made)
