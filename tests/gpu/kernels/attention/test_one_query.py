"""Kernels of attention of one query against the reference, through the emulator."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.attention.test_attention_forward import attended
from gpu.kernels.cases import Case, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Attention

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


def masked(
    dtype: DType, heads: tuple[int, int, int], keys: int, features: int, seen: int, op: Attention | None = None
) -> Case:
    """Attention over a cache of which each image has filled another part: its bias hides the other keys.

    heads: images, heads of queries, and of keys. seen: keys of the first image.
    """
    batch, own, shared = heads
    hidden = np.arange(keys)[None] >= np.maximum(seen - 3 * np.arange(batch), 0)[:, None]
    bias = np.where(hidden, -np.inf, 0.0).astype(dtype.numpy)[:, None, None]

    def make(g: Graph, *x: Value) -> Value:
        return g.add(op or Attention(0.25), *x, g.constant(bias))

    types = [rows(dtype, batch, own, 1, features), *[rows(dtype, batch, shared, keys, features)] * 2]
    return build(f"{dtype.value} {heads} {keys} {features} {seen} {op}", types, make)


def one_query_cases() -> list[Case]:
    one = Attention(0.25)
    return [
        attended(F16, (1, 8, 2), (1, 300), (128, 128), one, bias=True),
        attended(BF16, (2, 4, 4), (1, 70), (64, 64), one, bias=True),
        attended(F16, (1, 3, 1), (1, 40), (32, 32), one, bias=True),
        attended(BF16, (1, 16, 2), (1, 65), (256, 256), one, bias=True),
        attended(F16, (2, 4, 1), (1, 260), (128, 128), one),
        masked(F16, (3, 8, 2), 300, 128, 9),
        masked(BF16, (2, 4, 2), 200, 64, 200, Attention(0.125, hides=True)),
        masked(F16, (3, 4, 2), 150, 128, 5, Attention(0.25, guarded=True)),  # no key for the last image
    ]


@needs_compiler
def test_all_variants_compute_attention(rng: np.random.Generator) -> None:
    check(one_query_cases(), rng, every=True)


@needs_compiler
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("op", [Attention(0.5), Attention(0.5, hides=True), Attention(0.5, guarded=True)])
def test_odd_numbers_give_what_the_op_defines(number: float, op: Attention, rng: np.random.Generator) -> None:
    """In the bias, in a key, and in a value that no query sees."""
    case = attended(F16, (1, 4, 2), (1, 280), (128, 128), op, bias=True)

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        x = rng.standard_normal(type.shape).astype(type.dtype.numpy)
        x.reshape(-1)[rng.integers(x.size)] = number if type.shape[2] != 1 or type.shape[3] == 280 else 1.0
        return x

    case.draw = draw
    check([case], rng, every=True)


def test_attention_of_more_queries_or_features_has_other_kernels() -> None:
    others = [
        attended(F16, (1, 4, 2), (2, 64), (128, 128), bias=True),
        attended(F16, (1, 4, 2), (1, 64), (96, 96), bias=True),
        attended(F16, (1, 4, 2), (1, 64), (128, 64), bias=True),
        attended(F16, (1, 18, 2), (1, 64), (128, 128), bias=True),
        attended(F32, (1, 4, 2), (1, 64), (128, 128), bias=True),
    ]
    for case in others:
        kernel = case.kernel
        assert kernel is None or "one_query" not in kernel.launches[0].entry, case.name


def test_blocks_fill_the_gpu_and_share_the_keys() -> None:
    kernel = masked(F16, (1, 32, 8), 2048, 128, 2000).kernel
    assert kernel is not None and kernel.launches[0].early
    assert {each.launches[0].grid for each in (kernel, *kernel.others)} >= {128, 256, 512}
    assert kernel.launches[0].grid > 132 > 128, "the first variant has a block for each multiprocessor"
