"""Test attention over a cache that the same step writes into, against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, assert_same, build, check, each_way, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels import GpuFigures, Kernel, find
from fusec.ir import DType, Graph, Op, TensorType, Value
from fusec.ops import Attention, Reshape, Rotary, Scatter, Slice, Transpose, pw
from fusec.schedule.program import outputs_of
from fusec.targets.target import load

F16, BF16, I64 = DType.F16, DType.BF16, DType.I64
A100 = GpuFigures.of(load("a100"))
Heads = tuple[int, int, int]  # images, heads of queries, heads of keys


def drawn(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Indices of different rows, a bias that hides most keys, and normal numbers.

    Of many keys the first ones are hidden, of others the last ones, so that parts have no key that is seen.
    """
    if type.dtype.is_int:
        return rng.permutation(type.size * 2)[: type.size].astype(type.dtype.numpy)
    if type.shape[-2] == 1 and type.rank == 4 and type.shape[1] == 1 and type.shape[3] % 16:
        keys = np.arange(type.shape[3])
        hidden = keys < 900 if len(keys) > 1000 else keys > len(keys) // 3
        hidden = hidden | (rng.random(type.shape) < 0.3)
        return np.where(hidden, -np.inf, 0.0).astype(type.dtype.numpy)
    return rng.standard_normal(type.shape).astype(type.dtype.numpy)


def placed(keys: int) -> Callable[[np.random.Generator, TensorType], np.ndarray]:
    """Draw places of one new row for each sequence of `keys` keys, in turn from the end or the start."""

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        if not type.dtype.is_int:
            return drawn(rng, type)
        at = np.arange(type.size) * keys + rng.integers(0, keys, type.size)
        return np.where(np.arange(type.size) % 2, at - type.size * keys, at).astype(type.dtype.numpy)

    return draw


def rotated(
    dtype: DType, heads: Heads, keys: int, features: int, op: Attention | None = None, bias: bool = True
) -> Case:
    """Embeddings of queries and keys: one of joined products for one image, else two."""
    batch, own, shared = heads
    joined = batch == 1

    def make(g: Graph, x: Value, k: Value, cos: Value, sin: Value, *more: Value) -> list[Value]:
        old_keys, old_values, at, v, *mask = more
        y = g.add(Rotary(), x, cos, sin)
        q = g.add(Slice((0, 0, 0, 0), (1, own, 1, features), (1,) * 4), y) if joined else y
        k = g.add(Rotary(), k, cos, sin) if not joined else y
        k = g.add(Slice((0, own, 0, 0), (1, shared, 1, features), (1,) * 4), k) if joined else k
        new = g.add(Scatter(), old_keys, at, g.add(Reshape((batch * shared, features)), k))
        present = g.add(Reshape((batch, shared, keys, features)), new)
        values = g.add(Reshape((batch, shared, keys, features)), g.add(Scatter(), old_values, at, v))
        return [present, values, g.add(op or Attention(0.125), q, present, values, *mask)]

    angles, cache = rows(dtype, batch, 1, 1, features), rows(dtype, batch * shared * keys, features)
    types = [rows(dtype, batch, own + shared * joined, 1, features), rows(dtype, batch, shared, 1, features)]
    types += [angles, angles, cache, cache, rows(I64, batch * shared), rows(dtype, batch * shared, features)]
    types += [rows(dtype, batch, 1, 1, keys)] if bias else []
    return build(f"{dtype.value} {heads} {keys} {features} {op} {bias}", types, make, placed(keys))


