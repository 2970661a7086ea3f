"""Quantise weights: a scale per output channel, or per block along the axis that a node sums over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fusec.quantization.number_formats import Array, NumberFormat
from fusec.quantization.placement import QuantizedLayer


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight as `DequantizeLinear` reads it.

    codes: the weight's shape, or [channels, all else] for filters in blocks; a `Reshape` follows these.
    axis: the axis of `scale`, or the axis of the blocks.
    block: elements along the axis that share a scale; 0 for one scale per index of the axis.
    restored: the weight as float, in its own shape and dtype.
    """

    codes: Array
    scale: Array
    axis: int
    block: int
    restored: Array


def quantized_weight(array: Array, layer: QuantizedLayer, format: NumberFormat, block: int) -> QuantizedWeight:
    """Quantise the weight of a layer by its largest magnitudes.

    block: 0 for a scale per output channel. Filters of a convolution are blocked along their flattened inputs, because
        a scale for each pixel of each filter would take more room than 4-bit codes.
    """
    if not block:
        others = tuple(axis for axis in range(array.ndim) if axis != layer.channel_axis)
        scale = format.scale(np.abs(array.astype(np.float64)).max(axis=others), array.dtype)
        wide = np.expand_dims(scale, others)
        restored = format.rounded(array, wide).astype(array.dtype)
        return QuantizedWeight(format.codes(array, wide), scale, layer.channel_axis, 0, restored)
    flat = array.reshape(len(array), -1) if layer.node.op_type == "Conv" else array
    axis = 1 if layer.node.op_type == "Conv" else layer.sum_axis
    length = flat.shape[axis]
    starts = np.arange(0, length, block)
    magnitudes = np.maximum.reduceat(np.abs(flat.astype(np.float64)), starts, axis=axis)
    scale = format.scale(magnitudes, array.dtype)
    wide = np.take(np.repeat(scale, block, axis=axis), range(length), axis=axis)
    restored = format.rounded(flat, wide).astype(array.dtype).reshape(array.shape)
    return QuantizedWeight(format.codes(flat, wide), scale, axis, block, restored)
