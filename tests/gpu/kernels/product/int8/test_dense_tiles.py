"""Test tiles of products of 8-bit integers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu.kernels.cases import FIGURES

from fusec.gpu.kernels.product.int8.dense_tiles import tiles_of


@pytest.mark.parametrize(
    ("rows", "columns", "tiles"),
    [
        (4096, 768, "128x192"),  # 128 tiles for 132 multiprocessors
        (4096, 3072, "128x256 128x192 192x192"),
        (6304, 768, "192x192"),  # 132 tiles, where 128 rows would take a second round
        (6304, 3072, "192x192 128x256"),
        (1536, 768, "128x192"),  # 144 tiles of 64 columns
        (1024, 768, "128x64"),
        (32, 3072, "128x64"),
        (9000, 128, "128x128"),
        (32, 64, ""),
        (4096, 160, ""),
    ],
)
def test_tiles_that_leave_multiprocessors_idle_are_not_tried(rows: int, columns: int, tiles: str) -> None:
    found = tiles_of(rows, columns, replace(FIGURES, processors=132))
    assert " ".join(f"{each.rows}x{each.columns}" for each in found) == tiles


def test_a_block_has_the_registers_and_the_memory_of_a_multiprocessor() -> None:
    for rows, columns in ((6304, 3072), (9000, 128), (64, 128)):
        for tiles in tiles_of(rows, columns, replace(FIGURES, processors=2)):
            copying, multiplying = tiles.registers
            assert 128 * (copying + tiles.groups * multiplying) <= 1 << 16
            assert tiles.stages * tiles.stage_bytes <= FIGURES.dynamic_bytes - 2048
