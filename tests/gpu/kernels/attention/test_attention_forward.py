"""Test kernels of attention of few features against the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import Case, awkward, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels import GpuFigures
from fusec.gpu.kernels.attention.attention_forward import tilings_of
from fusec.gpu.kernels.codegen.wgmma import ARCHITECTURE
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Attention, Cast, Reshape, Slice, Transpose, pw
from fusec.targets.target import load

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


def attended(
    dtype: DType,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    features: tuple[int, int],
    op: Attention | None = None,
    bias: tuple[int, ...] = (),
) -> Case:
    """heads: images, heads of queries, and of keys; bias: its shape."""
    (batch, own, shared), (queries, keys), (depth, width) = heads, lengths, features
    types = [
        rows(dtype, batch, own, queries, depth),
        rows(dtype, batch, shared, keys, depth),
        rows(dtype, batch, shared, keys, width),
        *[rows(dtype, *bias)] * bool(bias),
    ]
    op = op or Attention(0.3)
    return build(f"{dtype.value} {heads} {lengths} {features} {op}", types, lambda g, *x: g.add(op, *x))


def packed(dtype: DType, queries: int, heads: int, features: int) -> Case:
    """Attention of one projection, with a transpose after it."""

    def make(g: Graph, x: Value) -> Value:
        width = heads * features
        parts: list[Value] = []
        for i in range(3):
            part = g.add(Slice((0, 0, i * width), (2, queries, width), (1, 1, 1)), x)
            part = g.add(Reshape((2, queries, heads, features)), part)
            parts.append(g.add(Transpose((0, 2, 1, 3)), part))
        y = g.add(Transpose((0, 2, 1, 3)), g.add(Attention(0.5), *parts))
        return g.add(Reshape((2, queries, width)), y)

    return build(f"packed {dtype.value}", [rows(dtype, 2, queries, 3 * heads * features)], make)


def rounded(dtype: DType, queries: int, features: int, op: Attention) -> Case:
    """Attention rounded to bytes by one scale, with a transpose after that."""

    def make(g: Graph, *x: Value) -> Value:
        y = g.add(pw("mul"), g.add(Cast(F32), g.add(op, *x)), g.constant(np.float32(41.7)))
        y = g.add(Cast(DType.I8), g.add(pw("clip", min=-128.0, max=127.0), g.add(pw("round"), y)))
        return g.add(Reshape((2, queries, 3 * features)), g.add(Transpose((0, 2, 1, 3)), y))

    types = [rows(dtype, 2, 3, queries, features)] * 3
    return replace(build(f"rounded {dtype.value} {queries} {op}", types, make), near=1 / 8)


def attention_cases() -> list[Case]:
    return [
        rounded(F16, 70, 40, Attention(0.3)),
        rounded(BF16, 20, 64, Attention(0.125, causal=True)),
        rounded(F16, 90, 64, Attention(0.3)),
        attended(F16, (1, 2, 1), (70, 90), (40, 40)),
        attended(BF16, (2, 1, 1), (33, 128), (16, 24), Attention(2.0)),
        attended(F16, (1, 1, 1), (5, 200), (48, 32), Attention(-1.0)),
        attended(F16, (1, 1, 1), (1, 3), (8, 8)),
        attended(F16, (1, 1, 1), (64, 1), (16, 16), Attention(50.0)),  # first scores far below -88, and far above 88
        attended(BF16, (1, 1, 1), (130, 64), (64, 64), Attention(0.125)),
        attended(F16, (1, 2, 2), (300, 300), (40, 24), Attention(0.3, causal=True)),
        attended(BF16, (1, 2, 1), (150, 330), (8, 16), Attention(1.0, causal=True)),
        attended(F16, (1, 1, 1), (290, 70), (16, 16), Attention(-0.5, causal=True)),
        attended(F16, (1, 1, 1), (9, 1000), (24, 8)),  # more rounds than lie in shared memory
        attended(F16, (1, 1, 1), (270, 450), (16, 8)),  # blocks that begin at different keys
        packed(F16, 20, 2, 40),
        packed(BF16, 70, 3, 8),
    ]


def rising(rng: np.random.Generator, operand: TensorType) -> np.ndarray:
    """Numbers that grow from row to row, so that sums are scaled anew again and again."""
    array = rng.standard_normal(operand.shape) + 0.5
    return (array * np.linspace(0.1, 2.0, operand.shape[2])[:, None]).astype(operand.dtype.numpy)


def hidden(rng: np.random.Generator, operand: TensorType) -> np.ndarray:
    """Positive queries of keys whose first 70 are minus infinity, and the others such that scores are about -60."""
    array = np.abs(rng.standard_normal(operand.shape)) + 0.1
    if operand.shape[2:] == (150, 24):
        array *= -10
        array[:, :, :70] = -np.inf
    return array.astype(operand.dtype.numpy)


@needs_compiler
def test_all_ways_give_the_same(rng: np.random.Generator) -> None:
    check(attention_cases(), rng, every=True)


@needs_compiler
def test_scores_that_grow_and_numbers_that_are_none(rng: np.random.Generator) -> None:
    first = attended(F16, (1, 2, 2), (40, 150), (24, 16))
    cases = [
        replace(first, draw=rising, name="rising"),
        replace(first, draw=awkward, name="awkward"),
        replace(attended(BF16, (1, 1, 1), (20, 70), (16, 16), Attention(2.0)), draw=rising),
    ]
    check(cases, rng, every=True)


@needs_compiler
def test_scores_of_minus_infinity_leave_the_rest_as_it_is(rng: np.random.Generator) -> None:
    case = attended(F16, (1, 1, 1), (40, 150), (24, 16))
    check([replace(case, draw=hidden)], rng, every=True)


@pytest.mark.parametrize(("op", "factor"), [("add", np.ones((20, 16), np.float16)), ("mul", np.ones(16, np.float16))])
def test_results_that_are_scaled_by_more_than_one_number_are_left_alone(op: str, factor: np.ndarray) -> None:
    def make(g: Graph, *x: Value) -> Value:
        return g.add(Cast(DType.I8), g.add(pw(op), g.add(Attention(0.3), *x), g.constant(factor)))

    assert build(op, [rows(F16, 1, 1, 20, 16)] * 3, make).kernel is None


def test_ways_on_hopper_alone_say_so() -> None:
    kernel = attended(F16, (2, 8, 8), (512, 512), (40, 40)).kernel
    assert kernel is not None and {k.launches[0].architecture for k in kernel.others} == {"", ARCHITECTURE}
    assert kernel.launches[0].architecture == "", "the first one runs everywhere"


@pytest.mark.parametrize(
    ("why", "case"),
    [
        ("fp32", attended(F32, (1, 1, 1), (9, 9), (8, 8))),
        ("odd features", attended(F16, (1, 1, 1), (9, 9), (12, 8))),
        ("many features", attended(F16, (1, 1, 1), (9, 9), (72, 8))),
        ("no keys", attended(F16, (1, 1, 1), (9, 0), (8, 8))),
    ],
)
def test_others_are_left_alone(why: str, case: Case) -> None:
    assert case.kernel is None, why


def test_rows_that_are_read_backwards_are_not_taken() -> None:
    """Negative strides would wrap around in the kernel's offsets, which have no sign."""

    def make(g: Graph, q: Value, k: Value, v: Value, step: int) -> Value:
        start = 0 if step > 0 else 8
        q = g.add(Slice((0, 0, start, 0), (1, 1, 9, 8), (1, 1, step, 1)), q)
        return g.add(Attention(0.3), q, k, v)

    operands = [rows(F16, 1, 1, 9, 8)] * 3
    assert build("forwards", operands, lambda g, q, k, v: make(g, q, k, v, 1)).kernel is not None
    assert build("backwards", operands, lambda g, q, k, v: make(g, q, k, v, -1)).kernel is None


