"""Test kernels of resize, gather and pad against the reference, through the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.kernels.cases import Case, awkward, build, check, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, TensorType, channels_last
from fusec.ops import Cast, Dilate, Gather, Pad, Relayout, Resize, pw

F32, F16, BF16, I64, I32, F64 = DType.F32, DType.F16, DType.BF16, DType.I64, DType.I32, DType.F64
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


def resize_cases() -> list[Case]:
    cases: list[Case] = []

    def add(op: Resize, type: TensorType, draw: Any = None) -> None:
        cases.append(build(f"{op} {type}", [type], lambda g, x: g.add(op, x), *([draw] if draw else [])))

    for coordinates in COORDINATES:
        for sizes in ((2, 8, 10, 12), (2, 8, 3, 4), (2, 8, 1, 6), (2, 8, 7, 5)):
            scales = tuple(s / n for s, n in zip(sizes, (2, 8, 5, 6), strict=True))
            for rounding in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil"):
                add(Resize(sizes, scales, "nearest", coordinates, rounding), last(F16, 2, 8, 5, 6))
            for type in (last(F16, 2, 8, 5, 6), rows(F32, 2, 8, 5, 6), last(F32, 2, 8, 5, 6)):
                add(Resize(sizes, scales, "linear", coordinates), type)
    add(Resize((1, 3, 8), (1.0, 1.0, 1.6), "linear"), rows(F64, 1, 3, 5))
    add(Resize((1, 4, 6, 8, 4), (1.0, 2.0, 2.0, 2.0, 1.0), "linear"), last(BF16, 1, 2, 3, 4, 4))
    add(Resize((2, 16, 10, 14), (1.0, 1.0, 2.0, 2.0), "nearest"), rows(F32, 2, 16, 5, 7))
    add(Resize((2, 16, 10, 14), (1.0, 1.0, 2.0, 2.0), "nearest", "asymmetric", "floor"), last(DType.I8, 2, 16, 5, 7))
    add(Resize((2, 6, 10), (1.0, 1.0, 2.0), "linear"), last(F32, 2, 6, 5), awkward)
    # threads have several turns: a number of channels that they share out evenly, and one that they do not
    for channels in (35, 36):
        add(Resize((1, channels, 160, 200), (1.0, 1.0, 40.0, 40.0), "linear"), rows(F16, 1, channels, 4, 5))
    sound = Resize((1, 1, 18_000), (1.0, 1.0, 300.0), "nearest", "asymmetric", "floor")  # no table is that long
    add(sound, rows(F32, 1, 1, 60))
    return cases


def pad_cases() -> list[Case]:
    cases: list[Case] = []
    for dtype in (F32, F16, I32):
        for kind in (last, rows):
            for pads in ((0, 0, 1, 2, 0, 0, 3, 0), (0, 0, 0, 0, 0, 5, 0, 0), (1, 1, 1, 1, 1, 1, 1, 1)):
                for mode in ("constant", "reflect", "edge", "wrap"):
                    if mode == "reflect" and pads[5] == 5:
                        continue
                    op = Pad(pads, mode, 2.0 if mode == "constant" else 0.0)
                    x = kind(dtype, 2, 3 if pads[5] else 8, 4, 5)
                    cases.append(build(f"{op} {x}", [x], lambda g, x, op=op: g.add(op, x), exact=True))
    for mode in ("reflect", "edge", "wrap"):  # sound, whose coordinates do not fit into a table
        sound, op = rows(F32, 1, 1, 17_000), Pad((0, 0, 400, 0, 0, 200), mode)
        cases.append(build(f"{op} {sound}", [sound], lambda g, x, op=op: g.add(op, x), exact=True))
    few, around = rows(F32, 2, 3), Pad((0, 7, 0, 8), "wrap")
    cases.append(build(f"{around} {few}", [few], lambda g, x: g.add(around, x), exact=True))
    return cases


def dilate_cases() -> list[Case]:
    cases: list[Case] = []
    for dtype in (F32, F16, I32):
        for kind, steps, sizes in (
            (last, (1, 1, 2, 2), (2, 8, 7, 10)),
            (last, (1, 1, 2, 3), (2, 8, 12, 13)),
            (rows, (1, 1, 2, 2), (2, 8, 8, 9)),
            (rows, (2, 3, 1, 1), (4, 22, 5, 5)),
        ):
            op, x = Dilate(steps, sizes), kind(dtype, 2, 8, 4, 5)
            name = f"dilate {kind.__name__} {dtype} {steps} {sizes}"
            cases.append(build(name, [x], lambda g, x, o=op: g.add(o, x), whole, exact=True))
    return cases


def whole(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    return rng.integers(-9, 9, type.shape).astype(type.dtype.numpy)


def gather_cases() -> list[Case]:
    cases: list[Case] = []

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        if type.dtype.is_int:
            return rng.integers(-6, 6, type.shape).astype(type.dtype.numpy)
        return rng.standard_normal(type.shape).astype(type.dtype.numpy)

    for dtype in (F32, F16):
        for axis, shape in ((0, (6, 40)), (1, (3, 6, 8)), (-1, (3, 4, 6)), (0, (6,)), (1, (2, 6, 3, 8))):
            for index in (rows(I64, 5), rows(I32, 2, 3), rows(I64), rows(I64, 0)):
                x = rows(dtype, *shape)
                name = f"gather {dtype} {axis} {shape} {index}"
                cases.append(build(name, [x, index], lambda g, x, i, a=axis: g.add(Gather(a), x, i), draw, exact=True))
        x = last(dtype, 2, 6, 3, 8)
        cases.append(
            build(f"last {dtype}", [x, rows(I64, 4)], lambda g, x, i: g.add(Gather(1), x, i), draw, exact=True)
        )
    return cases


def among_pointwise_ops() -> list[Case]:
    def image(g: Any, x: Any) -> Any:
        padded = g.add(Pad((0,) * 5 + (5, 0, 0)), g.add(Cast(F16), x))
        return g.insert(Relayout(channels_last(4)), [padded]).result

    def upsampled(g: Any, x: Any, z: Any) -> Any:
        up = g.add(Resize((2, 16, 8, 10), (1.0, 1.0, 2.0, 2.0), "linear"), g.add(pw("relu"), x))
        return g.add(pw("add"), up, z)

    def embedded(g: Any, t: Any, i: Any, p: Any) -> Any:
        return g.add(pw("add"), g.add(Gather(0), t, i), p)

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        array = rng.integers(0, 9, type.shape) if type.dtype.is_int else rng.standard_normal(type.shape)
        return array.astype(type.dtype.numpy)

    return [
        build("image", [rows(F32, 2, 3, 9, 7)], image),
        build("upsampled", [last(F16, 2, 16, 4, 5), last(F16, 2, 16, 8, 10)], upsampled),
        build("embedded", [rows(F16, 9, 24), rows(I64, 2, 5), rows(F16, 5, 24)], embedded, draw),
    ]


@needs_compiler
def test_resize(rng: np.random.Generator) -> None:
    check(resize_cases(), rng)


@needs_compiler
def test_pad(rng: np.random.Generator) -> None:
    check(pad_cases(), rng)


@needs_compiler
def test_dilate(rng: np.random.Generator) -> None:
    check(dilate_cases(), rng)


@needs_compiler
def test_gather(rng: np.random.Generator) -> None:
    check(gather_cases(), rng)


@needs_compiler
def test_pointwise_ops_around_them(rng: np.random.Generator) -> None:
    cases = among_pointwise_ops()
    check(cases, rng)
    assert cases[0].kernel is not None
    assert "store_pack<f16, 8>" in cases[0].kernel.launches[0].source, "an image's 3 channels become 8 in one store"
