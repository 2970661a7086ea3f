"""Choose tiles of products of many rows of 8-bit integers: which results of a product a block computes together.

All blocks run at the same time, so the one with most tiles decides how long a product takes.
"""

from __future__ import annotations

from typing import NamedTuple

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import ceil_div

PART = 128  # bytes of a row in a stage
THREADS = 128  # of a group
MORE_WORK = 1.15  # of a block than with the best tiles, up to which other tiles are tried


class Tiles(NamedTuple):
    """The tiles of a product.

    stages: parts of the depth whose operands fit into shared memory.
    groups: groups of four warps that multiply.
    """

    rows: int
    columns: int
    stages: int
    groups: int = 2

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread that copies, and of one that multiplies. Together they are all that there are."""
        return (24, 240) if self.groups == 2 else (56, 152)

    @property
    def free_registers(self) -> int:
        """Registers of a thread that multiplies, without its sums."""
        return self.registers[1] - self.rows * self.columns // (THREADS * self.groups)

    @property
    def stage_bytes(self) -> int:
        return (self.rows + self.columns) * PART

    def blocks(self, rows: int, columns: int, figures: GpuFigures) -> int:
        """Return the number of blocks: one for each multiprocessor, or for each tile where these are fewer."""
        return min(figures.processors, self.number(rows, columns))

    def number(self, rows: int, columns: int) -> int:
        return ceil_div(rows, self.rows) * (columns // self.columns)

    def work(self, rows: int, columns: int, figures: GpuFigures) -> int:
        """Return the results that the busiest block computes."""
        return ceil_div(self.number(rows, columns), figures.processors) * self.rows * self.columns


WIDE = (Tiles(128, 256, 4), Tiles(128, 192, 5), Tiles(192, 192, 4, 3))
NARROW = Tiles(128, 128, 6)  # reads rows more often, and is for columns that the others do not divide
FEW = Tiles(128, 64, 8)  # for few rows, where more blocks share the columns


def tiles_of(rows: int, columns: int, figures: GpuFigures) -> list[Tiles]:
    """Return the tiles to try, best first: those of which no block computes many more results than with the best ones.

    The first are the default, also where another input shape has other tiles to try.
    """
    if columns % NARROW.columns and not any(columns % tiles.columns == 0 for tiles in WIDE):
        return []
    found = [tiles for tiles in WIDE if columns % tiles.columns == 0] or [NARROW]
    if columns % FEW.columns == 0 and FEW.number(rows, columns) <= figures.processors:
        found.append(FEW)
    work = {tiles: tiles.work(rows, columns, figures) for tiles in found}
    return sorted((tiles for tiles in found if work[tiles] <= MORE_WORK * min(work.values())), key=work.__getitem__)
