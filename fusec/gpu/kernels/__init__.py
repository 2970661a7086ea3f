"""List the kernel families, and find the first that can run a step; `fusec.gpu.autotune` decides if it does.

Each kernel family looks at the nodes of a step. It returns a `Kernel` (CUDA C and how to launch it), shaped for the
target of the compilation, or None.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.attention import attention_backward, attention_forward
from fusec.gpu.kernels.attention.cached import cached_attention, rotary, write_rows
from fusec.gpu.kernels.codegen.equal_steps import Family
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Kernel
from fusec.gpu.kernels.convolution import (
    deform_conv,
    depthwise,
    few_filters,
    grouped_conv1d,
    grouped_conv2d,
    resident_filters,
    split_k,
    squeeze_excite,
)
from fusec.gpu.kernels.convolution.few_channels import few_channels, filter_gradient
from fusec.gpu.kernels.elementwise import all_finite, gather_resize, grid_sample, multi_tensor, pointwise, scatter
from fusec.gpu.kernels.norm import instance_norm, layer_norm_backward, row_reduction
from fusec.gpu.kernels.norm.batch_norm import batch_norm
from fusec.gpu.kernels.pooling import max_pool_backward, pool_forward, roi_align
from fusec.gpu.kernels.product import integer_product, thin_product
from fusec.gpu.kernels.product.few_rows import few_rows, streamed_weights
from fusec.gpu.kernels.product.int8 import dense_bytes, resident_weights
from fusec.gpu.kernels.product.packed import packed_product
from fusec.gpu.kernels.recurrent import cumulate, linear_scan, recurrent, scan
from fusec.gpu.kernels.selection import arg_max, non_max_suppression, top_k
from fusec.ir import DType, Node, Value
from fusec.ops import Cast

FAMILIES: tuple[Family, ...] = (
    attention_forward.attention_forward,
    attention_backward.attention_backward,
    multi_tensor.multi_tensor,  # before pointwise, because that writes a piece of source for each tensor
    pointwise.pointwise,
    instance_norm.instance_norm,  # before row reductions, because its variants include theirs
    arg_max.arg_max,
    row_reduction.row_reduction,  # before pools, because a pool over all of an image is a reduction
    batch_norm.batch_norm,
    layer_norm_backward.layer_norm_backward,
    pool_forward.pool_forward,
    max_pool_backward.max_pool_backward,
    depthwise.depthwise,
    squeeze_excite.squeeze_excite,
    split_k.split_k,  # before thin products, because its variants include theirs
    resident_weights.resident_weights,  # before thin and dense products, which are slower where it fits
    thin_product.thin_product,
    dense_bytes.dense_bytes,  # after thin products, which memory bounds
    resident_filters.resident_filters,
    streamed_weights.streamed_weights,  # before few rows, because its variants include theirs
    few_rows.few_rows,
    few_channels.few_channels,  # before gathers, because one would run the pad to four channels alone
    filter_gradient.filter_gradient,
    few_filters.few_filters,
    grouped_conv1d.grouped_conv1d,
    grouped_conv2d.grouped_conv2d,
    deform_conv.deform_conv,
    gather_resize.gather_resize,
    grid_sample.grid_sample,
    roi_align.roi_align,
    integer_product.integer_product,
    packed_product.packed_product,
    cached_attention.cached_attention,
    rotary.rotary,
    write_rows.write_rows,
    all_finite.all_finite,
    non_max_suppression.non_max_suppression,
    top_k.top_k,
    recurrent.recurrent,
    linear_scan.linear_scan,
    scan.scan,
    cumulate.cumulate,
    scatter.scatter,  # after writes of rows, which do several in one launch
)
# Families whose code loads and stores types of 8 bits and fewer.
NARROW_FAMILIES: tuple[Family, ...] = (
    attention_forward.attention_forward,
    row_reduction.row_reduction,
    batch_norm.batch_norm,
    pointwise.pointwise,
    gather_resize.gather_resize,
    packed_product.packed_product,
)


def find(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel that runs these nodes and stores `outputs`; None if no family has one.

    The graph caches the answer, because scheduling, tuning and binding ask for the same steps.

    nodes: in graph order.
    outputs: the results of the nodes that other steps, or the caller, read.
    figures: figures of the GPU that the model is compiled for; they shape the kernel.
    """
    written, work = nodes[0].graph.memo, (find, figures, *nodes, *outputs)
    if work not in written:
        offers = (family(nodes, outputs, figures) for family in families_for(nodes))
        written[work] = next((kernel for kernel in offers if kernel is not None), None)
    return written[work]


def families_for(nodes: Sequence[Node]) -> tuple[Family, ...]:
    """Return the families that may run nodes of these types."""
    if any(node.op == Cast(DType.F8E8M0) for node in nodes):  # its least number is a denormal, which kernels flush
        return ()
    narrow = any(v.type.dtype.is_narrow for node in nodes for v in (*node.operands, *node.results))
    return NARROW_FAMILIES if narrow else FAMILIES


__all__ = ["FAMILIES", "GpuFigures", "Kernel", "families_for", "find"]
