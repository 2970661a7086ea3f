"""Test kernels over many tensors, in the emulator: pointwise lists and the search for what is not finite."""

from __future__ import annotations

import numpy as np
from gpu.kernels.cases import FIGURES, Case, awkward, build, check, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels import find
from fusec.gpu.kernels.elementwise import multi_tensor
from fusec.ir import DType, Graph, Value
from fusec.ops import AllFinite, Cast, pw

pytestmark = needs_compiler
SIZES = ((3, 5), (4096,), (2, 2049), (7, 3, 3), (5000,))


def updates(count: int = len(SIZES)) -> Case:
    """p + where(keep, rate * g, 0) with g cast from fp16, for tensors of several sizes."""
    shapes = [SIZES[i % len(SIZES)] for i in range(count)]
    types = [rows(DType.F32), rows(DType.BOOL)]
    for shape in shapes:
        types += [rows(DType.F32, *shape), rows(DType.F16, *shape)]

    def make(graph: Graph, rate: Value, keep: Value, *tensors: Value) -> list[Value]:
        results: list[Value] = []
        for p, g in zip(tensors[::2], tensors[1::2], strict=True):
            move = graph.add(pw("mul"), graph.add(Cast(DType.F32), g), rate)
            moved = graph.add(pw("add"), p, move)
            results += [move, graph.add(pw("where"), keep, moved, p)]
        return results

    return build(f"updates{count}", types, make)


def casts() -> Case:
    def make(graph: Graph, *tensors: Value) -> list[Value]:
        return [graph.add(Cast(DType.F16), x) for x in tensors]

    return build("casts", [rows(DType.F32, *shape) for shape in SIZES], make, awkward, exact=True)


def scalars() -> Case:
    """Members of one element each."""

    def make(graph: Graph, x: Value, y: Value) -> list[Value]:
        return [graph.add(pw("mul"), v, v) for v in (x, y)]

    return build("scalars", [rows(DType.F32), rows(DType.F32)], make)


def scaled(count: int = len(SIZES)) -> Case:
    """Members with factors of their own, which the kernel loads, and the first one's twice."""

    def make(graph: Graph, *tensors: Value) -> list[Value]:
        results: list[Value] = []
        for i, x in enumerate(tensors):
            factor = graph.constant(np.array(1 + 2 ** -(10 + i % 11 % 7), np.float32))
            results.append(graph.add(pw("add"), graph.add(pw("mul"), x, factor), x))
        return results

    return build(f"scaled{count}", [rows(DType.F32, *SIZES[i % len(SIZES)]) for i in range(count)], make)


def list_cases() -> list[Case]:
    return [updates(), casts(), scalars(), scaled(), finite()]


def finite() -> Case:
    kinds = (DType.F16, DType.F32, DType.F16, DType.BF16)
    shapes = ((3, 5), (40000,), (70001,), (9,))
    types = [rows(dtype, *shape) for dtype, shape in zip(kinds, shapes, strict=True)]
    return build("finite", types, lambda graph, *tensors: graph.add(AllFinite(), *tensors))


def test_lists(rng: np.random.Generator) -> None:
    cases = [updates(), casts(), scalars(), scaled()]
    for case in cases:
        kernel = case.kernel
        assert kernel is not None and kernel.name.startswith("lists") and len(kernel.launches) == 1
    check(cases, rng)


def test_more_pointers_than_a_launch_takes(rng: np.random.Generator) -> None:
    cases = [updates(140), scaled(200)]  # with four of its own each, and two that all share; with three
    for case in cases:
        kernel = case.kernel
        assert kernel is not None and len(kernel.launches) == 2
        assert all(len(launch.parameters) <= multi_tensor.MAX_POINTERS for launch in kernel.launches)
    check(cases, rng)


def test_all_finite(rng: np.random.Generator) -> None:
    case = finite()
    inputs = case.graph.inputs
    kernel = find(case.nodes, case.outputs, FIGURES)
    assert kernel is not None and len(kernel.launches) == 4
    emulator = Emulator([kernel])
    arrays = case.arrays(rng)
    (found,) = emulator.run(kernel, arrays, case.outputs)
    assert found
    for value, place, bad in zip(inputs, (14, 39999, 70000, 0), (np.inf, np.nan, -np.inf, np.nan), strict=True):
        spoilt = {v: a.copy() for v, a in arrays.items()}
        spoilt[value].reshape(-1)[place] = bad
        (found,) = emulator.run(kernel, spoilt, case.outputs)
        assert not found, value
