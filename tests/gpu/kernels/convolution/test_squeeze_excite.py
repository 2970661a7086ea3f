"""Test kernels of chains of small products, and of depthwise convolutions with the mean of what they give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, awkward, build, check, last, rows
from gpu.kernels.emulator import needs_compiler
from gpu.kernels.product.test_thin_product import constant

from fusec.gpu.autotune.fusion.fusion_proposals import is_joint_work, may_begin
from fusec.gpu.kernels.convolution.depthwise import depthwise_with_mean
from fusec.ir import DType, Graph, Value
from fusec.ops import Conv, MatMul, Reduce, pw

F32, F16, BF16, F64 = DType.F32, DType.F16, DType.BF16, DType.F64
ONE = Conv((1, 1), (0, 0, 0, 0), (1, 1))
POINT = Conv((1,), (0, 0), (1,))


def gated(g: Graph, x: Value, hidden: int, columns: int) -> Value:
    """Two convolutions of one place, a swish between, a sigmoid after."""
    channels, dtype, ones = x.type.shape[1], x.type.dtype, (1,) * (x.type.rank - 2)
    op = ONE if x.type.rank == 4 else POINT
    h = g.add(op, x, constant(g, dtype, hidden, channels, *ones))
    h = g.add(pw("swish", beta=1.0), g.add(pw("add"), h, constant(g, dtype, hidden, *ones)))
    y = g.add(op, h, constant(g, dtype, columns, hidden, *ones))
    return g.add(pw("sigmoid"), g.add(pw("add"), y, constant(g, dtype, columns, *ones)))


def chain(dtype: DType, samples: int, channels: int, hidden: int, columns: int, rank: int = 4) -> Case:
    x = last(dtype, samples, channels, *(1,) * (rank - 2))
    name = f"gate {dtype.value} {samples}x{channels} {hidden} {columns} rank {rank}"
    return build(name, [x], lambda g, x: gated(g, x, hidden, columns))


def products(samples: int, k: int, hidden: int, columns: int) -> Case:
    """Three matrices; what is between is read elsewhere, too, and something computed is added."""

    def make(g: Graph, x: Value, z: Value) -> list[Value]:
        y = g.add(pw("relu"), g.add(MatMul(), g.add(pw("tanh"), x), constant(g, F32, k, hidden)))
        u = g.add(pw("add"), g.add(MatMul(), y, constant(g, F32, hidden, columns)), z)
        return [y, g.add(pw("abs"), g.add(MatMul(), u, constant(g, F32, columns, 3)))]

    return build(f"products {samples} {k} {hidden}", [rows(F32, samples, k), rows(F32, samples, columns)], make)


def chains() -> list[Case]:
    return [
        chain(F16, 3, 32, 8, 32),
        chain(F16, 2, 96, 4, 96),
        chain(F16, 1, 1152, 48, 1152),
        chain(BF16, 2, 240, 10, 240),
        chain(F32, 2, 34, 7, 1100),
        chain(F64, 1, 9, 5, 3),
        chain(F16, 2, 20, 200, 10, rank=3),
        products(2, 20, 100, 30),
        products(3, 64, 64, 9),
    ]


def convolved(g: Graph, x: Value, window: int, stride: int, dilation: int = 1) -> tuple[Value, Value]:
    """A depthwise convolution with bias and swish, and its mean over space."""
    channels, n = x.type.shape[1], x.type.rank - 2
    w = constant(g, x.type.dtype, channels, 1, *(window,) * n)
    op = Conv((stride,) * n, (window // 2,) * (2 * n), (dilation,) * n, channels)
    y = g.add(pw("add"), g.add(op, x, w), constant(g, x.type.dtype, channels, *(1,) * n))
    y = g.add(pw("swish", beta=1.0), y)
    return y, g.add(Reduce("mean", tuple(range(2, n + 2))), y)


def with_means() -> list[Case]:
    def case(dtype: DType, shape: tuple[int, ...], window: int, stride: int, dilation: int = 1, **given: Any) -> Case:
        def make(g: Graph, x: Value) -> list[Value]:
            return list(convolved(g, x, window, stride, dilation))

        return build(f"{dtype.value} {shape} {window}/{stride} {dilation}", [last(dtype, *shape)], make, **given)

    return [
        case(F16, (2, 16, 9, 9), 3, 1),
        case(F16, (1, 40, 7, 7), 5, 1),
        case(F16, (2, 36, 8, 5), 5, 2),
        case(F16, (1, 9, 6, 6), 3, 2),
        case(BF16, (1, 264, 4, 3), 3, 1),
        case(F32, (2, 8, 11), 3, 1),
        case(F64, (1, 4, 3, 4, 5), 3, 1),
        case(F32, (2, 8, 12, 12), 3, 1, 2),
        case(F16, (3, 144, 20, 20), 3, 1),
        case(F32, (2, 12, 6, 6), 3, 1, draw=awkward),
    ]


def whole() -> list[Case]:
    """All of a squeeze-and-excitation but its product."""

    def make(g: Graph, x: Value) -> list[Value]:
        y, mean = convolved(g, x, 3, 1)
        return [y, gated(g, mean, 6, x.type.shape[1])]

    return [build(f"whole {shape}", [last(F16, *shape)], make) for shape in ((2, 24, 9, 9), (1, 144, 5, 6))]


def gate_cases() -> list[Case]:
    return [*chains(), *with_means(), *whole()]


@needs_compiler
@pytest.mark.parametrize("cases", [chains, with_means, whole])
def test_all_ways_give_the_same(cases: Any, rng: np.random.Generator) -> None:
    check(cases(), rng, every=True)


def test_a_strip_of_few_channels_competes_with_its_filters_in_registers() -> None:
    """It is the fastest for the first gated block of MobileNetV3, whose image is large and whose window is 5x5."""
    nodes = with_means()[2].nodes
    tiles = [source.tile for source in depthwise_with_mean(nodes, [nodes[-2].result], FIGURES)]
    assert [(tile.vector, tile.strip) for tile in tiles if tile.held and not tile.band and tile.strip > 4] == []
    nodes = with_means()[8].nodes
    tiles = [source.tile for source in depthwise_with_mean(nodes, [nodes[-2].result], FIGURES)]
    assert [(tile.vector, tile.strip) for tile in tiles if tile.held and not tile.band and tile.strip > 4] == [(2, 7)]


def test_what_begins_and_is_such_work() -> None:
    (case, _) = whole()
    nodes = case.nodes
    assert all(may_begin(nodes[:n], FIGURES) for n in range(1, len(nodes) + 1))
    assert [is_joint_work(nodes[:n]) for n in (1, 3, 4, len(nodes))] == [False, False, True, True]
    product = chain(F16, 3, 32, 8, 32).nodes
    assert may_begin(product[:1], FIGURES) and not is_joint_work(product[:3]) and is_joint_work(product[:4])


def test_others_are_left_alone() -> None:
    def large(g: Graph, x: Value) -> Value:
        return g.add(MatMul(), g.add(MatMul(), x, constant(g, F16, 1024, 1024)), constant(g, F16, 1024, 8))

    def small(g: Graph, x: Value) -> Value:
        return g.add(MatMul(), g.add(MatMul(), x, constant(g, F16, 8, 8)), constant(g, F16, 8, 8))

    def twice(g: Graph, x: Value) -> Value:
        y = g.add(MatMul(), x, constant(g, F16, 8, 8))
        return g.add(pw("add"), g.add(MatMul(), y, constant(g, F16, 8, 8)), y)

    def square(g: Graph, x: Value) -> Value:
        y = g.add(MatMul(), x, constant(g, F16, 8, 8))
        return g.add(MatMul(), y, y)

    assert build("too much", [rows(F16, 4, 1024)], large).kernel is None

    def mean_again(g: Graph, x: Value) -> list[Value]:
        y, mean = convolved(g, x, 3, 1)
        return [y, g.add(pw("mul"), gated(g, mean, 6, x.type.shape[1]), mean)]

    assert build("the mean again", [last(F16, 2, 24, 9, 9)], mean_again).kernel is None
    assert build("an earlier vector", [rows(F16, 4, 8)], twice).kernel is None
    assert build("of two vectors", [rows(F16, 8, 8)], square).kernel is None
    assert build("a matrix", [rows(F16, 4096, 8)], small).kernel is None
    rows_first = build("rows", [rows(F16, 2, 8, 6, 6)], lambda g, x: list(convolved(g, x, 3, 1)))
    assert rows_first.kernel is None
