"""Place tensors of state next to each other, so that a group of them is sent in one message."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np

from fusec.ir import Array, DType, TensorType
from fusec.system.dataclass import dataclass

ALIGNMENT = 512  # bytes: that of CuPy's own allocations, which kernels and cuDNN may count on


@dataclass
class StateBlock:
    """Flat memory of several tensors of one dtype.

    parts: the memory of each tensor, by name.
    """

    memory: Array
    parts: dict[str, Array] = field(default_factory=dict[str, Array])


def blocks(xp: Any, tensors: Sequence[tuple[str, TensorType]], most_bytes: float = float("inf")) -> list[StateBlock]:
    """Allocate zeroed blocks for tensors, in their order. A block has one dtype.

    xp: the array module, numpy or cupy.
    most_bytes: largest size of a block with several tensors.
    """
    groups: list[list[tuple[str, TensorType]]] = []
    filled: list[int] = []
    last: dict[DType, int] = {}  # by dtype: the group that may have room
    for name, type in tensors:
        place, nbytes = last.get(type.dtype), _aligned(type)
        if place is None or filled[place] + nbytes > most_bytes:
            place = last[type.dtype] = len(groups)
            groups.append([])
            filled.append(0)
        groups[place].append((name, type))
        filled[place] += nbytes
    return [_block(xp, group) for group in groups]


def _block(xp: Any, tensors: Sequence[tuple[str, TensorType]]) -> StateBlock:
    memory = xp.zeros(sum(_aligned(type) for _, type in tensors), np.uint8)
    block = StateBlock(memory.view(tensors[0][1].dtype.numpy))
    start = 0
    for name, type in tensors:
        nbytes = type.size * type.dtype.itemsize
        block.parts[name] = memory[start : start + nbytes].view(type.dtype.numpy)
        start += _aligned(type)
    return block


def _aligned(type: TensorType) -> int:
    return -(-type.size * type.dtype.itemsize // ALIGNMENT) * ALIGNMENT
