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
        "waiting &= ~(1ull << i | inside[i]);",
        "waiting &= ~(1ull << i);",
        "a box that is removed removes others of its column, and stays itself",
        "gpu/kernels/selection/test_non_max_suppression.py",
    ),
    _m(
        "quotients_unrounded",
        "detectors",
        "gpu/kernels/selection/non_max_suppression.cuh",
        "return __fdiv_rn(shared, united) > IOU;",
        "return true;",
        "an overlap that rounds to the limit is above it",
        "gpu/kernels/selection/test_non_max_suppression.py",
    ),
    _m(
        "chosen_in_panels_forgotten",
        "detectors",
        "gpu/kernels/selection/non_max_suppression.py",
        'cuda("chosen_before", BOXES_READ=boxes) if plan.panels > 1 else ""',
        'cuda("chosen_before", BOXES_READ=boxes) if plan.panels > 2 else ""',
        "boxes of the second of two panels are not compared with those that were chosen in the first",
        "gpu/kernels/selection/test_non_max_suppression.py",
    ),
    _m(
        "maxima_of_other_dims",
        "detectors",
        "passes/cleanup/cse.py",
        "return (node.op.kind, node.op.axes, id(",
        "return (node.op.kind, len(node.op.axes), id(",
        "reductions over other dims are merged",
        "passes/test_cases.py",
    ),
    _m(
        "neighbour_uncut",
        "detectors",
        "gpu/kernels/elementwise/unaligned_copy.cuh",
        "if (shift & 4u)",
        "if (shift & 16u)",
        "words of 16 bytes are cut at the wrong place",
        "gpu/kernels/elementwise/test_unaligned_copy.py",
    ),
    _m(
        "last_level_unsorted",
        "detectors",
        "gpu/kernels/selection/bitonic_sort.cuh",
        "if (step == 1u) {",
        "if (step == 2u) {",
        "neighbours are not exchanged where levels are odd",
        "gpu/kernels/selection/test_top_k.py",
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
