"""List the motifs of random graphs: groups of ops that fuse, or that a partitioner can easily get wrong.

Independent ops would form these groups too rarely.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.attention_motifs import attention
from fusec.testing.generators.motifs.branching import branches, cycle, diamond, escape
from fusec.testing.generators.motifs.casts import cast_and_back, norm_between_casts
from fusec.testing.generators.motifs.layers import (
    convolution_block,
    dense_block,
    pointwise_sequence,
    product_block,
    residual_block,
    squeeze_excite,
    summed_block,
    transposed_rows,
)
from fusec.testing.generators.motifs.quantised import quantised_layer, weights_alone
from fusec.testing.generators.motifs.repeated_work import constant_ops, near_repeats, repeated_op
from fusec.testing.generators.motifs.rewrite_rules import equation
from fusec.testing.generators.motifs.views import (
    expanded,
    move_sequence,
    padded_pool,
    shuffle,
    sliced_twice,
    square,
    transposed_operands,
)
from fusec.testing.generators.operations import DRAWS


def any_op(b: RandomGraph) -> None:
    """Draw one op of the registry, all with equal probability."""
    DRAWS[b.pick(_OPS)](b)


_OPS = tuple(DRAWS)

# motifs with their weights (about percent)
MOTIFS: Mapping[Callable[[RandomGraph], None], int] = {
    any_op: 34,
    convolution_block: 14,
    pointwise_sequence: 6,
    product_block: 7,
    equation: 10,
    residual_block: 5,
    summed_block: 2,
    squeeze_excite: 3,
    attention: 5,
    norm_between_casts: 4,
    escape: 4,
    cycle: 4,
    diamond: 4,
    shuffle: 6,
    move_sequence: 7,
    padded_pool: 4,
    cast_and_back: 2,
    transposed_operands: 4,
    branches: 5,
    dense_block: 4,
    transposed_rows: 3,
    sliced_twice: 2,
    near_repeats: 5,
    square: 3,
    expanded: 2,
    repeated_op: 4,
    constant_ops: 2,
    quantised_layer: 4,
    weights_alone: 3,
}
