"""The kernel of the rotary embedding against the reference, through the emulator."""

from __future__ import annotations

import numpy as np
from gpu.kernels.cases import FLOATS, Case, awkward, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, TensorType
from fusec.ops import Rotary, pw


def cases() -> list[Case]:
    found: list[Case] = []
    for dtype in (*FLOATS, DType.F64):
        for x, angles in (((2, 3, 5, 16), (5, 16)), ((2, 3, 5, 6), (1, 1, 5, 6)), ((4, 2), (1,)), ((7, 32), (7, 1))):
            types = [rows(dtype, *x), rows(dtype, *angles), rows(dtype, *angles)]
            found.append(build(f"rotary {dtype.value} {x}", types, lambda g, *v: g.add(Rotary(), *v)))
    heads = TensorType((2, 4, 5, 16), DType.F16, (0, 2, 1, 3))
    types = [heads, rows(DType.F16, 5, 16), rows(DType.F16, 5, 16), heads]
    found.append(build("heads", types, lambda g, x, c, s, z: g.add(pw("add"), g.add(Rotary(), x, c, s), z)))
    found.append(build("odd", types[:3], lambda g, *v: g.add(Rotary(), *v), awkward))
    return found


@needs_compiler
def test_rotary(rng: np.random.Generator) -> None:
    check(cases(), rng)
