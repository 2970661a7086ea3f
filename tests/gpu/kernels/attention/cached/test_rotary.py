"""Test the kernel of the rotary embedding against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gpu.kernels.cases import FLOATS, Case, awkward, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Rotary, Slice, pw


def part(start: int) -> Callable[..., Value]:
    """Some of the heads of a packed projection."""

    def make(g: Graph, x: Value, cos: Value, sin: Value) -> Value:
        heads = g.add(Slice((0, start, 0, 0), (2, 4, 5, 16), (1,) * 4), x)
        return g.add(Rotary(), heads, cos, sin)

    return make


def columns(g: Graph, x: Value, cos: Value, sin: Value) -> Value:
    return g.add(Rotary(), g.add(Slice((0, 0, 12), (2, 5, 16), (1,) * 3), x), cos, sin)


def cases() -> list[Case]:
    found: list[Case] = []
    for dtype in (*FLOATS, DType.F64):
        for x, angles in (((2, 3, 5, 16), (5, 16)), ((2, 3, 5, 6), (1, 1, 5, 6)), ((4, 2), (1,)), ((7, 32), (7, 1))):
            types = [rows(dtype, *x), rows(dtype, *angles), rows(dtype, *angles)]
            found.append(build(f"rotary {dtype.value} {x}", types, lambda g, *v: g.add(Rotary(), *v)))
    heads = TensorType((2, 4, 5, 16), DType.F16, (0, 2, 1, 3))
    types = [heads, rows(DType.F16, 5, 16), rows(DType.F16, 5, 16), heads]
    found.append(build("heads", types, lambda g, x, c, s, z: g.add(pw("add"), g.add(Rotary(), x, c, s), z)))
    packed = TensorType((2, 9, 5, 16), DType.F16, (0, 2, 1, 3))
    found += [build(f"four heads of more from {i} on", [packed, *types[1:3]], part(i)) for i in (0, 3)]
    wide = [rows(DType.F16, 2, 5, 40), *types[1:3]]
    found.append(build("columns of more, which begin amid a vector", wide, columns))
    found.append(build("odd", types[:3], lambda g, *v: g.add(Rotary(), *v), awkward))
    return found


@needs_compiler
def test_rotary(rng: np.random.Generator) -> None:
    check(cases(), rng)


def test_it_begins_early_and_reads_after_the_launch_before() -> None:
    for case in cases():
        assert case.kernel is not None
        (launch,) = case.kernel.launches
        assert launch.dependent
        body = launch.source.partition("wait_for_launches();")[2]
        for i, kind in enumerate(launch.parameters):
            assert not kind.startswith("const ") or f"a{i} = from_here(a{i});" in body
