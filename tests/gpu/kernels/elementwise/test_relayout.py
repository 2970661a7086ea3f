"""Test kernels that move elements, alone and among pointwise ops, against the reference in the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.kernels.cases import Case, build, check, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, channels_last
from fusec.ops import Cast, Concat, Expand, Relayout, Reshape, Slice, Split, Transpose, pw

F32, F16, BF16, I64, BOOL = DType.F32, DType.F16, DType.BF16, DType.I64, DType.BOOL
NHWC = channels_last(4)


def relaid(g: Any, x: Any, order: tuple[int, ...]) -> Any:
    return g.insert(Relayout(order), [x]).result


def stored(g: Any, op: Any, x: Any, order: tuple[int, ...]) -> Any:
    """The op with its result in a memory order of one's choice."""
    (type,) = op.infer(x.type)
    return g.insert(op, [x], types=[type.with_order(order)]).result


def move_cases() -> list[Case]:
    cases: list[Case] = []
    for dtype in (F32, F16, BOOL, I64):
        for c in (1, 3, 4, 8, 40, 64):
            for size in ((2, c, 5, 7), (1, c, 33, 40)):
                to = build(f"to last {dtype} {size}", [rows(dtype, *size)], lambda g, x: relaid(g, x, NHWC))
                back = build(f"to rows {dtype} {size}", [last(dtype, *size)], lambda g, x: relaid(g, x, ()))
                cases += [to, back]
        for perm in ((0, 2, 1, 3), (3, 2, 1, 0), (0, 1, 3, 2), (1, 0, 2, 3)):
            x = rows(dtype, 2, 12, 9, 16)
            cases.append(build(f"transpose {dtype} {perm}", [x], lambda g, x, p=perm: g.add(Transpose(p), x)))
    for dtype in (F32, F16):
        cut = Slice((0, 1, 5, 0), (2, 4, 3, 6), (1, 2, -2, 1))
        cases.append(build(f"slice {dtype}", [last(dtype, 2, 9, 7, 6)], lambda g, x, c=cut: g.add(c, x)))
        back = Slice((0, 2, 0, 0), (1, 3, 1, 8), (1, -1, 1, 1))
        cases.append(build(f"backwards {dtype}", [rows(dtype, 1, 3, 1, 8)], lambda g, x, c=back: g.add(c, x)))
        whole = Slice((0, 8, 0, 0), (2, 8, 7, 6), (1, 1, 1, 1))
        cases.append(build(f"channels {dtype}", [last(dtype, 2, 24, 7, 6)], lambda g, x, c=whole: g.add(c, x)))
        cases.append(build(f"expand {dtype}", [rows(dtype, 5, 1, 8)], lambda g, x: g.add(Expand((3, 5, 4, 8)), x)))
        nothing = Slice((0, 0), (0, 4), (1, 1))
        cases.append(build(f"nothing {dtype}", [rows(dtype, 3, 4)], lambda g, x, c=nothing: g.add(c, x)))
        flat = Reshape((2, 8 * 35))
        cases.append(build(f"flatten {dtype}", [last(dtype, 2, 8, 5, 7)], lambda g, x, r=flat: g.add(r, x)))
        cases.append(
            build(f"flatten much {dtype}", [last(dtype, 1, 64, 9, 8)], lambda g, x: g.add(Reshape((64 * 72,)), x))
        )
        image = Reshape((2, 8, 5, 7))
        cases.append(build(f"image {dtype}", [rows(dtype, 2, 280)], lambda g, x, r=image: stored(g, r, x, NHWC)))
        for axis in (0, 1, 3):
            for kinds in ((last, last, last), (rows, last, rows)):
                shapes = [[2, 8, 5, 16] for _ in range(3)]
                for i, shape in enumerate(shapes):
                    shape[axis] = (8, 24, 3)[i]
                types = [kind(dtype, *shape) for kind, shape in zip(kinds, shapes, strict=True)]
                name = f"concat {dtype} {axis} {kinds[0].__name__}"
                cases.append(build(name, types, lambda g, *x, a=axis: g.add(Concat(a), *x)))
        twice = build(f"twice {dtype}", [last(dtype, 2, 8, 3, 3)], lambda g, x: g.add(Concat(1), x, x))
        pieces = build(
            f"split {dtype}", [last(dtype, 2, 24, 3, 3)], lambda g, x: g.insert(Split(1, (8, 3, 13)), [x]).results
        )
        cases += [twice, pieces]
    for case in cases:
        case.exact = True
    return cases


