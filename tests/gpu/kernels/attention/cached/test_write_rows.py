"""Test the kernel that writes rows by index, into new memory and in place, against the reference in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from gpu.kernels.cases import FLOATS, Case, assert_same, awkward, build, check, normal, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Reshape, Rotary, Scatter, Slice

Make = Callable[..., Sequence[Value]]


def places(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Indices of different rows, some counted from the end; other numbers as usual."""
    if not type.dtype.is_int or type.rank != 1:
        return awkward(rng, type)
    return (rng.permutation(17)[: type.size] - 5).astype(type.dtype.numpy)


def part(g: Graph, x: Value, start: int, count: int) -> Value:
    """Some heads of [1, heads, 1, features]."""
    return g.add(Slice((0, start, 0, 0), (1, count, 1, x.type.shape[3]), (1,) * 4), x)


def step(first: int, count: int, returned: bool = True) -> Make:
    """The rotary embedding of heads of which some go to one cache, and other rows that go to another."""

    def make(
        g: Graph, x: Value, cos: Value, sin: Value, keys: Value, at: Value, values: Value, v: Value
    ) -> list[Value]:
        rotated = g.add(Rotary(), x, cos, sin)
        k = g.add(Reshape((count, x.type.shape[3])), part(g, rotated, first, count))
        written = [g.add(Scatter(), keys, at, k), g.add(Scatter(), values, at, v)]
        return [rotated, *written] if returned else written

    return make


def types(dtype: DType, heads: int, count: int, features: int, index: DType = DType.I64) -> list[TensorType]:
    cache, angles = rows(dtype, 17, features), rows(dtype, 1, 1, features)
    new = rows(dtype, count, features)
    return [rows(dtype, 1, heads, 1, features), angles, angles, cache, rows(index, count), cache, new]


def two_embeddings(g: Graph, q: Value, x: Value, cos: Value, sin: Value, cache: Value, at: Value) -> list[Value]:
    """Rows of [batch, heads, 1, features] in a cache of [batch * heads, features], whose embedding is also read."""
    rotated = g.add(Rotary(), x, cos, sin)
    flat = g.add(Reshape((x.type.size // 6, 6)), rotated)
    again = g.add(Reshape((x.type.size // 6, 6)), g.add(Rotary(), q, cos, sin))
    return [g.add(Scatter(), cache, at, flat), rotated, g.add(Scatter(), cache, at, again)]


def queries(g: Graph, q: Value, x: Value, cos: Value, sin: Value, cache: Value, at: Value) -> list[Value]:
    """Rows of one embedding in a cache, and another embedding with the same angles."""
    rotated = g.add(Rotary(), x, cos, sin)
    return [g.add(Rotary(), q, cos, sin), g.add(Scatter(), cache, at, g.add(Reshape((x.type.size // 6, 6)), rotated))]


def cases() -> list[Case]:
    dtypes = (*FLOATS, DType.F64)
    found = [build(f"step {dtype.value}", types(dtype, 6, 2, 16), step(4, 2), places) for dtype in dtypes]
    odd = types(DType.F16, 5, 3, 6, DType.I32)
    found.append(build("a part that begins amid a vector, indices of 32 bits", odd, step(1, 3), places))
    found.append(build("an embedding that nothing else reads", types(DType.F16, 3, 3, 32), step(0, 3, False), places))
    for dtype, shape in ((DType.F16, (17, 5)), (DType.F32, (17, 2, 4)), (DType.I8, (17,)), (DType.BOOL, (17, 3))):
        alone = [rows(dtype, *shape), rows(DType.I64, 4), rows(dtype, 4, *shape[1:])]
        found.append(build(f"rows of {dtype.value} {shape}", alone, lambda g, *v: [g.add(Scatter(), *v)], places))
    heads, angles = rows(DType.F16, 2, 3, 1, 6), rows(DType.F16, 2, 1, 1, 6)
    pair = [heads, heads, angles, angles, rows(DType.F16, 17, 6), rows(DType.I64, 6)]
    found.append(build("two embeddings of a batch", pair, two_embeddings, places))
    many = [TensorType((2, 5, 1, 6), DType.F16, (0, 2, 1, 3)), *pair[1:]]
    found.append(build("queries of more heads than keys", many, queries, places))
    return found


@needs_compiler
def test_write_rows(rng: np.random.Generator) -> None:
    check(cases(), rng)


@needs_compiler
def test_it_writes_new_rows_alone_where_it_writes_over_the_operand(rng: np.random.Generator) -> None:
    case = cases()[0]
    kernel, arrays = case.kernel, case.arrays(rng)
    assert kernel is not None
    over = {v: v.node.operands[0] for v in case.outputs if v.node is not None and isinstance(v.node.op, Scatter)}
    assert len(over) == 2
    got = Emulator([kernel]).run(kernel, arrays, case.outputs, over)
    assert_same(case, got, case.reference(arrays))


@needs_compiler
def test_a_row_without_a_place_is_not_written(rng: np.random.Generator) -> None:
    made = [rows(DType.F32, 3, 4), rows(DType.I64, 3), rows(DType.F32, 3, 4)]
    case = build("outside", made, lambda g, *v: [g.add(Scatter(), *v)])
    kernel, arrays = case.kernel, case.arrays(rng)
    assert kernel is not None
    x, at, new = case.graph.inputs
    arrays[at] = np.array([3, 1, -4])
    (got,) = Emulator([kernel]).run(kernel, arrays, case.outputs)
    want = arrays[x].copy()
    want[1] = arrays[new][1]
    np.testing.assert_array_equal(got, want)


def test_it_begins_early_and_reads_after_the_launch_before() -> None:
    kernel = cases()[0].kernel
    assert kernel is not None
    (launch,) = kernel.launches
    assert launch.dependent
    body = launch.source.partition("wait_for_launches();")[2]
    for i, kind in enumerate(launch.parameters):
        assert not kind.startswith("const ") or f"a{i} = from_here(a{i});" in body


@pytest.mark.parametrize(
    ("made", "make"),
    [
        ([rows(DType.F32, 9, 4), rows(DType.I64, 3), rows(DType.F32, 3, 4)], lambda g, *v: [g.add(Scatter("add"), *v)]),
        (
            [TensorType((9, 4), DType.F32, (1, 0)), rows(DType.I64, 3), rows(DType.F32, 3, 4)],
            lambda g, *v: [g.add(Scatter(), *v)],
        ),
        (
            [rows(DType.F32, 999, 4), rows(DType.I64, 300), rows(DType.F32, 300, 4)],
            lambda g, *v: [g.add(Scatter(), *v)],
        ),
        (
            [rows(DType.F32, 9, 4), rows(DType.I64, 3), rows(DType.F32, 3, 4)],
            lambda g, x, at, new: [g.add(Scatter(), g.add(Scatter(), x, at, new), at, new)],
        ),
    ],
    ids=["sums", "columns", "many rows", "one after the other"],
)
def test_other_writes_are_left_to_other_kernels(made: list[TensorType], make: Make) -> None:
    kernel = build("other", made, make, normal).kernel
    assert kernel is None or not any(launch.entry.startswith("write_rows") for launch in kernel.launches)
