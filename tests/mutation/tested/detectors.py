"""Faults in the heads of detectors: the boxes that stay, and the rows of a bounded result."""

from __future__ import annotations

from mutation.mutants import Mutant
from mutation.mutants import for_tests as _m

DETECTORS: tuple[Mutant, ...] = (
    _m(
        "equal_scores_unordered",
        "detectors",
        "ops/non_max_suppression.py",
        'order = likely[np.argsort(-score[likely], kind="stable")]',
        'order = likely[np.argsort(score[likely], kind="stable")[::-1]]',
        "of equal scores the last box is better",
        "ops/test_non_max_suppression.py",
    ),
    _m(
        "suppressed_by_suppressed",
        "detectors",
        "gpu/kernels/selection/non_max_suppression.cuh",
        "if (present[i] && !(removed >> i & 1ull)) {",
        "if (present[i]) {",
        "a box that is removed removes others of its block, and stays itself",
        "gpu/kernels/selection/test_non_max_suppression.py",
    ),
    _m(
        "zeros_in_order",
        "detectors",
        "gpu/kernels/selection/top_k.cuh",
        "  if (bits << 1 == 0u) bits = 0u;\n",
        "",
        "a negative zero is smaller than a positive one before it",
        "gpu/kernels/selection/test_top_k.py",
    ),
    _m(
        "numbers_cropped",
        "detectors",
        "frontends/onnx/segmented/bounded.py",
        "return small.type == large.type and small.array.tobytes() == large.array.tobytes()",
        "return small.type == large.type",
        "a number of boxes is that of all rows that there can be",
        "segments/test_detector.py",
    ),
    _m(
        "rows_uncropped",
        "detectors",
        "frontends/onnx/segmented/bounded.py",
        "found[name] = known.get(one.name, Crop()) if isinstance(one, Slot) else Crop()",
        "found[name] = Crop()",
        "results have rows after those of boxes",
        "segments/test_detector.py",
    ),
)
