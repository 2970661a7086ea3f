"""The pipeline: every pass in the order it runs, with the reason for its place."""

from __future__ import annotations

from fusec.passes.base import Pass
from fusec.passes.canonicalise import Canonicalise
from fusec.passes.cse import MergeEqual
from fusec.passes.fold_batchnorm import FoldBatchNorm
from fusec.passes.fold_constants import FoldConstants
from fusec.passes.fold_pads import FoldPads
from fusec.passes.fold_scales import FoldScales
from fusec.passes.layout import Layout
from fusec.passes.move_views import MoveViews
from fusec.passes.order_sums import OrderSums
from fusec.passes.precision import Precision
from fusec.passes.recognise import Recognise
from fusec.passes.rematerialise import Rematerialise
from fusec.passes.rewrite import Rewriter
from fusec.passes.simplify import Simplify

# What other passes leave behind: constants of constants, no-ops, equal nodes. Folding first, since no-ops
# show once shapes and operands are numbers; merging last, when equal things have become equal nodes.
CLEAN_UP: tuple[Pass, ...] = (FoldConstants(), Simplify(), MergeEqual())

PIPELINE: tuple[Pass, ...] = (
    *CLEAN_UP,
    # Before every rule that looks for a pattern: each then needs one spelling.
    Canonicalise(),
    # Before factors are folded: the 1/6 of a hard swish would go into the weights that follow it.
    Recognise(),
    # After recognition, which wants what it looks for unmoved; before the folds, so that a convolution
    # meets the BatchNorm, factor or pad from which a transpose kept it.
    MoveViews(),
    *CLEAN_UP,
    # Before the scales: where BatchNorm has no convolution before it, it leaves a mul and an add,
    FoldBatchNorm(),
    # which a convolution after it can still take.
    FoldScales(),
    # After the shifts in FoldScales, which need a convolution without pads.
    FoldPads(),
    *CLEAN_UP,
    # After the folds: it sees each weight in its final form and rounds it once.
    Precision(),
    # Late, since it looks at nodes side by side as the partitioner will.
    OrderSums(),
    *CLEAN_UP,
    # After the last merging of equal nodes, which would undo it.
    Rematerialise(),
    # Last: a node made after it would have no considered memory order.
    Layout(),
)


def rules() -> dict[str, tuple[Rewriter, ...]]:
    """The rules of every pass that has some, by the pass's name; `Options.disable` takes both names."""
    return {step.name: getattr(step, "rules", ()) for step in PIPELINE}


def names() -> frozenset[str]:
    """Everything `Options.disable` can name."""
    return frozenset(step.name for step in PIPELINE) | {r.name for known in rules().values() for r in known}


__all__ = ["CLEAN_UP", "PIPELINE", "names", "rules"]
