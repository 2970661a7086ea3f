"""Generate the products of attention by single warps.

Scores, weights and sums are in registers. Thread 4g + t of a warp has rows g and g + 8 of each sixteen rows. In these
rows it has columns 2t and 2t + 1 of each eight columns.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import C_TYPES, ceil_div
from fusec.ir import DType
from fusec.system.dataclass import dataclass

PACK = 8  # neighbours of a row that one copy moves: an octet
_CUDA = cuda_template(__package__, "mma.cuh")


@dataclass(frozen=True)
class AttentionTiling:
    """Shares of an attention: blocks, warps, queries and keys.

    warps: warps of a block.
    tiles: tiles of 16 queries that each warp has.
    keys: keys that are copied together.
    step: keys that are scored together.
    resident: blocks that a multiprocessor must have room for.
    grouped: four warps multiply together (Hopper).
    """

    warps: int
    tiles: int
    keys: int
    step: int
    resident: int
    grouped: bool = False

    @property
    def queries(self) -> int:
        """Queries of a block."""
        return self.warps * self.tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32


@dataclass(frozen=True)
class WarpTiles:
    """Keys and values as rows in shared memory, from which warps load tiles of 8 x 8.

    views: memory of queries, keys and values.
    before_wait: statements of each round before it waits for keys and values.
    """

    tiling: AttentionTiling
    views: Sequence[View]
    before_wait: Sequence[str] = ()

    @property
    def weight(self) -> str:
        """The sums of weights of a tile; each column has the sum of its row."""
        return "weight[a]"

    @property
    def query_octets(self) -> int:
        """Octets of a query in registers."""
        return self.octets(0)

    def octets(self, operand: int) -> int:
        return self.views[operand].shape[3] // PACK

    @property
    def rounds(self) -> int:
        """Rounds that visit all keys."""
        return ceil_div(self.views[1].shape[2], self.tiling.keys)

    @property
    def stages(self) -> int:
        """Rounds whose keys and values are in shared memory together."""
        return min(2, self.rounds)

    @property
    def shared_bytes(self) -> int:
        """Bytes for the keys and values of all stages."""
        return self.stages * (self._size(1) + self._size(2)) * 2

    def _size(self, operand: int) -> int:
        """Return the elements of a round's keys, or values, in shared memory."""
        return self.tiling.keys * self._pitch(operand)

    def _pitch(self, operand: int) -> int:
        """Return the elements from one key, or value, to the next. An odd number of octets avoids bank conflicts."""
        octets = self.octets(operand)
        return (octets + 1 - octets % 2) * PACK

    @property
    def holes(self) -> dict[str, Filling]:
        """Figures of all parts of the kernel."""
        tiling, keys = self.tiling, self.views[1].shape[2]
        return {
            "TYPE": C_TYPES[self.views[0].dtype],
            "TILES": tiling.tiles,
            "THREADS": tiling.threads,
            "KEYS": tiling.keys,
            "STEP": tiling.step,
            "STAGES": self.stages,
            "KEY_COUNT": keys,
            "KEYS_FIT": c_bool(keys % tiling.keys == 0),
            "KEYS_SIZE": self._size(1),
            "VALUES_SIZE": self._size(2),
            "VALUE_OCTETS": self.octets(2),
            "ONE": "0x3f803f80" if self.views[0].dtype is DType.BF16 else "0x3c003c00",  # two ones
        }

    def preamble(self) -> list[str]:
        """Return the lines before the kernel."""
        return []

    def declare(self) -> list[str]:
        """Declare shared memory, and the sums of a thread."""
        return _CUDA("declare_warp", **self.holes)

    def loop(self, weigh: list[str]) -> list[str]:
        """Loop over all keys and values.

        weigh: the statements that turn scores into weights.
        """
        cuda = _CUDA.bind(**self.holes)
        return cuda(
            "loop_of_warps",
            BEFORE_WAIT=self.before_wait,
            COPY_FIRST=self._copy_round("0", "0"),
            COPY_NEXT=self._copy_round("(round + 1u)", f"((round + 1u) % {self.stages}u)"),
            SCORE=self._by_octets(1, "score_pair", "score_last"),
            WEIGH=weigh,
            ACCUMULATE=self._by_octets(2, "accumulate_pair", "accumulate_last"),
        )

    def _copy_round(self, round: str, stage: str) -> list[str]:
        lines: list[str] = []
        for operand, memory, shared in ((1, "k", "all_keys"), (2, "v", "all_values")):
            octets, threads = self.octets(operand), self.tiling.threads
            pieces = self.tiling.keys * octets
            lines += _CUDA(
                "copy",
                **self.holes,
                AT_ROUND=round,
                AT_STAGE=stage,
                TURNS=ceil_div(pieces, threads),
                OCTETS=octets,
                PITCH=self._pitch(operand),
                SHARED=shared,
                SIZE=self._size(operand),
                PIECES=pieces,
                PIECES_FIT=c_bool(pieces % threads == 0),
                MEMORY=memory,
                STRIDE=self.views[operand].strides[2],
            )
        return [*lines, "copied();"]

    def _by_octets(self, operand: int, pair: str, last: str) -> list[str]:
        """Multiply by two octets of keys, or values, at a time."""
        octets = self.octets(operand)
        return [
            line
            for octet in range(0, octets, 2)
            for line in _CUDA(
                pair if octet + 1 < octets else last, **self.holes, PITCH=self._pitch(operand), OCTET=octet
            )
        ]