def among_pointwise_ops() -> list[Case]:
    def image(g: Any, x: Any) -> Any:
        scaled = g.add(pw("mul"), x, g.constant(np.array([0.5, 2.0, 3.0], np.float32).reshape(3, 1, 1)))
        return relaid(g, g.add(Cast(F16), scaled), NHWC)

    def wide_image(g: Any, x: Any, b: Any) -> Any:
        return g.add(pw("relu"), relaid(g, g.add(pw("add"), x, b), NHWC))

    def swiglu(g: Any, x: Any) -> Any:
        a, b = g.insert(Split(1, (16, 16)), [x]).results
        return g.add(pw("mul"), g.add(pw("swish"), a), b)

    def rotated(g: Any, x: Any, c: Any, s: Any) -> Any:
        half = Slice((0, 0, 8), (2, 6, 8), (1, 1, 1))
        other = Slice((0, 0, 0), (2, 6, 8), (1, 1, 1))
        return g.add(pw("sub"), g.add(pw("mul"), g.add(other, x), c), g.add(pw("mul"), g.add(half, x), s))

    def residual(g: Any, x: Any, y: Any) -> Any:
        return g.add(pw("add"), x, y)

    def joined(g: Any, x: Any, y: Any, c: Any) -> Any:
        token = g.constant(np.ones((2, 1, 24), x.type.dtype.numpy))
        return g.add(Concat(1), token, g.add(pw("add"), x, c), g.add(pw("relu"), g.add(pw("mul"), y, y)))

    cases = [build(f"image {s}", [rows(F32, *s)], image) for s in ((2, 3, 8, 9), (1, 3, 40, 40))]
    for dtype in (F32, F16):
        for c in (4, 20, 64):
            x = rows(dtype, 2, c, 9, 5)
            cases.append(build(f"wide image {dtype} {c}", [x, rows(dtype, c, 1, 1)], wide_image))
            cases.append(build(f"two orders {dtype} {c}", [x, last(dtype, 2, c, 9, 5)], residual))
            cases.append(build(f"orders two {dtype} {c}", [last(dtype, 2, c, 9, 5), x], residual))
        cases.append(build(f"swiglu {dtype}", [rows(dtype, 5, 32)], swiglu))
        parts = [rows(dtype, 2, 6, 24), rows(dtype, 2, 3, 24), rows(dtype, 1, 6, 24)]
        cases.append(build(f"joined {dtype}", parts, joined))
        cases.append(build(f"rotated {dtype}", [rows(dtype, 2, 6, 16), rows(dtype, 6, 8), rows(dtype, 6, 8)], rotated))
    return cases


def test_a_part_that_others_read_is_joined_by_a_kernel_of_its_own() -> None:
    def make(g: Any, x: Any, y: Any) -> Any:
        z = g.add(pw("relu"), x)
        return [g.add(Concat(0), z, y), z]

    assert build("read", [rows(F16, 2, 8), rows(F16, 3, 8)], make).kernel is None


@needs_compiler
def test_moves(rng: np.random.Generator) -> None:
    check(move_cases(), rng)


@needs_compiler
def test_moves_among_pointwise_ops(rng: np.random.Generator) -> None:
    check(among_pointwise_ops(), rng)


def test_rows_of_both_sides_go_through_a_tile() -> None:
    case = build("wide", [rows(F16, 2, 64, 28, 28)], lambda g, x: relaid(g, x, NHWC))
    narrow = build("narrow", [rows(F32, 2, 4, 28, 28)], lambda g, x: relaid(g, x, NHWC))
    assert case.kernel is not None and narrow.kernel is not None
    assert "tile0[32][33]" in case.kernel.launches[0].source
    assert "store_pack<float, 4>" in narrow.kernel.launches[0].source
