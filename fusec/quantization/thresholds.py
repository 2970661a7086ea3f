"""Choose the magnitude up to which a tensor is represented: larger ones saturate."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fusec.ir import HostArray
from fusec.quantization.histogram import Histogram
from fusec.quantization.number_formats import NumberFormat

# A bin that only saturated magnitudes fill has no probability in the quantised distribution. It gets this many counts,
# as in MXNet's and onnxruntime's calibrators; with none, a single outlier would make every threshold below it infinite.
EMPTY = 1e-4
FIRST_BIN, STRIDE = 128, 8  # entropy tries thresholds from bin 128, every eighth bin: 0.4% to 0.8% of the range apart


def largest_magnitude(histogram: Histogram, format: NumberFormat, percentile: float) -> float:
    """Return the largest magnitude, so that nothing saturates."""
    return histogram.largest


def percentile_of(histogram: Histogram, format: NumberFormat, percentile: float) -> float:
    """Return the magnitude that `percentile` percent of all elements do not exceed."""
    total = int(histogram.counts.sum()) + histogram.zeros
    reached = histogram.zeros + np.cumsum(histogram.counts)
    bin = int(np.searchsorted(reached, total * percentile / 100.0))
    return min((bin + 1) * histogram.width, histogram.largest)


def least_divergence(histogram: Histogram, format: NumberFormat, percentile: float) -> float:
    """Return the threshold whose quantised distribution differs least from the original one.

    The measure is the Kullback-Leibler divergence, as in NVIDIA's calibrators: S. Migacz, "8-bit Inference with
    TensorRT", GTC 2017. Zeros are left out, because they stay exact with every threshold.
    """
    used = int(np.flatnonzero(histogram.counts)[-1]) + 1 if histogram.counts.any() else 0
    best, threshold = np.inf, histogram.largest
    for bins in range(used, FIRST_BIN - 1, -STRIDE):
        if (found := divergence(histogram.counts[:used], bins, format)) < best:
            best, threshold = found, min(bins * histogram.width, histogram.largest)
    return threshold


def divergence(counts: HostArray, bins: int, format: NumberFormat) -> float:
    """Return the Kullback-Leibler divergence if magnitudes from bin `bins` on saturate."""
    centres = np.arange(bins, dtype=np.float32) + np.float32(0.5)
    codes = format.codes(centres, format.scale(float(bins), np.dtype(np.float32))).astype(np.float32)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(codes)) + 1])
    inside = counts[:bins].astype(np.float64)
    wanted = inside.copy()
    wanted[-1] += counts[bins:].sum()
    # each code spreads its count evenly over the bins that it stands for and that are not empty
    occupied = inside > 0
    sums, places = np.add.reduceat(inside, starts), np.add.reduceat(occupied, starts, dtype=np.float64)
    lengths = np.diff([*starts, bins])
    spread = np.repeat(sums / np.maximum(places, 1.0), lengths) * occupied
    seen = wanted > 0
    quantised = np.maximum(spread[seen], EMPTY)
    p, q = wanted[seen] / wanted.sum(), quantised / quantised.sum()
    return float((p * np.log(p / q)).sum())


CALIBRATIONS: Mapping[str, Callable[[Histogram, NumberFormat, float], float]] = {
    "max": largest_magnitude,
    "entropy": least_divergence,
    "percentile": percentile_of,
}
