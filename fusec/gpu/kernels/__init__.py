"""Kernels for what cuDNN lacks or does badly: FAMILIES, a tuple one can read; `find` asks them in turn.

A family looks at a step's nodes and gives a `Kernel` (data: CUDA C and how to launch it), or None if it is not for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusec.gpu.kernels.attention import attention_forward, rotary
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.gpu.kernels.convolution import (
    depthwise,
    few_channels,
    few_filters,
    integer_product,
    split_k,
    squeeze_excite,
    thin_product,
)
from fusec.gpu.kernels.elementwise import all_finite, gather_resize, multi_tensor, pointwise
from fusec.gpu.kernels.norm import batch_norm, instance_norm, layer_norm_backward, row_reduction
from fusec.gpu.kernels.pooling import max_pool_backward, pool_forward
from fusec.ir import Node, Value

Family = Callable[[Sequence[Node], Sequence[Value]], Kernel | None]
FAMILIES: tuple[Family, ...] = (
    attention_forward.attention,
    multi_tensor.lists,  # before pointwise, which would write each tensor's work out
    pointwise.pointwise,
    instance_norm.instance,  # before rows, whose kernel it has among its others
    row_reduction.rows,  # before pooling, since a pool over everything is a reduction
    batch_norm.channels,
    layer_norm_backward.row_backward,
    pool_forward.pooling,
    max_pool_backward.pool_backward,
    depthwise.depthwise,
    squeeze_excite.gate,
    split_k.few_pixels,  # before thin products, which it has among its others
    thin_product.thin_product,
    few_channels.few_channels,  # before sampled, which takes the fourth channel by itself
    few_filters.few_filters,
    gather_resize.sampled,
    integer_product.integer_product,
    rotary.rotary,
    all_finite.finite,
)


def find(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel that runs these nodes (in graph order) and stores these of their results; None if there is none. It is
    written once: steps are looked at again whenever a program is arranged, prepared and bound."""
    written, work = nodes[0].graph.found, (find, *nodes, *outputs)
    if work not in written:
        written[work] = next((k for family in FAMILIES if (k := family(nodes, outputs)) is not None), None)
    return written[work]


__all__ = ["FAMILIES", "Kernel", "find"]
