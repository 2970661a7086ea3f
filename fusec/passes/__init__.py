"""The pipeline: every pass in the order it runs, with the reason for its place."""

from __future__ import annotations

from fusec.passes.base import Pass
from fusec.passes.cse import MergeEqual
from fusec.passes.fold_batchnorm import FoldBatchNorm
from fusec.passes.fold_constants import FoldConstants
from fusec.passes.simplify import Simplify

PIPELINE: tuple[Pass, ...] = (
    # Clean-up. Folding first: what follows looks for constants, and no-ops show once shapes are numbers.
    FoldConstants(),
    Simplify(),
    # After the two, so that equal constants and equal spellings have become equal nodes.
    MergeEqual(),
    FoldBatchNorm(),
)

__all__ = ["PIPELINE"]
