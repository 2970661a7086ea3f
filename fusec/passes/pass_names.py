"""Translate the names that passes and rules had before, because saved findings, files and scripts use them."""

from __future__ import annotations

from collections.abc import Collection

# Old name -> name of the pass, which is that of its file, or of the rewrite rule.
RENAMED = {
    "attend": "recognise_attention",
    "merge_siblings": "merge_qkv",
    "merge_turned": "merge_rotary_qkv",
    "own_views": "packed_qkv_backward",
    "read_packed": "slice_packed_qkv",
    "order_gradients": "deterministic_attention",
    "upsampled": "fold_upsampling",
    "widen_channels": "pad_channels",
    "patches": "patch_embedding",
    "order_sums": "reorder_bias_first",
    "layout": "assign_layout",
    "views_behind": "epilogue_before_views",
    "move_views": "sink_views",
    "mask_by_norm": "relu_mask_from_norm",
    "sums_in_front": "split_batchnorm_stats",
    "layer_norm_spelt": "layer_norm_from_moments",
    "instance_norm_spelt": "instance_norm_from_moments",
    "rms_norm_spelt": "rms_norm_from_mean_square",
    "group_norm_spelt": "group_norm_from_instance_norm",
    "log_softmax_spelt": "log_softmax_from_exponentials",
    "softmax_spelt": "softmax_from_exponentials",
    "sigmoid_spelt": "sigmoid_from_exponential",
    "softplus_spelt": "softplus_from_logarithm",
    "softsign_spelt": "softsign_from_quotient",
    "rotary_spelt": "rotary_from_halves",
    "turned_rows_down": "transposed_rows_down",
    "turned_rows_up": "transposed_rows_up",
}


def current_names(names: Collection[str]) -> frozenset[str]:
    """Return names of passes and rules, with the current name of each that was renamed."""
    return frozenset(RENAMED.get(name, name) for name in names)
