"""Draw steps that fusec runs as its own kernels: one motif for each family of `fusec.gpu.kernels.FAMILIES`.

Random graphs rarely have the sizes and layouts that most kernel families need. Files are named as the folders of
`fusec.gpu.kernels`.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusec.testing.generators.graph_builder import Draw
from fusec.testing.generators.motifs.kernels import (
    attention,
    convolution,
    elementwise,
    norm,
    pooling,
    product,
    recurrent,
    selection,
)

MOST_ELEMENTS = 1 << 17  # of a value: products with resident weights have at least 256 rows of 256 numbers

KERNELS: Mapping[str, Draw] = {
    draw.__name__: draw
    for draw in (
        attention.attention_forward,
        attention.attention_backward,
        elementwise.multi_tensor,
        elementwise.pointwise,
        norm.instance_norm,
        norm.row_reduction,
        norm.batch_norm,
        norm.layer_norm_backward,
        pooling.pool_forward,
        pooling.max_pool_backward,
        convolution.depthwise,
        convolution.squeeze_excite,
        convolution.split_k,
        product.thin_product,
        product.dense_bytes,
        product.resident_weights,
        convolution.resident_filters,
        product.few_rows,
        product.streamed_weights,
        convolution.few_channels,
        convolution.filter_gradient,
        convolution.grouped_conv1d,
        convolution.grouped_conv2d,
        convolution.deform_conv,
        convolution.few_filters,
        elementwise.gather_resize,
        elementwise.grid_sample,
        pooling.roi_align,
        product.integer_product,
        product.packed_product,
        attention.rotary,
        attention.write_rows,
        attention.cached_attention,
        selection.arg_max,
        elementwise.all_finite,
        selection.non_max_suppression,
        selection.top_k,
        recurrent.recurrent,
        recurrent.linear_scan,
        recurrent.scan,
        recurrent.cumulate,
        elementwise.scatter,
    )
}