def test_what_is_not_a_view_is_not_taken() -> None:
    def make(g: Graph, q: Value, k: Value, v: Value) -> Value:
        return g.add(pw("relu"), g.add(Attention(0.3), q, k, v))

    assert build("after", [rows(F16, 1, 1, 9, 8)] * 3, make).kernel is None


def test_blocks_have_as_many_warps_as_queries_fill() -> None:
    """Of BERT's 128 queries, and ViT's 197: no warp is idle, and one or two rounds have all keys."""
    for length, queries in ((128, {128}), (197, {208, 112}), (5, {16, 32})):
        tilings = tilings_of(length, length)
        assert {t.queries for t in tilings} == queries
        assert all(2 * t.keys >= length for t in tilings)
        assert any(t.keys >= length for t in tilings)
        assert any(t.step == t.keys for t in tilings) == (length <= 64)
    assert tilings_of(64, 257) == tilings_of(257, 64) == tilings_of(4096, 4096)


@pytest.mark.parametrize(("queries", "keys"), [(1, 256), (5, 200), (256, 256), (128, 128)])
@pytest.mark.parametrize("target", ["h200", "a100", "l4"])
def test_short_attention_has_a_kernel_on_every_gpu(target: str, queries: int, keys: int) -> None:
    case = replace(attended(F16, (1, 1, 1), (queries, keys), (64, 64)), figures=GpuFigures.of(load(target)))
    kernel = case.kernel
    assert kernel is not None
    assert all(k.launches[0].resident_bytes <= case.figures.dynamic_bytes for k in (kernel, *kernel.others))


@pytest.mark.parametrize(
    ("width", "rounds", "stores"), [(64, False, 16), (32, False, 16), (40, False, 4), (64, True, 16), (32, True, 2)]
)
def test_a_thread_stores_sixteen_bytes_where_rows_are_whole(width: int, rounds: bool, stores: int) -> None:
    case = rounded(F16, 20, width, Attention(0.3)) if rounds else attended(F16, (1, 1, 1), (20, 20), (width, width))
    assert case.kernel is not None
    assert ("octets" in case.kernel.launches[0].source) == (stores == 16)
