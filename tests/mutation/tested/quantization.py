"""Faults in quantisation after training: in scales, in what is quantised, and in the nodes that are written."""

from __future__ import annotations

from mutation.mutants import Mutant
from mutation.mutants import for_tests as _m

QUANTIZATION: tuple[Mutant, ...] = (
    _m(
        "histogram_pairs",
        "calibration",
        "quantization/histogram.py",
        "self.counts.reshape(-1, 2).sum(-1)",
        "self.counts.reshape(2, -1).sum(0)",
        "a wider range joins bins that are not neighbours",
        "quantization/test_calibration.py",
    ),
    _m(
        "entropy_keeps_outliers_out",
        "calibration",
        "quantization/thresholds.py",
        "wanted[-1] += counts[bins:].sum()",
        "wanted[-1] += 0",
        "what saturates costs nothing, so the smallest threshold wins",
        "quantization/test_calibration.py",
    ),
    _m(
        "fp8_does_not_saturate",
        "calibration",
        "quantization/number_formats.py",
        "return np.clip(quotient, -self.largest, self.largest).astype(self.dtype.numpy)",
        "return quotient.astype(self.dtype.numpy)",
        "numbers beyond the range of fp8 become NaN",
        "quantization/test_calibration.py",
    ),
    _m(
        "folded_without_mean",
        "quantised models",
        "quantization/fold_batchnorm.py",
        "shift = (bias.astype(np.float64) - mean) * factor + beta",
        "shift = bias.astype(np.float64) * factor + beta",
        "a folded batch norm forgets its mean",
        "quantization/test_placement.py",
    ),
    _m(
        "shortcut_is_the_convolution",
        "quantised models",
        "quantization/residual.py",
        "own = max((0, 1), key=lambda index: self._depth[node.input[index]])",
        "own = min((0, 1), key=lambda index: self._depth[node.input[index]])",
        "the operand that a convolution adds to in its epilogue is rounded",
        "quantization/test_placement.py",
    ),
    _m(
        "blocks_of_conv_by_rows",
        "quantised models",
        "quantization/weights.py",
        'axis = 1 if layer.node.op_type == "Conv" else layer.sum_axis',
        'axis = 1 if layer.node.op_type == "Conv" else layer.channel_axis',
        "blocks of 4-bit weights run across output channels",
        "quantization/test_quantize.py",
    ),
    _m(
        "transposed_gemm_scales",
        "quantised models",
        "quantization/placement.py",
        "channel, summed = (rows, columns) if place == 0 else (columns, rows)",
        "channel, summed = (columns, rows)",
        "a weight on the left gets a scale per summed row",
        "quantization/test_placement.py",
    ),
    _m(
        "nibbles_swapped",
        "quantised models",
        "quantization/model_constants.py",
        "(nibbles[::2] | nibbles[1::2] << 4)",
        "(nibbles[1::2] | nibbles[::2] << 4)",
        "pairs of 4-bit weights change places",
        "quantization/test_quantize.py",
    ),
    _m(
        "best_layer_left_in_float",
        "quantised models",
        "quantization/measure.py",
        "return dict(sorted(found.items(), key=lambda item: item[1]))",
        "return dict(sorted(found.items(), key=lambda item: -item[1]))",
        "the layers that lose least stay in float",
        "quantization/test_quantize.py",
    ),
    _m(
        "sum_without_its_convolution",
        "quantised models",
        "quantization/choose_float.py",
        "if layer.name in quantised and (not layer.follows or layer.follows in quantised)",
        "if layer.name in quantised",
        "a bound is checked with a sum quantised that will be in float",
        "quantization/test_quantize.py",
    ),
)
