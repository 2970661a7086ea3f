"""Test kernels of convolutions with few filters against the reference, through the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import Case, build, check, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.errors import VerifyError
from fusec.gpu.kernels.convolution import few_filters
from fusec.ir import DType, TensorType, channels_last
from fusec.ops import Conv, Relayout, pw

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16


def convolved(
    name: str,
    x: TensorType,
    op: Conv,
    window: tuple[int, int],
    filters: int,
    constant: bool = True,
    epilogue: bool = True,
) -> Case:
    """A convolution; after it a bias, tanh and channels first."""
    dtype, taps = x.dtype, (filters, x.shape[1] // op.groups, *window)
    rng = np.random.default_rng(3)
    array = (rng.standard_normal(taps) / np.prod(taps[1:]) ** 0.5).astype(dtype.numpy)

    def make(g: Any, x: Any, *w: Any) -> Any:
        filter_ = w[0] if w else g.constant(array)
        if constant:
            g.set_type(filter_, filter_.type.with_order(channels_last(4)))
        y = g.add(op, x, filter_)
        if not epilogue:
            return y
        bias = g.constant(np.linspace(-1, 1, filters).astype(dtype.numpy).reshape(1, -1, 1, 1))
        return g.insert(Relayout((0, 1, 2, 3)), [g.add(pw("tanh"), g.add(pw("add"), y, bias))]).result

    # filters that are no constant lie as they come
    return build(name, [x] if constant else [x, rows(dtype, *taps)], make)


def pair(rng: np.random.Generator, high: int) -> tuple[int, int]:
    return int(rng.integers(1, high)), int(rng.integers(1, high))


def random_case(rng: np.random.Generator, number: int) -> Case:
    while True:
        window, dilations = (pair(rng, high) for high in (8, 3))
        pads, filters = tuple(map(int, rng.integers(0, 5, 4))), int(rng.integers(1, 9))
        shape = (int(rng.integers(1, 3)), int(rng.choice([16, 32, 48, 64])), *map(int, rng.integers(1, (16, 90))))
        dtype, constant, epilogue = (
            rng.choice(np.array([F16, BF16], dtype=object)),
            bool(rng.integers(4)),
            rng.integers(3),
        )
        op = Conv((1, 1), pads, dilations)
        name = f"{number} {op} {window} {filters} {dtype.value} {shape} {constant}"
        try:
            op.infer(last(dtype, *shape), rows(dtype, filters, shape[1], *window))
        except VerifyError:
            continue
        case = convolved(name, last(dtype, *shape), op, window, filters, constant, bool(epilogue))
        if case.kernel is not None:  # else the sums are too many for registers
            return case


def random_cases() -> list[Case]:
    fixed = np.random.default_rng(11)
    return [random_case(fixed, i) for i in range(12)]


def wide_cases() -> list[Case]:
    """Images that are wider than a block, the second by one pixel, and higher than a strip that is all unrolled."""
    op, half = Conv((1, 1), (3,) * 4, (1, 1)), Conv((1, 1), (1, 2, 0, 1), (2, 1))
    return [
        convolved("wide", last(F16, 1, 16, 9, 270), op, (7, 7), 3),
        convolved("by one pixel", last(BF16, 1, 16, 6, 257), half, (3, 3), 4),
        convolved("high", last(F16, 1, 32, 37, 18), op, (7, 7), 3),
    ]


@needs_compiler
def test_random_convolutions(rng: np.random.Generator) -> None:
    check([*random_cases(), *wide_cases()], rng)


@needs_compiler
@pytest.mark.parametrize(
    "shares", [(4, 1, 1), (4, 1, 9), (4, 1, 10), (4, 1, 11), (4, 1, 64), (8, 1, 2), (4, 2, 32), (8, 2, 4)], ids=str
)
def test_any_shares_give_the_same_result(
    shares: tuple[int, int, int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer and shorter strips, more and fewer pixels of a warp. A strip starts without the sums of the one above."""
    tiling = few_filters.FewFiltersTiling(*shares)
    monkeypatch.setattr(few_filters, "_likely_fastest", lambda conv, figures: tiling)
    op = Conv((1, 1), (3,) * 4, (1, 1))
    check([convolved(f"shares {shares}", last(F16, 2, 32, 45, 30), op, (7, 7), 3)], rng)


def test_the_estimate_chooses_one_tiling() -> None:
    case = convolved("head", last(F16, 32, 32, 256, 256), Conv((1, 1), (3,) * 4, (1, 1)), (7, 7), 3)
    assert case.kernel is not None and case.kernel.name == "few_filters+add+tanh+relayout"
    assert not case.kernel.others, "others were slower in every model measured"


@pytest.mark.parametrize(
    "case",
    [
        convolved("fp32", last(F32, 1, 16, 5, 5), Conv((1, 1), (1,) * 4, (1, 1)), (3, 3), 3),
        convolved("many filters", last(F16, 1, 16, 5, 5), Conv((1, 1), (1,) * 4, (1, 1)), (3, 3), 9),
        convolved("a stride", last(F16, 1, 16, 5, 5), Conv((2, 2), (1,) * 4, (1, 1)), (3, 3), 3),
        convolved("groups", last(F16, 1, 16, 5, 5), Conv((1, 1), (1,) * 4, (1, 1), 2), (3, 3), 4),
        convolved("odd channels", last(F16, 1, 24, 5, 5), Conv((1, 1), (1,) * 4, (1, 1)), (3, 3), 3),
        convolved("channels first", rows(F16, 1, 16, 5, 5), Conv((1, 1), (1,) * 4, (1, 1)), (3, 3), 3),
        convolved("too many sums", last(F16, 1, 16, 9, 9), Conv((1, 1), (3,) * 4, (1, 1)), (7, 7), 8),
    ],
    ids=lambda case: case.name,
)
def test_others_are_left_alone(case: Case) -> None:
    assert case.kernel is None
