"""The pipeline: every pass in the order it runs, with the reason for its place."""

from __future__ import annotations

from fusec.passes.attention.deterministic_attention import OrderGradients
from fusec.passes.attention.merge_qkv import MergeSiblings
from fusec.passes.attention.merge_rotary_qkv import MergeTurned
from fusec.passes.attention.packed_qkv_backward import OwnViews
from fusec.passes.attention.recognise_attention import Attend
from fusec.passes.attention.slice_packed_qkv import ReadPacked
from fusec.passes.base import CONCAT_IN_PLACE, UNORDERED, UNROUNDED, Pass
from fusec.passes.cleanup.canonicalise import Canonicalise
from fusec.passes.cleanup.cse import MergeEqual
from fusec.passes.cleanup.fold_constants import FoldConstants
from fusec.passes.cleanup.simplify import Simplify
from fusec.passes.folding.fold_batchnorm import FoldBatchNorm
from fusec.passes.folding.fold_pads import FoldPads
from fusec.passes.folding.fold_scales import FoldScales
from fusec.passes.folding.fold_upsampling import Upsampled
from fusec.passes.folding.pad_channels import WidenChannels
from fusec.passes.folding.patch_embedding import Patches
from fusec.passes.folding.reorder_bias_first import OrderSums
from fusec.passes.layout.assign_layout import Layout
from fusec.passes.layout.epilogue_before_views import ViewsBehind
from fusec.passes.layout.precision import Precision
from fusec.passes.layout.sink_views import MoveViews
from fusec.passes.rewriting.rewriter import Rewriter
from fusec.passes.rules.recognise import Recognise
from fusec.passes.training.relu_mask_from_norm import MaskByNorm
from fusec.passes.training.rematerialise import Rematerialise
from fusec.passes.training.split_batchnorm_stats import SumsInFront

# What other passes leave behind: constants of constants, no-ops, equal nodes. Folding first, since no-ops
# show once shapes and operands are numbers; merging last, when equal things have become equal nodes.
CLEAN_UP: tuple[Pass, ...] = (FoldConstants(), Simplify(), MergeEqual())

UNLAID: tuple[Pass, ...] = (
    *CLEAN_UP,
    # Before every rule that looks for a pattern: each then needs one spelling.
    Canonicalise(),
    # Before factors are folded: the 1/6 of a hard swish would go into the weights that follow it.
    Recognise(),
    # After softmax is recognised; before the factor and views it takes in are moved elsewhere.
    Attend(),
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
    # Only where numbers are stored in 16 bits. Before the fourth channel, which a product of patches has no use for.
    Patches(),
    WidenChannels(),
    # Behind Precision, too: in 16 bits alone was it measured.
    Upsampled(),
    # Late, since it looks at nodes side by side as the partitioner will.
    OrderSums(),
    *CLEAN_UP,
)

# Once more where attention is written out again, since its operands are then better left apart.
FINISH: tuple[Pass, ...] = (
    # After the folds and narrowing: weights are put beside each other as they will be stored.
    MergeTurned(),
    MergeSiblings(),
    # Late too: where attention is written out, slices of the turned projection cost nothing.
    ReadPacked(),
    *CLEAN_UP,
    # Before it is seen which values are read late: the relu's result is then not among them for this.
    MaskByNorm(),
    # After the last merging of equal nodes, which would undo it.
    Rematerialise(),
    OwnViews(),
    # Only where it was asked for, and of the ops that are left.
    OrderGradients(),
    # Late: a node made after it would have no considered memory order.
    Layout(),
    # Which these go by, and keep; the latter behind whatever looks for a batch norm.
    ViewsBehind(),
    SumsInFront(),
)

PIPELINE: tuple[Pass, ...] = (*UNLAID, *FINISH)


# What changes where (or of what) a value is rounded to 16 bits, by the name of a pass or rule: left out where
# rounding follows the model's own ops.
REROUNDING = frozenset(
    {
        *("recognise", "attend", "fold_batchnorm", "fold_scales", "order_sums", "upsampled", "sums_in_front"),
        *("cube", "reciprocal_of_root", "divide_by_root", "divide_by_constant"),
    }
)


def rules() -> dict[str, tuple[Rewriter, ...]]:
    """The rules of every pass that has some, by the pass's name; `Options.disable` takes both names."""
    return {step.name: getattr(step, "rules", ()) for step in PIPELINE}


def names() -> frozenset[str]:
    """Everything `Options.disable` can name."""
    found = frozenset(step.name for step in PIPELINE) | {r.name for known in rules().values() for r in known}
    return found | {UNROUNDED, UNORDERED, CONCAT_IN_PLACE}


__all__ = ["CLEAN_UP", "FINISH", "PIPELINE", "REROUNDING", "UNLAID", "names", "rules"]
