"""Which steps one kernel could do together though cuDNN could do each, or its product: proposals, which measured times
accept or not (`step_candidates`).
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.pointwise_code import takes
from fusec.gpu.kernels.convolution.depthwise import is_for, with_mean
from fusec.gpu.kernels.convolution.squeeze_excite import chained, is_small_product
from fusec.gpu.kernels.convolution.thin_product import parted
from fusec.ir import Node
from fusec.ops import Conv, MatMul, Reduce


def is_joint_work(nodes: Sequence[Node]) -> bool:
    """Whether a kernel's nodes are the work of several such steps: a depthwise convolution with the mean of what it
    gives, a chain of products, or a product with pointwise ops in front."""
    products = [i for i, node in enumerate(nodes) if isinstance(node.op, (Conv, MatMul))]
    if len(products) != 1:
        return len(products) > 1
    front = nodes[: products[0]]
    return any(isinstance(node.op, Reduce) for node in nodes) if not front else all(takes(node) for node in front)


def begins(nodes: Sequence[Node]) -> bool:
    """Whether nodes may be the beginning of such work."""
    first = nodes[0]
    if takes(first):
        product = next((node for node in nodes if isinstance(node.op, (Conv, MatMul))), None)
        if product is None:
            return all(takes(node) for node in nodes)
        part = parted(nodes, product) if all(takes(node) or node is product for node in nodes) else None
        return part is not None and bool(part.before) and part.fits
    if is_small_product(first):
        return chained(nodes, 1) is not None
    if not isinstance(first.op, Conv):
        return False
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Reduce)), None)
    if at is None:
        return is_for(nodes, [first.result])
    return bool(with_mean(nodes[: at + 1], [])) and (at + 1 == len(nodes) or chained(nodes[at + 1 :], 0) is not None)