def apart(dtype: DType, heads: Heads, keys: int, features: int) -> Case:
    """Embeddings of queries and of keys apart, or none, and queries that are a part of a row."""
    batch, own, shared = heads

    def make(g: Graph, x: Value, k: Value, old_keys: Value, old_values: Value, at: Value, v: Value) -> list[Value]:
        part = g.add(Slice((0, 0, features), (batch, 1, own * features), (1,) * 3), x)
        q = g.add(Reshape((batch, own, 1, features)), part)
        new = g.add(Scatter(), old_keys, at, k)
        present = g.add(Reshape((batch, shared, keys, features)), new)
        values = g.add(Reshape((batch, shared, keys, features)), g.add(Scatter(), old_values, at, v))
        return [new, values, g.add(Attention(0.125), q, present, values)]

    cache, fresh = rows(dtype, batch * shared * keys, features), rows(dtype, batch * shared, features)
    types = [rows(dtype, batch, 1, own * features + features), fresh, cache, cache, rows(I64, batch * shared), fresh]
    return build(f"apart {dtype.value} {heads} {keys} {features}", types, make, drawn)


def cached_cases() -> list[Case]:
    """Cases for a GPU with clusters, and for one without."""
    return [*hopper_cases(), *(replace(case, figures=A100) for case in hopper_cases())]


def hopper_cases() -> list[Case]:
    return [
        rotated(F16, (1, 8, 2), 300, 128),
        rotated(BF16, (2, 4, 4), 70, 64),
        rotated(F16, (2, 9, 1), 1020, 32, Attention(0.25, hides=True)),
        rotated(F16, (1, 2, 2), 33, 16, bias=False),
        apart(F16, (2, 4, 2), 130, 64),
        apart(BF16, (1, 3, 1), 257, 48),
    ]


@needs_compiler
def test_all_variants_compute_attention_and_the_cache(rng: np.random.Generator) -> None:
    cases = cached_cases()
    check(cases, rng, every=True)
    assert any(launch.cluster > 1 for case in cases for way in ways(case) for launch in way.launches)


def ways(case: Case) -> list[Kernel]:
    assert case.kernel is not None
    other = replace(case, figures=A100).kernel
    return [*each_way(case.kernel), *([] if other is None or case.figures is A100 else each_way(other))]


@needs_compiler
def test_it_writes_new_rows_alone_where_it_writes_over_the_operand(rng: np.random.Generator) -> None:
    """The rows that stay are poisoned in the reference's operand, so a copy of them would be seen."""
    case = rotated(F16, (1, 8, 2), 300, 128)
    arrays = case.arrays(rng)
    over = dict(zip(case.outputs, case.graph.inputs[4:6], strict=False))
    assert [v.type.size for v in over] == [v.type.size for v in over.values()]
    for way in ways(case):
        got = Emulator([way]).run(way, arrays, case.outputs, over)
        assert_same(case, got, case.reference(arrays))


@needs_compiler
def test_a_row_without_a_place_is_not_written(rng: np.random.Generator) -> None:
    case = apart(F16, (1, 4, 2), 130, 32)
    arrays = case.arrays(rng)
    old, at = case.graph.inputs[2], case.graph.inputs[4]
    arrays[at] = np.array([260, -261])
    for way in ways(case):
        keys, *_ = Emulator([way]).run(way, arrays, case.outputs)
        np.testing.assert_array_equal(keys, arrays[old])


@needs_compiler
def test_the_last_of_several_rows_with_one_place_is_written(rng: np.random.Generator) -> None:
    """Tuning draws such indices, and compares variants."""
    case = apart(F16, (2, 8, 4), 130, 32)
    arrays = case.arrays(rng)
    arrays[case.graph.inputs[4]] = np.array([1, 0, 1, 0, 0, 1, 2, 3])
    for way in ways(case):
        got = Emulator([way]).run(way, arrays, case.outputs)
        assert_same(case, got, case.reference(arrays))


@needs_compiler
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_odd_numbers_give_what_the_op_defines(number: float, rng: np.random.Generator) -> None:
    """In the bias, in a key and in a value that no query sees, and in the new rows."""
    case = rotated(F16, (1, 4, 2), 280, 32)
    for place in range(len(case.graph.inputs)):
        arrays = case.arrays(rng)
        array = arrays[case.graph.inputs[place]]
        if array.dtype.kind == "f":
            array.reshape(-1)[rng.integers(array.size)] = number
            with np.errstate(all="ignore"):
                want = case.reference(arrays)
            assert_same(case, Emulator([ways(case)[0]]).run(ways(case)[0], arrays, case.outputs), want)


