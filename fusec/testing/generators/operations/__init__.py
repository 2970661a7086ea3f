"""Draw each op of the registry: attributes and operands that its type inference accepts, with corner cases.

DRAWS has one function for every op of `fusec.ops.ALL`. It adds at least one such node to the graph.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusec.ops import CLASSES, AvgPool, MaxPool
from fusec.testing.generators.graph_builder import Draw
from fusec.testing.generators.operations import pointwise, products, recurrent, rows, scans, shapes, state, windows

DRAWS: Mapping[str, Draw] = {
    **{name: pointwise.drawing(name) for name in CLASSES},
    "cast": pointwise.cast,
    "conv": windows.conv,
    "conv_flipped": windows.conv_flipped,
    "conv_transpose": windows.conv_transpose,
    "deform_conv": windows.deform_conv,
    "matmul": products.matmul,
    "packed_matmul": products.packed_matmul,
    "attention": products.attention,
    "attention_train": products.attention_train,
    "attention_backward": products.attention_backward,
    "rotary": products.rotary,
    "batch_norm": rows.batch_norm,
    "instance_norm": rows.instance_norm,
    "group_norm": rows.group_norm,
    "layer_norm": rows.layer_norm,
    "rms_norm": rows.rms_norm,
    "lrn": rows.lrn,
    "max_pool": windows.pool(MaxPool),
    "avg_pool": windows.pool(AvgPool),
    "reduce": rows.reduce,
    "softmax": rows.softmax,
    "reshape": shapes.reshape,
    "transpose": shapes.transpose,
    "relayout": shapes.relayout,
    "expand": shapes.expand,
    "concat": shapes.concat,
    "split": shapes.split,
    "slice": shapes.slice_,
    "pad": shapes.pad,
    "dilate": shapes.dilate,
    "gather": shapes.gather,
    "resize": shapes.resize,
    "grid_sample": shapes.grid_sample,
    "roi_align": shapes.roi_align,
    "roi_pool": shapes.roi_pool,
    "top_k": rows.top_k,
    "non_max_suppression": rows.non_max_suppression,
    "scatter": shapes.scatter,
    "cumulate": rows.cumulate,
    "linear_scan": rows.linear_scan,
    "scan": scans.scan,
    "conv_wgrad": windows.conv_wgrad,
    "max_pool_backward": windows.max_pool_backward,
    "max_pool_train": windows.max_pool_train,
    "batch_norm_train": rows.batch_norm_train,
    "channel_sums": rows.channel_sums,
    "batch_norm_by_sums": rows.batch_norm_by_sums,
    "batch_norm_backward": rows.batch_norm_backward,
    "layer_norm_backward": rows.layer_norm_backward,
    "random_bits": state.random_bits,
    "all_finite": state.all_finite,
    "recurrent": recurrent.recurrent,
}
