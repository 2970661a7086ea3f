"""What graphs are made of more often than chance would have it: what fuses, and what tempts a partitioner to err."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusec.testing.generators.graph_builder import Builder
from fusec.testing.generators.motifs.attention_motifs import attention
from fusec.testing.generators.motifs.branching import branches, cycle, diamond, escape
from fusec.testing.generators.motifs.casts import there_and_back, there_and_norm
from fusec.testing.generators.motifs.layers import (
    chain,
    convolution_block,
    dense_block,
    gate,
    product_block,
    residual_block,
    summed_block,
    turned_rows,
)
from fusec.testing.generators.motifs.repeated_work import alike, of_constants, twins
from fusec.testing.generators.motifs.rewrite_rules import equation
from fusec.testing.generators.motifs.views import (
    expanded,
    padded_pool,
    row,
    shuffle,
    sliced_twice,
    square,
    turned_together,
)
from fusec.testing.generators.operations import DRAWS


def any_op(b: Builder) -> None:
    """One op of the registry, each as likely as another."""
    DRAWS[b.pick(_OPS)](b)


_OPS = tuple(DRAWS)

# how many times in a hundred or so
MOTIFS: Mapping[Callable[[Builder], None], int] = {
    any_op: 34,
    convolution_block: 14,
    chain: 6,
    product_block: 7,
    equation: 10,
    residual_block: 5,
    summed_block: 2,
    gate: 3,
    attention: 5,
    there_and_norm: 2,
    escape: 4,
    cycle: 4,
    diamond: 4,
    shuffle: 6,
    row: 7,
    padded_pool: 4,
    there_and_back: 2,
    turned_together: 4,
    branches: 5,
    dense_block: 4,
    turned_rows: 3,
    sliced_twice: 2,
    alike: 5,
    square: 3,
    expanded: 2,
    twins: 4,
    of_constants: 2,
}
