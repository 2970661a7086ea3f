"""Add a bias to the scores of attention, as a table of places gives it, or a mask of shifted windows.

Each thread loads what it adds before it waits for keys and values, because the loads need about as long as the copies.
"""

from __future__ import annotations

import math

from fusec.gpu.kernels.attention.mma_source import AttentionTiling
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.indexing import View
from fusec.ir import DType, Value
from fusec.system.dataclass import dataclass

MOST_LOADED = 256  # keys of a round, times a warp's tiles: with more, bias and scores do not fit into registers
LARGEST = "3e38f"  # of finite numbers that are added; larger ones of bf16 would become infinite
_CUDA = cuda_template(__package__, "attention_forward.cuh")


@dataclass(frozen=True)
class ScoreBias:
    """A tensor of 16 bits that is added to scores.

    view: memory of the bias, with the shape of all scores.
    hides: minus infinity replaces a score, even NaN.
    """

    value: Value
    view: View
    hides: bool

    @property
    def fits(self) -> bool:
        """Tell if offsets fit into 32 bits without a sign."""
        reach = sum((size - 1) * stride for size, stride in zip(self.view.shape, self.view.strides, strict=True))
        return min(self.view.strides) >= 0 and reach + self.view.start < 1 << 31

    def load(self, tiling: AttentionTiling) -> list[str]:
        """Load what is added to the scores of a round of keys."""
        count, (_, _, query, key) = self.view.shape[3], self.view.strides
        has_pairs = key == 1 and not any(n % 2 for n in (*self.view.strides[:3], self.view.start, count))
        pair = _CUDA("bias_pair" if has_pairs else "bias_singles", BIAS_KEY=key, KEY_COUNT=count)
        return _CUDA(
            "load_bias",
            TILES=tiling.tiles,
            KEYS=tiling.keys,
            BIAS_QUERY=query,
            QUERY_COUNT=self.view.shape[2],
            LOAD_PAIR=pair,
        )

    def holes(self, cuda: CudaTemplate, scale: str) -> dict[str, Filling]:
        """Fill in how scores become powers of two with what was loaded added.

        scale: what scores are multiplied by.
        """
        added = f"own * {math.log2(math.e)!r}f"
        if self.view.dtype is DType.BF16:
            added = f"fabsf(own) == INFINITE ? own : clipped({added}, -{LARGEST}, {LARGEST})"
        return {
            "DECLARE_WHOLE": cuda("declare_whole"),
            "SCALE_PAIR": cuda("scale_and_add", SCALE=scale, HIDES=c_bool(self.hides), ADDED=added),
            "MEASURED": "whole",
            "MOVE_WHOLE": cuda("move_whole"),
            "RAISE_OFFSET": cuda("raise_whole"),
        }


def without_bias(cuda: CudaTemplate, scale: str) -> dict[str, Filling]:
    """Fill in how scores become powers of two where nothing is added; they stay relative to the offset of their row."""
    return {
        "DECLARE_WHOLE": "",
        "SCALE_PAIR": cuda("scale", SCALE=scale),
        "MEASURED": "scores",
        "MOVE_WHOLE": "",
        "RAISE_OFFSET": cuda("raise_relative"),
    }
