"""Test kernels that read images between their pixels, against the reference, through the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.kernels.cases import FIGURES, Case, build, check, last, normal, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels import find
from fusec.ir import DType, Graph, TensorType
from fusec.ops import GridSample, pw

F32, F16, BF16, F64 = DType.F32, DType.F16, DType.BF16, DType.F64


def places(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Images are normal numbers. Places, which have as many coordinates as dims, lie in and around the image."""
    if type.shape[-1] != type.rank - 2:
        return normal(rng, type)
    odd = np.array([np.nan, -1.0, 1.0, 3.0, -1e9])
    grid = rng.uniform(-1.5, 1.5, type.shape)
    return np.where(rng.random(type.shape) < 0.05, rng.choice(odd, type.shape), grid).astype(type.dtype.numpy)


def random_case(rng: np.random.Generator, number: int) -> Case:
    n = int(rng.choice([1, 2, 2, 2, 3]))
    modes = ["nearest", "linear"] if n == 3 else ["nearest", "linear", "cubic"]
    op = GridSample(
        str(rng.choice(modes)),
        str(rng.choice(["zeros", "border", "reflection"])),
        str(rng.choice(["edges", "centres", "pixels"])),
    )
    dtype = rng.choice(np.array([F32, F16, BF16, F64], dtype=object))
    grid_dtype = F64 if dtype is F64 else F32  # of 16 bits, a place near a tie rounds to another pixel
    batch, channels = int(rng.integers(1, 3)), int(rng.choice([1, 3, 8]))
    # an image of other sizes than dims, so that `places` knows one from the other
    x = (last if rng.integers(3) == 0 else rows)(dtype, batch, channels, *map(int, rng.integers(4, 9, n)))
    grid = rows(grid_dtype, batch, *map(int, rng.integers(1, 7, n)), n)
    extra = bool(rng.integers(2))

    def make(g: Any, x: Any, grid: Any) -> Any:
        y = g.add(op, x, grid)
        return g.add(pw("relu"), g.add(pw("add"), y, y)) if extra else y

    return build(f"{number} {op} {x} {grid}", [x, grid], make, places)


def random_cases() -> list[Case]:
    fixed = np.random.default_rng(11)  # the same sources each time: they are compiled once
    return [random_case(fixed, i) for i in range(60)]


@needs_compiler
def test_random_places(rng: np.random.Generator) -> None:
    check(random_cases(), rng)


@needs_compiler
def test_nearest_pixels_of_integers_are_exact(rng: np.random.Generator) -> None:
    types = [rows(DType.I32, 2, 3, 5, 6), rows(F32, 2, 4, 7, 2)]
    case = build("integers", types, lambda g, x, at: g.add(GridSample("nearest"), x, at), places, exact=True)
    check([case], rng)


def test_one_launch_runs_the_op_and_what_follows() -> None:
    case = build(
        "launch",
        [rows(F16, 1, 64, 64, 64), rows(F32, 1, 64, 64, 2)],
        lambda g, x, at: g.add(pw("relu"), g.add(GridSample(), x, at)),
    )
    assert case.kernel is not None
    assert len(case.kernel.launches) == 1


def test_the_kernel_declines_many_taps_and_other_ops_before_it() -> None:
    types = [rows(F32, 1, 2, 4, 4, 4, 4), rows(F32, 1, 2, 2, 2, 2, 4)]
    assert build("taps", types, lambda g, x, at: g.add(GridSample("cubic"), x, at)).kernel is None
    graph = Graph("prologue")
    x = graph.add_input("x", rows(F32, 1, 2, 4, 4))
    at = graph.add_input("at", rows(F32, 1, 2, 2, 2))
    graph.set_outputs([graph.add(GridSample(), graph.add(pw("relu"), x), at)])
    nodes = tuple(graph.nodes)
    assert find(nodes, nodes[-1].results, FIGURES) is None
