"""Name the knobs of cuDNN's engines, for machines without cuDNN.

The numbers are those of `cudnn.knob_type` in cudnn-frontend 1.28; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping

from fusec.plans.plan_record import BLAS, Knobs

KNOBS: Mapping[int, str] = {
    1: "SWIZZLE",
    2: "TILE_SIZE",
    3: "EDGE",
    4: "MULTIPLY",
    5: "SPLIT_K_BUF",
    6: "TILEK",
    7: "STAGES",
    8: "REDUCTION_MODE",
    9: "SPLIT_K_SLC",
    10: "IDX_MODE",
    11: "SPECFILT",
    12: "KERNEL_CFG",
    13: "WORKSPACE",
    14: "TILE_CGA_M",
    15: "TILE_CGA_N",
    16: "BLOCK_SIZE",
    17: "OCCUPANCY",
    18: "ARRAY_SIZE_PER_THREAD",
    19: "SPLIT_COLS",
    20: "TILE_ROWS",
    21: "TILE_COLS",
    22: "LOAD_SIZE",
    23: "CTA_COUNT",
    24: "STREAM_K",
    25: "SPLIT_P_SLC",
    26: "TILE_M",
    27: "TILE_N",
    28: "WARP_SPEC_CFG",
    29: "SWAP_AB",
    30: "INPUT_TMA_ENABLE",
    31: "OUTPUT_TMA_ENABLE",
    32: "TILE_CGA",
}


def knobs_text(engine: int, knobs: Knobs) -> str:
    """Write knobs as `TILE_SIZE=2, STAGES=3`; those of cuBLASLt, which are attributes of an algorithm, by number."""
    names = {} if engine == BLAS else KNOBS
    return ", ".join(f"{names.get(knob, f'knob {knob}')}={value}" for knob, value in knobs)
