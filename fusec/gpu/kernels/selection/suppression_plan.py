"""Choose the sizes of the kernel of non-maximum suppression, and the places in its scratch memory."""

from __future__ import annotations

import math

from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import ceil_div, power_of_two
from fusec.system.dataclass import dataclass

KEY_BYTES = 8
TILE = 64  # boxes that are compared with as many others, one bit for each pair
TILE_BYTES = TILE * TILE // 8
MAX_COLUMNS = 16  # of a panel: larger panels compare more pairs in vain, smaller ones need more launches


@dataclass(frozen=True)
class SuppressionPlan:
    """Sizes of the kernel for some boxes.

    most: boxes that a class chooses at most.
    columns: tiles along the side of a panel.
    sorted_keys: keys that a block sorts in shared memory, a power of two.
    """

    boxes: int
    most: int
    columns: int
    sorted_keys: int

    @classmethod
    def of(cls, boxes: int, most: int, figures: GpuFigures) -> SuppressionPlan:
        """Return the sizes for a GPU."""
        tiles = figures.dynamic_bytes // TILE_BYTES
        columns = max(1, (math.isqrt(8 * tiles + 1) - 1) // 2)  # a panel has columns * (columns + 1) / 2 tiles
        keys = power_of_two(figures.dynamic_bytes // KEY_BYTES + 1) // 2
        return cls(boxes, most, min(columns, MAX_COLUMNS, ceil_div(boxes, TILE)), min(power_of_two(boxes), keys))

    @property
    def tiles(self) -> int:
        """Tiles of a panel whose rows are not after their columns."""
        return self.columns * (self.columns + 1) // 2

    @property
    def panels(self) -> int:
        return ceil_div(self.boxes, TILE * self.columns)

    @property
    def spills(self) -> bool:
        """True if scratch memory holds the keys, because there may be too many for shared memory."""
        return self.boxes > self.sorted_keys

    @property
    def order(self) -> int:
        """The word of the scratch memory where the numbers of the sorted boxes begin."""
        return 2 + self.most

    @property
    def answers(self) -> int:
        return self.order + self.boxes + (self.order + self.boxes) % 2  # 64 bits each

    @property
    def gone(self) -> int:
        return self.answers + TILE_BYTES // 4 * self.tiles

    @property
    def keys(self) -> int:
        return self.gone + 2 * self.columns

    @property
    def words(self) -> int:
        """Words of scratch memory of a class."""
        return self.keys + (KEY_BYTES // 4 * power_of_two(self.boxes) if self.spills else 0)
