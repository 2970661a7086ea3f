"""Test batch norms whose result is applied by a later step, by a factor and a term for each channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gpu.kernels.cases import Case, build, check, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, TensorType, Value
from fusec.ops import BatchNormTrain, Cast, pw

F32, F16 = DType.F32, DType.F16


def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Normal numbers around a mean that is not zero; parameters are positive."""
    array = rng.standard_normal(type.shape)
    return (array + 0.5 if type.rank > 1 else 0.5 + np.abs(array)).astype(type.dtype.numpy)


def factors(g: Any, x: Value, s: Value, b: Value) -> Sequence[Value]:
    """Make the statistics of a norm, and its factor and term."""
    _, mean, inverse = g.insert(BatchNormTrain(1e-3), [x, s, b]).results
    factor = g.add(pw("mul"), inverse, s)
    return factor, g.add(pw("sub"), b, g.add(pw("mul"), mean, factor)), mean, inverse


def with_residual(g: Any, x: Value, s: Value, b: Value, z: Value, factor: Value, term: Value) -> Sequence[Value]:
    """Make a norm, and add another image times a factor plus a term."""
    y, mean, inverse = g.insert(BatchNormTrain(1e-3), [x, s, b]).results
    scaled = g.add(pw("mul"), g.add(Cast(F32), z), factor)
    normed = g.add(Cast(F16), g.add(pw("add"), scaled, term))
    return g.add(pw("relu"), g.add(pw("add"), y, normed)), mean, inverse


def cases() -> list[Case]:
    found: list[Case] = []
    for shape in ((3, 16, 9, 5), (2, 24, 4, 4), (5, 40, 12)):
        for kind in (last, rows):
            x, p, numbers = kind(F16, *shape), rows(F32, shape[1]), rows(F32, 1, shape[1], *(1,) * (len(shape) - 2))
            name = f"{kind.__name__} {shape}"
            found.append(build(f"factors {name}", [x, p, p], factors, draw))
            found.append(build(f"residual {name}", [x, p, p, x, numbers, numbers], with_residual, draw))
    return found


@needs_compiler
def test_factors_and_a_residual_that_they_norm(rng: np.random.Generator) -> None:
    check(cases(), rng, every=True)
