"""Kernels for what cuDNN lacks or does badly: FAMILIES, a tuple one can read; `find` asks them in turn.

A family looks at a step's nodes and gives a `Kernel` (data: CUDA C and how to launch it), or None if it is not for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusec.gpu.kernels import (
    attention,
    channels,
    depthwise,
    few_channels,
    few_filters,
    few_pixels,
    finite,
    gate,
    instance,
    integer_product,
    lists,
    pointwise,
    pool_backward,
    pooling,
    rotary,
    row_backward,
    rows,
    sampled,
    thin_product,
)
from fusec.gpu.kernels.spec import Kernel
from fusec.ir import Node, Value

Family = Callable[[Sequence[Node], Sequence[Value]], Kernel | None]
FAMILIES: tuple[Family, ...] = (
    attention.attention,
    lists.lists,  # before pointwise, which would write each tensor's work out
    pointwise.pointwise,
    instance.instance,  # before rows, whose kernel it has among its others
    rows.rows,  # before pooling, since a pool over everything is a reduction
    channels.channels,
    row_backward.row_backward,
    pooling.pooling,
    pool_backward.pool_backward,
    depthwise.depthwise,
    gate.gate,
    few_pixels.few_pixels,  # before thin products, which it has among its others
    thin_product.thin_product,
    few_channels.few_channels,  # before sampled, which takes the fourth channel by itself
    few_filters.few_filters,
    sampled.sampled,
    integer_product.integer_product,
    rotary.rotary,
    finite.finite,
)


def find(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """The kernel that runs these nodes (in graph order) and stores these of their results; None if there is none. It is
    written once: steps are looked at again whenever a program is arranged, prepared and bound."""
    written, work = nodes[0].graph.found, (find, *nodes, *outputs)
    if work not in written:
        written[work] = next((k for family in FAMILIES if (k := family(nodes, outputs)) is not None), None)
    return written[work]


__all__ = ["FAMILIES", "Kernel", "find"]
