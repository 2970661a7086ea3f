"""The kernel of the gradients of a batch norm, a relu and a max pool, through the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu.kernels.cases import Case, build, check, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, TensorType, Value
from fusec.ops import BatchNormBackward, MaxPoolBackward

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
STEM = ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1))  # window, strides, pads and dilations


def gradients(*pool: Any) -> Any:
    """Make the step of a pool with these attributes."""

    def make(g: Any, dy: Value, y: Value, *v: Value) -> Sequence[Value]:
        return g.insert(BatchNormBackward(True), [g.add(MaxPoolBackward(*pool), dy, y), *v]).results

    return make


def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw numbers on both sides of zero, some of them equal; parameters are positive."""
    array = rng.standard_normal(type.shape)
    return (np.round(4 * array) / 4 if type.rank > 1 else 0.5 + np.abs(array)).astype(type.dtype.numpy)


def case(dtype: DType, channels: int, sides: tuple[int, int], pooled: tuple[int, int], *pool: Any) -> Case:
    x, p = last(dtype, 3, channels, *sides), rows(F32, channels)
    dy = last(dtype, 3, channels, *pooled)
    return build(f"{dtype} {channels} {sides} {pool}", [dy, x, x, p, p, p, p], gradients(*pool), draw)


def cases() -> list[Case]:
    return [
        case(F16, 64, (14, 10), (7, 5), *STEM),
        case(BF16, 16, (9, 11), (5, 6), *STEM),
        case(F16, 8, (8, 8), (4, 4), (2, 2), (2, 2), (0, 0, 0, 0), (1, 1)),
        case(F16, 32, (9, 7), (7, 5), (3, 3), (1, 1), (0, 0, 0, 0), (1, 1)),
    ]


@needs_compiler
def test_gradients_of_norm_relu_and_pool(rng: np.random.Generator) -> None:
    for each in cases():
        assert each.kernel is not None and len(each.kernel.launches) == 3, each.name
    check(cases(), rng)