@needs_compiler
def test_without_any_key_the_result_is_not_a_number(rng: np.random.Generator) -> None:
    case = rotated(F16, (1, 4, 2), 280, 32)
    arrays = case.arrays(rng)
    arrays[case.graph.inputs[-1]][...] = -np.inf
    for way in ways(case):
        *_, attended = Emulator([way]).run(way, arrays, case.outputs)
        assert np.isnan(attended.astype(np.float32)).all()


def before_the_wait(kernel: Kernel) -> str:
    (launch,) = kernel.launches
    assert launch.dependent
    return launch.source.partition("wait_for_launches();")[0]


def decode_step(computes: bool, cache: Op | None = None, shape: tuple[int, ...] = (128, 32)) -> Kernel | None:
    """The kernel of a step whose queries a node before computes, and whose cache is an op of an input of this shape."""
    case = rotated(F16, (1, 4, 2), 64, 32)
    graph, first = case.graph, next(iter(case.graph.nodes))
    x, old = case.graph.inputs[0], case.graph.inputs[4]
    before = [(x, x, pw("neg"))] if computes else []
    before += [(old, graph.add_input("cache", TensorType(shape, F16)), cache)] if cache is not None else []
    nodes = set(case.nodes)
    for value, source, op in before:
        uses = list(value.uses)
        made = graph.add(op, source, before=first)
        for node, index in uses:
            graph.set_input(node, index, made)
    nodes = tuple(node for node in graph.nodes if node in nodes)
    return find(nodes, outputs_of(nodes), FIGURES)


@pytest.mark.parametrize(
    ("is_early", "step"),
    [
        (True, lambda: decode_step(True)),
        (True, lambda: decode_step(True, Reshape((128, 32)), (1, 2, 64, 32))),
        (False, lambda: decode_step(False)),
        (False, lambda: decode_step(True, pw("neg"))),
        (False, lambda: decode_step(True, Transpose((1, 0)), (32, 128))),
    ],
    ids=["input", "view", "queries given", "computed", "copied"],
)
def test_the_cache_is_requested_before_the_wait_if_an_earlier_call_wrote_it(
    is_early: bool, step: Callable[[], Kernel | None]
) -> None:
    kernel = step()
    assert kernel is not None
    assert ("copy_or_zeros_ahead(" in before_the_wait(kernel)) == is_early


@pytest.mark.parametrize(
    "case",
    [
        rotated(DType.F32, (1, 4, 2), 64, 32),
        rotated(F16, (1, 4, 2), 64, 24),
        rotated(F16, (1, 4, 2), 64, 272),
        rotated(F16, (1, 4, 2), 64, 32, Attention(0.5, guarded=True)),
        rotated(F16, (1, 4, 2), 64, 32, Attention(0.5, causal=True)),
        rotated(F16, (1, 33, 1), 64, 32),
    ],
    ids=lambda case: case.name,
)
def test_other_attention_has_no_such_kernel(case: Case) -> None:
    assert case.kernel is None


def test_the_first_variant_fills_the_gpu() -> None:
    """Clusters have as many blocks as every GPU can start. Their shared memory leaves no room for other blocks."""
    case = rotated(F16, (1, 32, 8), 2048, 128)
    assert case.kernel is not None
    launches = [launch for way in each_way(case.kernel) for launch in way.launches]
    assert {(launch.grid, launch.cluster) for launch in launches} == {(64, 8)}
    (small,) = ways(rotated(F16, (1, 4, 2), 64, 32))[0].launches
    assert min(launch.resident_bytes for launch in [*launches, small]) >= 1 << 17
    others = [launch for way in ways(replace(case, figures=A100)) for launch in way.launches]
    assert others[0].grid == 128 and {launch.cluster for launch in others} == {1}
    assert rotated(F16, (1, 32, 8), 2304, 128).kernel is None
    many = rotated(F16, (16, 32, 8), 2048, 128).kernel
    assert many is not None
    assert {way.launches[0].cluster for way in each_way(many)} == {1}, "blocks of clusters would run in turns"
