"""Propose groups of steps that one kernel could run together; measured times accept or reject them."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels import GpuFigures
from fusec.gpu.kernels.attention.cached.match_cached import begins_cached_attention, is_cached_attention
from fusec.gpu.kernels.codegen.indexing import VIEW_OPS
from fusec.gpu.kernels.codegen.pointwise_code import BYTES, can_generate
from fusec.gpu.kernels.convolution.depthwise import depthwise_with_mean, is_depthwise_step
from fusec.gpu.kernels.convolution.squeeze_excite import is_small_product, match_layers
from fusec.gpu.kernels.product.product_step import match_product
from fusec.gpu.kernels.product.row_norm import MAX_STREAMED, ROW_PRODUCTS, begins_few_rows
from fusec.ir import DType, Node
from fusec.ops import Attention, Cast, Conv, LayerNorm, MatMul, Reduce, RmsNorm

ROUNDED = (LayerNorm, RmsNorm, Attention)  # ops whose kernels round their results to 8 bits, too


def is_joint_work(nodes: Sequence[Node]) -> bool:
    """Tell if a kernel's nodes could be several steps.

    They are one of these:

    - a depthwise convolution and the mean of its result
    - several products
    - pointwise ops and then a product
    - a norm of few rows and products of its result
    - a norm or attention and the rounding of its result
    - writes into a cache, and attention that reads it
    """
    if is_cached_attention(nodes):
        return True
    if begins_few_rows(nodes, MAX_STREAMED):
        return any(isinstance(node.op, ROW_PRODUCTS) for node in nodes)
    if is_rounded(nodes):
        return True
    products = [i for i, node in enumerate(nodes) if isinstance(node.op, (Conv, MatMul))]
    if len(products) != 1:
        return len(products) > 1
    prologue = nodes[: products[0]]
    return (
        any(isinstance(node.op, Reduce) for node in nodes)
        if not prologue
        else all(can_generate(node) for node in prologue)
    )


def rounded_at(nodes: Sequence[Node]) -> int | None:
    """Return the place of a norm of rows, or of attention, between views and pointwise ops; None if there is none."""
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, ROUNDED)), None)
    if at is None or not all(isinstance(node.op, VIEW_OPS) for node in nodes[:at]):
        return None
    return at if all(map(can_generate, nodes[at + 1 :])) else None


def is_rounded(nodes: Sequence[Node]) -> bool:
    """Return True for such a norm or attention if the last op rounds to 8 bits, or widens the result of a model.

    Alone, the rounding or cast would read the result again.
    """
    at = rounded_at(nodes)
    if at is None or at + 1 == len(nodes):
        return False
    last = nodes[-1]
    return last.result.type.dtype in BYTES or (at + 2 == len(nodes) and last.op == Cast(DType.F32))


def may_begin(nodes: Sequence[Node], figures: GpuFigures) -> bool:
    """Tell if a group of steps that begins with these nodes may become such a kernel."""
    first = nodes[0]
    if begins_few_rows(nodes, MAX_STREAMED) or begins_cached_attention(nodes):
        return True
    if any(isinstance(node.op, ROUNDED) for node in nodes):
        return rounded_at(nodes) is not None
    if can_generate(first):
        if not any(isinstance(node.op, (Conv, MatMul)) for node in nodes):
            return all(can_generate(node) for node in nodes)
        match = match_product(nodes)
        return match is not None and bool(match.prologue) and match.fits(figures)
    if is_small_product(first):
        return match_layers(nodes, 1) is not None
    if not isinstance(first.op, Conv):
        return False
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, Reduce)), None)
    if at is None:
        return is_depthwise_step(nodes, [first.result])
    return bool(depthwise_with_mean(nodes[: at + 1], [], figures)) and (
        at + 1 == len(nodes) or match_layers(nodes[at + 1 :], 0) is not None
    )
