"""Generate a norm in one launch whose blocks keep their elements on the chip.

This skeleton holds what group norm and batch norm have in common: the order of their steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from fusec.gpu.kernels.codegen.kernel import Arguments


class ResidentNorm(ABC):
    """A norm whose blocks read their elements once and exchange sums in between."""

    def resident_body(self, arguments: Arguments) -> list[str]:
        """Return the steps of a block. Arguments are numbered in the order in which steps use them."""
        return [
            *self.sum_elements(arguments),
            *self.load_early(arguments),
            *self.store_sums(arguments),
            *self.meet(arguments),
            *self.merge_sums(arguments),
            *self.write_elements(arguments),
        ]

    @abstractmethod
    def sum_elements(self, arguments: Arguments) -> list[str]:
        """Load the block's elements, keep them, and sum those of each thread."""

    def load_early(self, arguments: Arguments) -> list[str]:
        """Load what the last steps need while sums are merged."""
        return []

    @abstractmethod
    def store_sums(self, arguments: Arguments) -> list[str]:
        """Merge the sums of the block's threads, and store them where the other blocks read them."""

    @abstractmethod
    def meet(self, arguments: Arguments) -> list[str]:
        """Wait for the blocks that have elements of the same numbers."""

    @abstractmethod
    def merge_sums(self, arguments: Arguments) -> list[str]:
        """Merge the sums of those blocks, and compute statistics and factors."""

    @abstractmethod
    def write_elements(self, arguments: Arguments) -> list[str]:
        """Compute the results of the elements that the block keeps, and store them."""


def meet_at_counter(arguments: Arguments, teams: int, team: str, blocks: int, number: str) -> list[str]:
    """Wait for the other blocks of a team at its counter in memory; alone, only for the block's threads.

    team: number of the block's team, as C.
    number: number of the block in its team, as C.
    """
    if blocks == 1:
        return ["__syncthreads();"]
    return [
        f"wait_for_blocks({arguments.barrier_counters(teams)} + {team} * COUNTER_STRIDE, {blocks}u, {number} == 0u);"
    ]
