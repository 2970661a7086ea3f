"""List every pass in the order it runs, with the reason for its place."""

from __future__ import annotations

from fusec.passes.attention.deterministic_attention import DeterministicAttention
from fusec.passes.attention.merge_qkv import MergeQkv
from fusec.passes.attention.merge_rotary_parts import MergeRotaryParts
from fusec.passes.attention.merge_rotary_qkv import MergeRotaryQkv
from fusec.passes.attention.packed_qkv_backward import PackedQkvBackward
from fusec.passes.attention.recognise_attention import RecogniseAttention
from fusec.passes.attention.slice_packed_qkv import SlicePackedQkv
from fusec.passes.base import CONCAT_IN_PLACE, ROUND_ACTIVATIONS, UNORDERED, UNROUNDED, Pass, RulePass
from fusec.passes.cleanup.canonicalise import Canonicalise
from fusec.passes.cleanup.cse import Cse
from fusec.passes.cleanup.drop_unread_rows import DropUnreadRows
from fusec.passes.cleanup.fold_constants import FoldConstants
from fusec.passes.cleanup.simplify import Simplify
from fusec.passes.folding.add_before_concat import AddBeforeConcat
from fusec.passes.folding.align_channels import AlignChannels
from fusec.passes.folding.expand_deform_conv import ExpandDeformConv
from fusec.passes.folding.expand_scan import ExpandScan
from fusec.passes.folding.fold_batchnorm import FoldBatchNorm
from fusec.passes.folding.fold_pads import FoldPads
from fusec.passes.folding.fold_scales import FoldScales
from fusec.passes.folding.fold_upsampling import FoldUpsampling
from fusec.passes.folding.pad_channels import PadChannels
from fusec.passes.folding.patch_embedding import PatchEmbedding
from fusec.passes.folding.reorder_bias_first import ReorderBiasFirst
from fusec.passes.layout.assign_layout import AssignLayout
from fusec.passes.layout.cast_before_copy import CastBeforeCopy
from fusec.passes.layout.epilogue_before_views import EpilogueBeforeViews
from fusec.passes.layout.gather_windows import GatherWindows
from fusec.passes.layout.precision import Precision
from fusec.passes.layout.sink_views import SinkViews
from fusec.passes.quantization.fast_fp8_sums import FastFp8Sums
from fusec.passes.quantization.keep_packed_weights import KeepPackedWeights
from fusec.passes.quantization.run_in_fp8 import RunInFp8
from fusec.passes.quantization.run_in_integers import RunInIntegers
from fusec.passes.quantization.tanh_before_fp8 import TanhBeforeFp8
from fusec.passes.rewriting.rewriter import Rewriter
from fusec.passes.rules.recognise import Recognise
from fusec.passes.rules.recognise_scan import RecogniseScan
from fusec.passes.training.dilate_gradients import DilateGradients
from fusec.passes.training.drop_zero_rows import DropZeroRows
from fusec.passes.training.max_pool_places import MaxPoolPlaces
from fusec.passes.training.norm_where_added import NormWhereAdded
from fusec.passes.training.relu_mask_bits import ReluMaskBits
from fusec.passes.training.relu_mask_from_norm import ReluMaskFromNorm
from fusec.passes.training.rematerialise import Rematerialise
from fusec.passes.training.split_batchnorm_stats import SplitBatchNormStats

# Clean up after other passes: constants of constants, no-ops, equal nodes. Folding runs first, because no-ops show once
# shapes and operands are numbers. Merging runs last, when equal things have become equal nodes.
CLEAN_UP: tuple[Pass, ...] = (FoldConstants(), Simplify(), Cse())

