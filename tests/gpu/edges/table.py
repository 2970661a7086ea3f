"""The table: rows for every op that cuDNN or a kernel runs, by their titles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from gpu.edges import families, moves, pointwise, products, reductions
from gpu.edges.empty import empties
from gpu.edges.row import Row

PARTS = (
    pointwise.pointwise,
    pointwise.casts,
    pointwise.chosen,
    pointwise.epilogues,
    products.matmuls,
    products.integer_matmuls,
    products.dense_bytes,
    products.packed_matmuls,
    products.few_rows,
    products.streamed_weights,
    products.convolutions,
    products.attentions,
    products.rotaries,
    products.recurrents,
    families.families,
    reductions.reductions,
    reductions.softmaxes,
    reductions.row_norms,
    reductions.channel_norms,
    reductions.pools,
    reductions.all_finite,
    moves.moves,
    moves.random_bits,
    empties,
)


@cache
def table() -> Mapping[str, Row]:
    """Every row by its title."""
    rows: dict[str, Row] = {}
    for row in _rows():
        assert row.name not in rows, f"two rows are called {row.name}"
        rows[row.name] = row
    return rows


def _rows() -> Iterator[Row]:
    for part in PARTS:
        yield from part()
