"""Test copies of long rows that 16 bytes do not divide, through the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import Case, awkward, build, check, last, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, Value
from fusec.ops import Cast, Concat, Slice
from fusec.text import parse

DTYPES = (DType.U8, DType.F16, DType.BF16, DType.F32, DType.I64)


def concat(dtype: DType, *sizes: int, images: int = 3) -> Case:
    types = [rows(dtype, images, size, 7) for size in sizes]
    return build(f"{dtype} {sizes}", types, lambda g, *x: g.add(Concat(1), *x), awkward, exact=True)


def sliced(dtype: DType, size: int, start: int, stop: int) -> Case:
    def make(g: Any, x: Value) -> Value:
        return g.add(Slice((0, start), (3, stop - start), (1, 1)), x)

    return build(f"{dtype} {start}:{stop}", [rows(dtype, 3, size)], make, awkward, exact=True)


def short(dtype: DType, images: int, nbytes: int) -> Case:
    """Copy the first elements of short rows, of which a block copies several."""
    size = -(-nbytes // dtype.itemsize) | 1

    def make(g: Any, x: Value) -> Value:
        return g.add(Slice((0, 0), (images, size), (1, 1)), x)

    return build(f"{dtype} {images} rows of {size}", [rows(dtype, images, size + 3)], make, awkward, exact=True)


HEADS = """graph "heads" (%x: f16[2,824,3,5]{0,2,3,1}, %z: f16[2,824,2,2]{0,2,3,1}) {
  %a = slice(%x) {starts=[0, 0, 0, 0], sizes=[2, 819, 3, 5], steps=[1, 1, 1, 1]} : f16[2,819,3,5]{0,2,3,1}
  %b = reshape(%a) {shape=[2, 9, 91, 3, 5]} : f16[2,9,91,3,5]{0,3,4,1,2}
  %c = transpose(%b) {perm=[0, 3, 4, 1, 2]}
  %d = reshape(%c) {shape=[2, 135, 91]}
  %e = slice(%z) {starts=[0, 0, 0, 0], sizes=[2, 819, 2, 2], steps=[1, 1, 1, 1]} : f16[2,819,2,2]{0,2,3,1}
  %f = reshape(%e) {shape=[2, 9, 91, 2, 2]} : f16[2,9,91,2,2]{0,3,4,1,2}
  %g = transpose(%f) {perm=[0, 3, 4, 1, 2]}
  %h = reshape(%g) {shape=[2, 36, 91]}
  %y = concat(%d, %h) {axis=1}
  return %y
}"""


def heads() -> Case:
    """Join slices of channels of two images, as a detector does whose filters are padded."""
    return Case("heads", parse(HEADS), awkward, exact=True)


def row(start: int) -> Case:
    """Copy one short row."""
    type = rows(DType.U8, 1500 + start)
    return build(f"one row from {start}", [type], lambda g, x: g.add(Slice((start,), (1500,), (1,)), x), exact=True)


def random_cases() -> list[Case]:
    fixed = np.random.default_rng(31)  # the same sources each time: they are compiled once
    sizes = [fixed.integers(74, 1500, 3) * 2 + 1 for _ in range(3)]
    joined = [concat(dtype, *map(int, some)) for dtype in DTYPES for some in sizes]
    joined += [short(dtype, images, size) for dtype in DTYPES for images, size in ((7, 1025), (3, 2049), (33, 1601))]
    joined += [heads(), row(3)]
    return [*joined, *(sliced(dtype, 5001, start, 5001 - 11 * start) for dtype in DTYPES for start in (1, 2, 3))]


def copies_whole_words(case: Case) -> bool:
    return case.kernel is not None and "_cut(" in case.kernel.launches[0].source


@needs_compiler
def test_random_rows(rng: np.random.Generator) -> None:
    cases = random_cases()
    assert all(map(copies_whole_words, cases))
    check(cases, rng)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (concat(DType.F16, 160, 320), "16 bytes divide all"),
        (concat(DType.F16, 9, 11), "rows are short"),
        (concat(DType.I4, 301, 1001), "bytes hold several elements"),
        (sliced(DType.F16, 5008, 8, 4000), "16 bytes divide the start and the row"),
        (build("", [rows(DType.F16, 3, 1001)], lambda g, x: g.add(Cast(DType.F32), x)), "elements change"),
        (build("", [last(DType.F16, 2, 31, 65, 3)] * 2, lambda g, *x: g.add(Concat(1), *x)), "pixels are short"),
    ],
)
def test_other_moves_keep_the_pointwise_code(case: Case, reason: str) -> None:
    assert case.kernel is not None and not copies_whole_words(case), reason


def test_another_batch_needs_no_other_source() -> None:
    one, two = (concat(DType.F16, 301, 1001, images=n).kernel for n in (2, 4))
    assert one is not None and two is not None
    assert one.launches[0].source == two.launches[0].source and two.launches[0].grid == 2 * one.launches[0].grid