EARLY_PASSES: tuple[Pass, ...] = (
    # Before all passes that would change the nodes of the steps.
    ExpandScan(),
    # Before constants are folded, because that makes floats of quantised weights.
    RunInIntegers(),
    # Like it, for operands of the other 8-bit type.
    RunInFp8(),
    # After the pass that makes such products.
    FastFp8Sums(),
    # After integer products, which are faster where the other operand is quantised, too. Before folding, like them.
    KeepPackedWeights(),
    *CLEAN_UP,
    # Before every rule that looks for a pattern, because each then needs one spelling.
    Canonicalise(),
    # Reductions that keep their dims now are equal, and the patterns of norms read each value once.
    Cse(),
    # Before factors are folded, because the 1/6 of a hard swish would go into the weights after it.
    Recognise(),
    # After indices became slices, and before views move, because each step is found by the slices that it reads.
    RecogniseScan(),
    # After the gelu is recognised.
    TanhBeforeFp8(),
    # After softmax is recognised; before other passes move the factor and views that attention contains.
    RecogniseAttention(),
    # Before views move, because windows are then cut next to their roll.
    GatherWindows(),
    # After recognition, whose patterns expect views in place; before the folds, so that a convolution
    # is next to the BatchNorm, factor or pad from which a transpose separated it.
    SinkViews(),
    *CLEAN_UP,
    # With no views between rows, too. Before the pass that drops what the slices of its results leave out.
    DropZeroRows(),
    # After norms and gelu are recognised, and with no views between rows.
    DropUnreadRows(),
    # Before the scales: a BatchNorm without a convolution before it becomes a mul and an add,
    FoldBatchNorm(),
    # which a convolution after it can still take.
    FoldScales(),
    # After the shifts in FoldScales, which need a convolution without pads.
    FoldPads(),
    # Before the clean-up, which computes the sums of constants.
    AddBeforeConcat(),
    *CLEAN_UP,
    # After the folds: it rounds each weight once, in its last version.
    Precision(),
    # Only where numbers are stored in 16 bits. Before the fourth channel, which a matmul of patches does not need.
    PatchEmbedding(),
    PadChannels(),
    # After the fourth channel and the filters of heads, which that pass pads alone.
    AlignChannels(),
    # After Precision too, because it was measured in 16 bits alone.
    FoldUpsampling(),
    # Late, because it looks at neighbouring nodes as the partitioner will.
    ReorderBiasFirst(),
    *CLEAN_UP,
)

# These run again where attention is expanded again, because its operands are then better separate.
LATE_PASSES: tuple[Pass, ...] = (
    # After narrowing, because the places of windows stay in fp32. Before memory orders are chosen.
    ExpandDeformConv(),
    # After the folds and narrowing, because weights are concatenated as they will be stored.
    MergeRotaryQkv(),
    MergeQkv(),
    MergeRotaryParts(),  # after the products are merged, because queries and keys are then parts of one row
    # Late too: where attention is expanded, slices of the transposed projection cost nothing.
    SlicePackedQkv(),
    *CLEAN_UP,
    # Before values that are read late are found, because the relu's result is then not among them.
    ReluMaskFromNorm(),
    # After the last merging of equal nodes, which would undo it.
    Rematerialise(),
    # After the last pass that recomputes values, which would compute the mask from the relu's result again.
    ReluMaskBits(),
    # After the masks, because it follows the sum of two gradients to the norm through them.
    DilateGradients(),
    # After the passes that look for a relu, or recompute one, from the sum of two norms.
    NormWhereAdded(),
    PackedQkvBackward(),
    # Only where the caller asked for it, and for the ops that are left.
    DeterministicAttention(),
    # Late, because the pass chooses no memory order for nodes inserted after it.
    AssignLayout(),
    # These use those orders and keep them; the last runs after every pass that looks for a batch norm.
    CastBeforeCopy(),
    EpilogueBeforeViews(),
    SplitBatchNormStats(),
    # Last, because other passes look for pools, and the places take over the order of the pool's result.
    MaxPoolPlaces(),
)

PIPELINE: tuple[Pass, ...] = (*EARLY_PASSES, *LATE_PASSES)


# Names of passes and rules that change where (or of what) a value is rounded to 16 bits, or to integers of 8 bits. They
# are left out where rounding follows the model's own ops.
REROUNDING = frozenset(
    {
        *(
            "recognise",
            "recognise_scan",
            "recognise_attention",
            "fold_batchnorm",
            "fold_scales",
            "reorder_bias_first",
            "fold_upsampling",
        ),
        *("split_batchnorm_stats", "unrounded_addend", "keep_packed_weights"),
        *("cube", "reciprocal_of_root", "divide_by_root", "divide_by_constant"),
    }
)


def rules_by_pass() -> dict[str, tuple[Rewriter, ...]]:
    """Return the rules of every pass that has some, by the pass's name; `Options.disable` takes both names."""
    return {step.name: step.rules if isinstance(step, RulePass) else () for step in PIPELINE}


def names() -> frozenset[str]:
    """Return every name that `Options.disable` accepts."""
    found = frozenset(step.name for step in PIPELINE) | {r.name for known in rules_by_pass().values() for r in known}
    return found | {UNROUNDED, UNORDERED, CONCAT_IN_PLACE, ROUND_ACTIVATIONS}


__all__ = ["CLEAN_UP", "EARLY_PASSES", "LATE_PASSES", "PIPELINE", "REROUNDING", "names", "rules_by_pass"]
