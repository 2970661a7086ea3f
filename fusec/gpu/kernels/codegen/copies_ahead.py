"""Copy operands of a loop to shared memory some turns ahead of their use.

A compiler places loads next to their first use, so few of them are under way at the same time. Asynchronous copies need
no registers, and wait in shared memory for their turn.
"""

from __future__ import annotations

from dataclasses import field

from fusec.system.dataclass import dataclass

COPIED_BYTES = (4, 8, 16)  # by one asynchronous copy
ASYNCHRONOUS = 80  # the first architecture that has such copies


@dataclass
class CopiesAhead:
    """The copies of one turn of a loop, whose number is `turn` in C.

    depth: turns that are under way at the same time.
    block: threads of a block.
    statements: the copies, as C.
    nbytes: shared memory that they need.
    """

    depth: int
    block: int
    statements: list[str] = field(default_factory=list[str])
    nbytes: int = 0

    def add(self, pack: str, item: int, source: str) -> str:
        """Copy a pack ahead; return its place, as C.

        pack: its type. item: its bytes. source: its address, as C.
        """
        place = f"(ring + {self.nbytes}u + (turn % {self.depth}u * {self.block}u + threadIdx.x) * {item}u)"
        self.nbytes += self.depth * self.block * item
        self.statements.append(f"copy_ahead<{item}>({place}, {source});")
        return f"*reinterpret_cast<const {pack}*>{place}"
